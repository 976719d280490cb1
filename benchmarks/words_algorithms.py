# SPDX-License-Identifier: Apache-2.0
"""Does every algorithm learn the words, with LoRA in bf16? Each from one base model, several runs at once on a GPU.

    python -m benchmarks.words_algorithms [--algorithms flow_grpo ...] [--seeds 0 1 2] [--at-once 3] [--gpus 0 1]
        [--limit 560] [--iterations 40] [--readers 5]
    python -m benchmarks.words_algorithms --write --log FILE ... [--algorithms flow_grpo ...]

Each iteration is a line of JSON in --log, as it comes; `--limit` seconds after the command's start what trains is
stopped, and the same command goes on with what is not finished, from its beginning. `--write` trains nothing and puts
the table of all logs, or of these algorithms in them, into docs/words.md, and the picture beside it. GPU-minutes are a
run's minutes over the number of runs that shared its GPU. The distillations wait for their teacher's weights. Needs
`dvc repro data/words/dvc.yaml`.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.docs import put_table, refuse_missing
from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import (
    Curve,
    Job,
    add_gpu_options,
    add_run_options,
    curves_of,
    folder_of,
    follow,
    plot_seeds,
    read_lines,
)
from benchmarks.learning import p_value
from benchmarks.words import ACTOR, GROUP_DEVIATION, LOSS, PAGE, ROLLOUT, VARIANTS, only_rewards
from tasks.config.recipes import load_recipe

SCRIPT, PICTURE = "words_algorithms.py", Path("docs/words_algorithms.png")
TEACHER = "diffusion_nft"
REVERSE, FORWARD = "words-flow-grpo", "words"
WINDOW = "noise_level: 0.7, sde_window_size: 4, sde_window_range: [0, 6]"
KERNEL = f"{ROLLOUT}.algo={{sde_type: sde, {WINDOW}}}"
CLIP = f"{ACTOR}.diffusion_loss.clip_ratio"
LORA = VARIANTS["words, LoRA"][1]
LEVELS = ["algorithm.num_train_timesteps=4", f"{ACTOR}.levels_per_pass=4"]
ALIKE = [
    "algorithm.share_noise_in_group=true",
    "algorithm.timestep_sampling=stratified",
    "algorithm.timestep_fraction=0.5",
]
UNNAMED = [GROUP_DEVIATION, *(change for change in LORA if not change.startswith(("algorithm.", LOSS)))]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "flow_grpo": (REVERSE, []),
    "dance_grpo": (
        REVERSE,
        ["algorithm.name=dance_grpo", f"{ROLLOUT}.algo={{sde_type: dance_sde, {WINDOW}}}", f"{CLIP}=1.0e-3"],
    ),
    "mix_grpo": (
        REVERSE,
        [
            "algorithm.name=mix_grpo",
            f"{ROLLOUT}.algo={{sde_type: sde, noise_level: 0.7, sde_window_size: 2, sde_window_range: [0, 5]}}",
            f"{CLIP}=1.0e-3",
            f"{ACTOR}.levels_per_pass=2",
        ],
    ),
    "grpo_guard": (REVERSE, ["algorithm.name=grpo_guard", KERNEL, f"{CLIP}=1.0e-4"]),
    "flow_dppo": (REVERSE, ["algorithm.name=flow_dppo", KERNEL]),
    "dpo": (FORWARD, [*UNNAMED, "algorithm.name=dpo", *LEVELS]),
    "diffusion_nft": (FORWARD, LORA),
    "awm": (FORWARD, [*UNNAMED, "algorithm.name=awm", *LEVELS, *ALIKE]),
    "distill_kl": (REVERSE, ["algorithm.name=distill_kl", KERNEL]),
    "distill_fm_mse": (FORWARD, [*UNNAMED, "algorithm.name=distill_fm_mse", *LEVELS, *ALIKE]),
}
"""Algorithm -> recipe and what is changed of it. All keep the recipe's kernel, window, clip range and number of levels,
so that they are compared at equal ones; an algorithm that is about those has its own."""
FEWER_IMAGES: dict[str, tuple[str, list[str]]] = {
    "diffusion_nft, each its own noise": (
        FORWARD,
        [*LORA, "algorithm.share_noise_in_group=false", "algorithm.timestep_sampling=schedule"],
    ),
    "awm, adaptive weights": (FORWARD, [*SETTINGS["awm"][1], f"{ACTOR}.diffusion_loss.awm_weighting=adaptive"]),
    "flow_grpo, one step a group": (
        REVERSE,
        [
            KERNEL.replace("size: 4", "size: 1, sde_window_per: prompt"),
            f"{ACTOR}.diffusion_loss.temporal_gradient_rectification=true",
            f"{ROLLOUT}.micro_batch_size=16",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
            f"{ACTOR}.levels_per_pass=1",
        ],
    ),
    "flow_grpo, best and worst 4": (REVERSE, ["algorithm.best_worst_k=4"]),
    "diffusion_nft, best and worst 4": (FORWARD, [*LORA, "algorithm.best_worst_k=4"]),
}
"""What is said to need fewer pictures (docs/algorithms.md), each beside the algorithm that it changes."""
FLOAT8: dict[str, tuple[str, list[str]]] = {
    f"{name}, float8 base": (recipe, [*own, "actor_rollout_ref.model.frozen_dtype=float8"])
    for name, (recipe, own) in SETTINGS.items()
    if name in ("flow_grpo", "diffusion_nft")
}
"""The products with the frozen base in 8 bits, in rollout and update: what that costs in learning."""
ALL = SETTINGS | FEWER_IMAGES | FLOAT8


def is_taught(name: str) -> bool:
    """Does it learn from another run's weights?"""
    return name.startswith("distill")


