# SPDX-License-Identifier: Apache-2.0
"""The words model: what `make quickstart-gpu` learns, by seed and by what is trained how.

    python -m benchmarks.words [--variants words ...] [--seeds 0 1 2] [--at-once 1] [--gpus 0 1] [--limit 900] [--write]

Each iteration is a line of JSON in --log, as it comes; `--limit` seconds after the command's start what trains is
stopped. A run that is finished is not made again. `--write` trains nothing and puts the table of all logs into
docs/words.md, and docs/words.png (held-out reading against minutes of training) beside it. Rows of variants that no log
has stay, and then the plot does, too. Needs `dvc repro data/words/dvc.yaml`; all seeds begin with that base model.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.docs import put_table, refuse_missing, rows_by_name, table_of
from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import (
    Curve,
    Job,
    add_gpu_options,
    add_run_options,
    curves_of,
    folder_of,
    follow,
    read_lines,
)
from tasks.config.recipes import load_recipe
from tasks.config.tree import TrainConfig

PAGE, SCRIPT = Path("docs/words.md"), "words.py"
GOAL = 0.9
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.diffusion_loss"
GROUP_DEVIATION = "algorithm.global_std=false"
"""As it was in the recipe when nearly all of these were measured."""
LARGER_PASSES = f"{ACTOR}.ppo_micro_batch_size_per_gpu=256"
READ_ON_THE_GPU = [
    "reward.functions.ocr.options.device=cuda",
    "reward.functions.ocr.placement=colocated",
    "reward.functions.ocr.num_workers=3",
]
"""Needs onnxruntime-gpu in place of onnxruntime."""
COPIED = [GROUP_DEVIATION, "algorithm.old_policy_decay_schedule=copy"]
"""The old policy is always that of the last iteration, as it was in the recipe when most of these were measured."""
ALL_SAMPLES = [f"{ROLLOUT}.n=16", "algorithm.best_worst_k=null", *COPIED]
PLAIN = [
    *ALL_SAMPLES,
    "algorithm.timestep_fraction=1.0",
    f"{ACTOR}.ema={{enable: false}}",
    f"{ACTOR}.optim.betas=[0.9, 0.99]",
    f"{ACTOR}.optim.clip_grad=1.0",
]
"""Every sample, all levels, the trained weights themselves: the recipe without what makes it learn faster."""
GENTLE = [f"{LOSS}.nft_beta=1.0", f"{LOSS}.adv_clip_max=1.0"]
"""A pull to the old policy that is as strong as an advantage of 1, the largest."""
ALL_WEIGHTS = [
    "actor_rollout_ref.model.lora_rank=0",
    f"{ROLLOUT}.weight_transport=ipc",
    f"{ROLLOUT}.max_restarts=0",
    "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=16",
]


def only_rewards(config: TrainConfig, **given: Mapping[str, Any]) -> str:
    """The change that leaves a run these rewards alone: the config's own settings, and what is given in their place."""
    there = config.reward.functions
    own = {name: there[name].model_dump(exclude_defaults=True) if name in there else {} for name in given}
    return f"reward.functions={json.dumps({name: own[name] | dict(entry) for name, entry in given.items()})}"


