# SPDX-License-Identifier: Apache-2.0
"""The words model on one GPU: what `make quickstart-gpu` learns, by seed and by what is trained how.

    python -m benchmarks.words [--seeds 0 1 2] [--variants words ...] [--set FIELD=VALUE ...]

Writes the table of docs/words.md and docs/words.png (held-out reward against minutes of training). A run that is
finished is not made again. Needs `dvc repro data/words/dvc.yaml`; all seeds begin with that base model.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

from benchmarks.docs import put_table
from benchmarks.trained_runs import train

PAGE, SCRIPT = Path("docs/words.md"), "words.py"
GOAL = 0.9
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FASTER, NOISIEST = [f"{ACTOR}.optim.lr=2.0e-5"], "algorithm.timestep_fraction"
AVERAGED = f"{ACTOR}.ema={{enable: true, decay: 0.95, update_interval: 1}}"
CLIPPED = [f"{ACTOR}.optim.clip_grad=0.2", f"{ACTOR}.optim.betas=[0.9, 0.95]"]
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "words": ("words", []),
    "words, LoRA": (
        "words",
        [
            "actor_rollout_ref.model.lora_rank=32",
            "data.train_batch_size=32",
            f"{ACTOR}.ppo_mini_batch_size=8",
            f"{ACTOR}.use_kl_loss=false",
            f"{ACTOR}.kl_loss_coef=0.0",
            f"{ACTOR}.optim.lr=1.0e-3",
            f"{ACTOR}.diffusion_loss.nft_beta=0.1",
        ],
    ),
    "words-flow-grpo": ("words-flow-grpo", []),
    "words, KL .2": ("words", [f"{ACTOR}.kl_loss_coef=0.2"]),
    "words, KL .1, the batch's deviation": ("words", [f"{ACTOR}.kl_loss_coef=0.1", "algorithm.global_std=true"]),
    "words, 2e-5, KL .1, clipped": ("words", [*FASTER, f"{ACTOR}.kl_loss_coef=0.1", *CLIPPED]),
    "words, 2e-5, KL .1, averaged": ("words", [*FASTER, f"{ACTOR}.kl_loss_coef=0.1", AVERAGED]),
    "words, noisiest .6": ("words", [f"{NOISIEST}=0.6"]),
    "words, 2e-5, KL .1, noisiest .6": ("words", [*FASTER, f"{ACTOR}.kl_loss_coef=0.1", f"{NOISIEST}=0.6"]),
    "words, 2e-5, noisiest half, averaged, clipped": ("words", [*FASTER, f"{NOISIEST}=0.5", AVERAGED, *CLIPPED]),
    "words, colours trained too": (
        "words",
        [f"{NOISIEST}=0.5", AVERAGED, "reward.functions.ink_and_paper.guard=false"],
    ),
}
"""Name -> recipe and what is changed of it; docs/words.md has what came of them, of the last nothing yet."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        held_out: iteration -> how OCR reads the held-out words; 0 is before training.
        seconds: iteration -> how long it took, its validation included.
        images: pictures an iteration.
    """

    variant: str
    seed: int
    held_out: dict[int, float]
    seconds: dict[int, float]
    images: float

    def minutes(self, iteration: int) -> float:
        """Of training, until the end of that iteration."""
        return sum(value for step, value in self.seconds.items() if step <= iteration) / 60

    def minutes_to_goal(self) -> float | None:
        """None where no validation reached the goal."""
        reached = [step for step, reward in sorted(self.held_out.items()) if reward >= GOAL]
        return self.minutes(reached[0]) if reached else None


def trained(variant: str, seed: int, settings: Sequence[str]) -> Curve:
    """Train in a process of its own, and read what MLflow has of it."""
    recipe, changes = VARIANTS[variant]
    given = [*changes, *settings, f"trainer.seed={seed}"]
    _, client, run = train(recipe, given)

    def history(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}

    images = max(history("perf/total_num_images").values())
    return Curve(variant, seed, history("val/reward/ocr/mean"), history("timing_s/step"), images)


def table(curves: Iterable[Curve]) -> str:
    """A row for each variant."""
    of_variant: dict[str, list[Curve]] = {}
    for curve in curves:
        of_variant.setdefault(curve.variant, []).append(curve)
    lines = [
        f"| Variant | Seeds | Held-out reward before | after, each seed | Iterations | Minutes to {GOAL}, each seed "
        "| Minutes in all | Seconds an iteration | Pictures a second |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in of_variant.items():
        before = sum(run.held_out[0] for run in runs) / len(runs)
        after = ", ".join(f"{run.held_out[max(run.held_out)]:.3f}" for run in runs)
        to_goal = ", ".join("not reached" if (m := run.minutes_to_goal()) is None else f"{m:.1f}" for run in runs)
        iterations = max(max(run.seconds) for run in runs)
        total = ", ".join(f"{run.minutes(iterations):.1f}" for run in runs)
        seconds = median(value for run in runs for value in run.seconds.values())
        seeds = ", ".join(str(run.seed) for run in runs)
        lines.append(
            f"| {variant} | {seeds} | {before:.3f} | {after} | {iterations} | {to_goal} | {total} | {seconds:.1f} "
            f"| {runs[0].images / seconds:.0f} |"
        )
    return "\n".join(lines)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Held-out reward against minutes of training, one colour a variant, a line a seed."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    variants = list(dict.fromkeys(curve.variant for curve in curves))
    named = set()
    for curve in curves:
        steps = sorted(curve.held_out)
        label = None if curve.variant in named else curve.variant
        named.add(curve.variant)
        axes.plot(
            [curve.minutes(step) for step in steps],
            [curve.held_out[step] for step in steps],
            "o-",
            color=f"C{variants.index(curve.variant)}",
            label=label,
        )
    axes.axhline(GOAL, color="0.7", linewidth=1)
    axes.set(xlabel="minutes of training", ylabel="held-out OCR reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, plot, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["words"])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in every run")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes; the plot goes beside it")
    given = parser.parse_args()
    curves = [trained(variant, seed, given.set) for variant in given.variants for seed in given.seeds]
    plot(curves, given.page.with_suffix(".png"))
    put_table(given.page, SCRIPT, table(curves))
    print(table(curves))


if __name__ == "__main__":
    main()
