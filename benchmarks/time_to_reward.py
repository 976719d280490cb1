# SPDX-License-Identifier: Apache-2.0
"""Minutes and pictures to a held-out reward: the train flow beside the public Flow-GRPO loop, on one GPU.

    python -m benchmarks.time_to_reward [--runs words ...] [--seeds 0] [--until 0.8] [--limit 900] [--set F=V ...]
    python -m benchmarks.time_to_reward --write [--log FILE ...]

One run after the other trains the words base model with the same prompts, reward and reward processes, batch and LoRA,
until its held-out reward is reached or `--limit` seconds have passed since its command began. The public loop is
`benchmarks/public_training.py`, with its published settings and with those of the recipe `words-flow-grpo`; the train
flow has the same two, and DiffusionNFT with LoRA and with all weights. Guards are left out. Each iteration is a line of
JSON in --log; a run that reached its reward is not made again. `--write` trains nothing and puts the table of all logs
into docs/words.md. Needs `dvc repro data/words/dvc.yaml`.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.docs import put_table, refuse_missing
from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import Curve, Job, append_line, curves_of, folder_of, follow, is_done, read_lines
from benchmarks.local_services import ending_at_sigterm
from benchmarks.words import PAGE, VARIANTS, only_rewards
from tasks.config.recipes import changed_recipe

SCRIPT = "time_to_reward.py"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
AS_PUBLISHED = [
    f"{ROLLOUT}.algo={{sde_type: sde, noise_level: 0.7, sde_window_size: null, sde_window_range: null}}",
    f"{ACTOR}.optim={{lr: 3.0e-4, betas: [0.9, 0.999], weight_decay: 1.0e-4, lr_warmup_steps: 0}}",
    f"{ACTOR}.diffusion_loss.clip_ratio=1.0e-4",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.04",
    f"{ACTOR}.kl_loss_type=flow_grpo",
    f"{ACTOR}.levels_per_pass=3",
    f"{ACTOR}.ema={{enable: true, decay: 0.9, update_interval: 8}}",
    "algorithm.global_std=true",
]
"""The public script's settings as changes of `words-flow-grpo`; two optimiser steps an iteration come besides."""
A_STEP_A_PASS = [f"{ACTOR}.levels_per_pass=1", "algorithm.rollout_correction.bypass_mode=true"]
PUBLIC = {"public loop, published settings": "published", "public loop, our settings": "recipe"}
LONG = "trainer.total_training_steps=2000"
OURS: dict[str, tuple[str, list[str]]] = {
    "words-flow-grpo, published settings": ("words-flow-grpo", [LONG, *AS_PUBLISHED]),
    "words-flow-grpo": ("words-flow-grpo", [LONG]),
    "words-flow-grpo, a step a pass": ("words-flow-grpo", [LONG, *A_STEP_A_PASS]),
    "words, LoRA": VARIANTS["words, LoRA"],
    "words": VARIANTS["words"],
}
"""Name -> recipe and what is changed of it; the last two end by themselves, as their learning rate does."""
GOALS = (0.6, 0.7, 0.8)


def changes_of(recipe: str, given: Sequence[str], test_freq: int) -> list[str]:
    """What is changed in every run: no guards, no checkpoint, more measurements."""
    config = changed_recipe(recipe, given)
    trained = only_rewards(config, **{label: {} for label, entry in config.reward.functions.items() if not entry.guard})
    return [f"trainer.test_freq={test_freq}", "trainer.save_freq=0", trained, *given]


def halves(recipe: str, given: Sequence[str]) -> str:
    """Two optimiser steps an iteration."""
    return f"{ACTOR}.ppo_mini_batch_size={changed_recipe(recipe, given).data.train_batch_size // 2}"