VARIANTS: dict[str, tuple[str, list[str]]] = {
    "words": ("words", []),
    "words, ema.decay .98": ("words", [f"{ACTOR}.ema.decay=0.98"]),
    "words, deviation of the group": ("words", [GROUP_DEVIATION]),
    "words, larger passes": ("words", [LARGER_PASSES]),
    "words, read on the GPU": ("words", READ_ON_THE_GPU),
    "words, read on the GPU, larger passes": ("words", [*READ_ON_THE_GPU, LARGER_PASSES]),
    "words, deviation of the group, read on the GPU": ("words", [GROUP_DEVIATION, *READ_ON_THE_GPU]),
    "words, deviation of the group, read on the GPU, larger passes": (
        "words",
        [GROUP_DEVIATION, *READ_ON_THE_GPU, LARGER_PASSES],
    ),
    "words, read on the GPU, larger passes, drawn 512 at once": (
        "words",
        [*READ_ON_THE_GPU, LARGER_PASSES, f"{ROLLOUT}.micro_batch_size=512"],
    ),
    "words, falling learning rate": ("words", [f"{ACTOR}.optim.lr_scheduler_type=cosine"]),
    "words-flow-grpo, read on the GPU": ("words-flow-grpo", READ_ON_THE_GPU),
    "words, old policy copied": ("words", COPIED),
    "words, 8 of 64": ("words", [f"{ROLLOUT}.n=64", *COPIED]),
    "words, 128 prompts": ("words", [*COPIED, "data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=32"]),
    "words, advantages up to 1": ("words", [*GENTLE, *COPIED]),
    "words, advantages up to 1, falling learning rate": (
        "words",
        [*GENTLE, *COPIED, f"{ACTOR}.optim.lr=3.0e-5", f"{ACTOR}.optim.lr_scheduler_type=cosine"],
    ),
    "words, matching .05": ("words", [*COPIED, f"{ACTOR}.matching_loss_coef=0.05"]),
    "words, 20 steps": ("words", [*COPIED, f"{ROLLOUT}.pipeline.num_inference_steps=20"]),
    "words, 1e-5": ("words", [*COPIED, f"{ACTOR}.optim.lr=1.0e-5"]),
    "words, 1e-5, noisiest three": (
        "words",
        [
            *COPIED,
            f"{ACTOR}.optim.lr=1.0e-5",
            "algorithm.timestep_fraction=0.3",
            "algorithm.num_train_timesteps=3",
            f"{ACTOR}.levels_per_pass=3",
        ],
    ),
    "words, every sample": ("words", ALL_SAMPLES),
    "words, every sample, dpm2": ("words", [*ALL_SAMPLES, f"{ROLLOUT}.pipeline.solver=dpm2"]),
    "words, every sample, advantages up to 1": ("words", [*ALL_SAMPLES, *GENTLE]),
    "words, plain, 1e-5": ("words", [*PLAIN, f"{ACTOR}.optim.lr=1.0e-5"]),
    "words, plain, 2e-5": ("words", PLAIN),
    "words, LoRA": (
        "words",
        [
            *ALL_SAMPLES,
            *GENTLE,
            "actor_rollout_ref.model.lora_rank=32",
            "data.train_batch_size=32",
            f"{ACTOR}.ppo_mini_batch_size=8",
            f"{ACTOR}.use_kl_loss=false",
            f"{ACTOR}.kl_loss_coef=0.0",
            f"{ACTOR}.optim.lr=4.0e-4",
        ],
    ),
    "words-flow-grpo": ("words-flow-grpo", []),
    "words-flow-grpo, all weights": ("words-flow-grpo", [*ALL_WEIGHTS, f"{ACTOR}.optim.lr=3.0e-5"]),
    "words, colours trained too": ("words", COPIED),
    "words, hackable": (
        "words",
        [*PLAIN, f"{ACTOR}.optim.lr=1.0e-5", "trainer.test_freq=5", "reward.guards.action=stop"],
    ),
}
"""Name -> recipe and what is changed of it; docs/words.md has what came of some of them."""
REWARDS: dict[str, dict[str, dict[str, Any]]] = {
    "words, colours trained too": {"ocr": {}, "ink_and_paper": {"guard": False, "training_share": 1.0}},
    "words, hackable": {
        "jpeg_compressibility": {},
        "ocr": {"guard": True},
        "ink_and_paper": {"guard": True, "num_workers": 1},
    },
}
"""Variant -> its rewards, for `only_rewards`; the others have their recipe's."""


def job(variant: str, seed: int, given: argparse.Namespace) -> Job:
    """The run of a variant and a seed."""
    recipe, own = VARIANTS[variant]
    rewards = [only_rewards(load_recipe(recipe), **REWARDS[variant])] if variant in REWARDS else []
    readers = [f"reward.functions.ocr.num_workers={given.readers}"] if given.readers else []
    common = [f"trainer.total_training_steps={given.iterations}", "trainer.save_freq=0"]
    changes = [*common, *own, *rewards, *readers, *given.set]
    return Job(variant, seed, recipe, changes, folder_of(given.folder, variant, seed))