def job(name: str, seed: int, given: argparse.Namespace) -> Job:
    """The run of an algorithm and a seed."""
    recipe, own = ALL[name]
    guard = {"guard": True, "num_workers": 1}
    rewards = only_rewards(load_recipe(recipe), ocr={"num_workers": given.readers}, ink_and_paper=guard)
    changes = [
        f"trainer.total_training_steps={given.iterations}",
        f"trainer.test_freq={given.test_freq}",
        "trainer.save_freq=0",
        f"{ROLLOUT}.val_kwargs.n=1",
        rewards,
        *own,
        *given.set,
    ]
    if is_taught(name):
        changes.append(f"{ACTOR}.teacher_path={teachers(given.folder)[0].resolve()}")
    return Job(name, seed, recipe, changes, folder_of(given.folder, name, seed))


def teachers(folder: Path) -> list[Path]:
    """The weights that the teacher's seeds have exported, the lowest seed's first: none yet, or one a seed."""
    return sorted(folder.glob(f"{TEACHER}-[0-9]/train-*/weights"))


def train(given: argparse.Namespace) -> list[str]:
    """Seed by seed, so that a limit leaves all algorithms with as many seeds; the taught ones after the others.

    Returns:
        What failed, as of `follow`, and what was not begun though there was time.
    """
    began, failed = time.time(), list[str]()
    for taught in (False, True):
        names = [name for name in given.algorithms or SETTINGS if is_taught(name) == taught]
        left = None if given.limit is None else given.limit - (time.time() - began)
        if taught and names and not teachers(given.folder):
            said = f"{', '.join(names)} not begun, as {TEACHER} has exported no weights yet"
            print(said, flush=True)
            failed += [said] if left is None or left > 0 else []
            continue
        jobs = [job(name, seed, given) for seed in given.seeds for name in names]
        shared = {"gpus": given.gpus, "others": given.others_on_gpu}
        failed += follow(jobs, given.log[0], at_once=given.at_once, limit=left, until=given.until, **shared)
    return failed


def gpu_minutes(line: Mapping[str, float]) -> float:
    """Of training, until that iteration."""
    return line["training_s"] / line.get("sharing", 1) / 60


def chosen(curves: Mapping[str, Sequence[Curve]], names: Sequence[str] | None) -> Mapping[str, Sequence[Curve]]:
    """Those of the names that are there, in their order; without names all."""
    return curves if names is None else {name: curves[name] for name in names if name in curves}


def table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """A row an algorithm."""
    lines = [
        "| Algorithm | Seeds | Held-out reward before | after, each seed | highest, each seed | Gain | p (gain > 0) "
        "| Iterations | Pictures | GPU-minutes | Pictures a GPU-second |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seeds in curves.items():
        before = [curve.measured[0]["held_out"] for curve in seeds]
        after = [curve.measured[-1]["held_out"] for curve in seeds]
        highest = [max(line["held_out"] for line in curve.measured) for curve in seeds]
        gains = [b - a for a, b in zip(before, after, strict=True)]
        last = [curve.measured[-1] for curve in seeds]
        minutes = [gpu_minutes(line) for line in last]
        speed = np.mean([line["images"] / (60 * spent) for line, spent in zip(last, minutes, strict=True) if spent])
        lines.append(
            f"| `{name}` | {', '.join(str(curve.seed) for curve in seeds)} | {np.mean(before):.3f} "
            f"| {', '.join(f'{value:.3f}' for value in after)} "
            f"| {', '.join(f'{value:.3f}' for value in highest)} "
            f"| {np.mean(gains):+.3f} | {p_value(gains):.4f} | {', '.join(str(line['iteration']) for line in last)} "
            f"| {max(line['images'] for line in last)} | {np.mean(minutes):.1f} | {speed:.0f} |"
        )
    return "\n".join(lines)


def plot(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Held-out reward against pictures and against GPU-minutes: mean over the seeds and the range between them."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    colours = plt.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for number, (name, seeds) in enumerate(curves.items()):
        for axes, along in zip(panels, (lambda line: line["images"], gpu_minutes), strict=True):
            plot_seeds(axes, seeds, along, name, colours[number % len(colours)])
    for axes, label in zip(panels, ("pictures trained on", "GPU-minutes of training"), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out OCR reward")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALL, metavar="NAME", help="default: the ten; the logs' all")
    add_run_options(parser, Path("runs/words_algorithms"), iterations=40, at_once=3)
    add_gpu_options(parser)
    parser.add_argument("--until", type=float, help="held-out reward at which a run ends")
    parser.add_argument("--test-freq", type=int, default=5, help="iterations between two measurements")
    parser.add_argument("--readers", type=int, default=5, help="processes of the reward, each run's own")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changed in every run")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given, failed = parser.parse_args(), list[str]()
    if given.write:
        refuse_missing(parser, given.log)
    else:
        failed = train(given)
    curves = chosen(curves_of(read_lines(given.log)), given.algorithms)
    print(table(curves))
    if given.write:
        refuse_failed([f"{name} is in none of the logs" for name in given.algorithms or () if name not in curves])
        plot(curves, given.picture)
        picture = f"![held-out reward against pictures and GPU-minutes]({given.picture.name})"
        put_table(given.page, SCRIPT, f"{picture}\n\n{table(curves)}")
    refuse_failed(failed)


if __name__ == "__main__":
    main()