def train_public(name: str, seed: int, given: argparse.Namespace) -> list[str]:
    """In a process of its own, which writes its lines itself; what failed, as of `follow`."""
    folder = folder_of(given.log[0].parent, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.public_training", "--settings", PUBLIC[name], "--name", name]
    command += ["--log", str(given.log[0]), "--until", str(given.until), "--limit", str(given.limit)]
    command += ["--began", str(began)] + (["--iterations", str(given.iterations)] if given.iterations else [])
    changes = [*changes_of("words-flow-grpo", given.set, given.test_freq), f"trainer.seed={seed}"]
    changes.append(f"trainer.total_training_steps={given.iterations}" if given.iterations else LONG)
    with (folder / "log.txt").open("a") as log:
        command += [part for change in changes for part in ("--set", change)]
        code = subprocess.run(command, stderr=log).returncode
    if not code:
        return []
    end = f"failed with exit code {code}, see {folder / 'log.txt'}"
    append_line(given.log[0], {"run": name, "seed": seed, "end": end, "wall_s": time.time() - began})
    return [f"{name} (seed {seed}) {end}"]


def train_ours(name: str, seed: int, given: argparse.Namespace) -> list[str]:
    """By the train flow; what failed, as of `follow`."""
    recipe, own = OURS[name]
    last = [f"trainer.total_training_steps={given.iterations}"] if given.iterations else []
    changes = [*own, *changes_of(recipe, given.set, given.test_freq), *last]
    if name.endswith("published settings"):
        changes.append(halves(recipe, given.set))
    run = Job(name, seed, recipe, changes, folder_of(given.log[0].parent, name, seed))
    return follow([run], given.log[0], limit_each=given.limit, until=given.until)


@ending_at_sigterm()
def train(given: argparse.Namespace) -> list[str]:
    """All that are asked for and not there yet, one after the other; what failed, as of `follow`."""
    failed: list[str] = []
    for seed in given.seeds:
        for name in given.runs:
            if not is_done(name, seed, given.log[0]):
                failed += (train_public if name in PUBLIC else train_ours)(name, seed, given)
    return failed


def table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """A row a run."""
    to = " | ".join(f"Minutes of training to {goal}" for goal in GOALS)
    lines = [
        f"| Run | Held-out reward before | highest | {to} | Minutes from the command's start to {GOALS[-1]} "
        f"| Pictures to {GOALS[-1]} | Seconds an iteration | Pictures a second |",
        "|---|---|---|" + "---|" * (len(GOALS) + 4),
    ]
    for run, seeds in curves.items():
        first = [f"{curve.measured[0]['held_out']:.3f}" for curve in seeds]
        highest = [f"{max(line['held_out'] for line in curve.measured):.3f}" for curve in seeds]
        minutes = [", ".join(_reached(curve, goal, "training_s", 60, 1) for curve in seeds) for goal in GOALS]
        whole = ", ".join(_reached(curve, GOALS[-1], "wall_s", 60, 1) for curve in seeds)
        images = ", ".join(_reached(curve, GOALS[-1], "images", 1, 0) for curve in seeds)
        last = [curve.lines[-1] for curve in seeds]
        seconds = median(_iteration(curve) for curve in seeds)
        speed = median(line["images"] / line["training_s"] for line in last if line["training_s"]) if seconds else 0.0
        lines.append(
            f"| {run} | {', '.join(first)} | {', '.join(highest)} | {' | '.join(minutes)} | {whole} | {images} "
            f"| {seconds:.1f} | {speed:.0f} |"
        )
    return "\n".join(lines)


def _reached(curve: Curve, goal: float, what: str, unit: float, digits: int) -> str:
    line = curve.first_at(goal)
    if line is None:
        return f"not in {curve.lines[-1][what] / unit:.{digits}f}"
    return f"{line[what] / unit:.{digits}f}"


def _iteration(curve: Curve) -> float:
    """Median seconds of an iteration, the first left out: it compiles."""
    times = [line["training_s"] for line in curve.lines]
    spent = [after - before for before, after in pairwise(times)]
    return median(spent[1:] or spent or [0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=[*OURS, *PUBLIC], default=[*OURS, *PUBLIC])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--until", type=float, default=GOALS[-1], help="held-out reward at which a run ends")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a run")
    parser.add_argument("--iterations", type=int, help="iterations of a run, for a rehearsal")
    parser.add_argument("--test-freq", type=int, default=5, help="iterations between two measurements")
    parser.add_argument("--log", type=Path, nargs="+", default=[Path("runs/time_to_reward/results.jsonl")])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in every run")
    parser.add_argument("--write", action="store_true", help="train nothing, write the table of the logs")
    parser.add_argument("--page", type=Path, default=PAGE)
    given, failed = parser.parse_args(), list[str]()
    if given.write:
        refuse_missing(parser, given.log)
    else:
        failed = train(given)
    curves = curves_of(read_lines(given.log))
    print(table(curves))
    if given.write:
        put_table(given.page, SCRIPT, table(curves))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