def read(line: Mapping[str, Any]) -> float:
    """How OCR reads the held-out words; the held-out reward is more where colours are trained on."""
    return float(line["read"])


def minutes_to_goal(curve: Curve) -> str:
    """Of training, until a measurement was there."""
    reached = next((line for line in curve.measured if read(line) >= GOAL), None)
    return "not reached" if reached is None else f"{reached['training_s'] / 60:.1f}"


def seconds_of(curve: Curve) -> float:
    """Median of an iteration; the first compiles and is left out."""
    ends = [line["training_s"] for line in curve.lines[1:]]
    return median([after - before for before, after in pairwise(ends)] or ends or [0.0])


HEADER = (
    "| Variant | Seeds | Held-out before | at the end, each seed | highest, each seed "
    f"| Colours as asked for | Iterations | Minutes of training to {GOAL} | in all | Runs on a GPU "
    "| Seconds an iteration | Pictures a second |"
)


def rows_staying(curves: Mapping[str, Sequence[Curve]], page: Path) -> list[str]:
    """The rows in a page's table of variants that no log has.

    Raises:
        ValueError: it has other columns than this one, so they cannot stay.
    """
    stay = [row for name, row in rows_by_name(page, SCRIPT).items() if name not in curves]
    if stay and table_of(page, SCRIPT)[0] != HEADER:
        raise ValueError(f"the table in {page} has other columns: give the logs of all its rows")
    return stay


def table(curves: Mapping[str, Sequence[Curve]], staying: Sequence[str] = ()) -> str:
    """A row for each variant, after those that stay."""
    lines = [HEADER, "|---" * (HEADER.count("|") - 1) + "|", *staying]
    for variant, runs in curves.items():
        last = [run.measured[-1] for run in runs]
        seconds = median(seconds_of(run) for run in runs)
        images = median(run.lines[-1]["images"] / max(1, run.lines[-1]["iteration"]) for run in runs)
        cells = [
            f"{variant} | {', '.join(str(run.seed) for run in runs)}",
            f"{sum(read(run.measured[0]) for run in runs) / len(runs):.3f}",
            ", ".join(f"{read(line):.3f}" for line in last),
            ", ".join(f"{max(map(read, run.measured)):.3f}" for run in runs),
            ", ".join("not measured" if line.get("colours") is None else f"{line['colours']:.2f}" for line in last),
            ", ".join(str(run.lines[-1]["iteration"]) for run in runs),
            ", ".join(map(minutes_to_goal, runs)),
            ", ".join(f"{run.lines[-1]['training_s'] / 60:.1f}" for run in runs),
            ", ".join(str(run.lines[-1]["sharing"]) for run in runs),
            f"{seconds:.1f} | {images / seconds if seconds else 0:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Held-out reading against minutes of training, one colour a variant, a line a seed."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for number, (variant, runs) in enumerate(curves.items()):
        for place, run in enumerate(runs):
            along = [line["training_s"] / 60 for line in run.measured]
            label = variant if place == 0 else None
            axes.plot(along, [*map(read, run.measured)], "o-", color=f"C{number % 10}", label=label)
    axes.axhline(GOAL, color="0.7", linewidth=1)
    axes.set(xlabel="minutes of training", ylabel="held-out words, as OCR reads them")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, or write what was learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["words"], metavar="NAME")
    add_run_options(parser, Path("runs/words"), iterations=40, at_once=1)
    add_gpu_options(parser)
    parser.add_argument("--readers", type=int, help="OCR workers of a run (default: the recipe's)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in every run")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes; the plot goes beside it")
    given, failed = parser.parse_args(), list[str]()
    if given.write:
        refuse_missing(parser, given.log)
    else:
        jobs = [job(variant, seed, given) for seed in given.seeds for variant in given.variants]
        failed = follow(
            jobs, given.log[0], at_once=given.at_once, gpus=given.gpus, limit=given.limit, others=given.others_on_gpu
        )
    curves = curves_of(read_lines(given.log))
    print(table(curves))
    if given.write:
        staying = rows_staying(curves, given.page)
        if not staying:
            plot(curves, given.page.with_suffix(".png"))
        put_table(given.page, SCRIPT, table(curves, staying))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
