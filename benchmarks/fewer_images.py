# SPDX-License-Identifier: Apache-2.0
"""What learns with fewer pictures? The settings of docs/algorithms.md, "Fewer images", with the quickstart's model.

    python -m benchmarks.fewer_images [--runs "diffusion_nft, both" ...] [--seeds 0 1 2] [--at-once 2] [--limit 3000]
    python -m benchmarks.fewer_images --write --log FILE ...

Each setting is a run beside the one without it, on the CPU; rewards do not depend on the machine's load. Each iteration
is a line of JSON in --log as it comes, and the same command goes on with what is not finished. `--write` trains nothing
and puts the table of all logs into docs/algorithms.md, and a picture an algorithm beside it; rows of runs that no log
has stay as they are, and so do pictures that show one. Needs `dvc repro`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.docs import put_table, refuse_missing, rows_by_name, table_of
from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import (
    Curve,
    Job,
    add_run_options,
    curves_of,
    folder_of,
    follow,
    is_done,
    plot_seeds,
    read_lines,
)
from benchmarks.learning import ACTOR, ROLLOUT, p_value
from benchmarks.learning import SETTINGS as ALGORITHMS

SCRIPT, PAGE = "fewer_images.py", Path("docs/algorithms.md")
REWARD = 0.85
NOISE, LEVELS = "algorithm.share_noise_in_group", "algorithm.timestep_sampling"
BOTH = [f"{NOISE}=true", f"{LEVELS}=stratified"]
FOUR_STEPS = [
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=24",
    f"{ROLLOUT}.micro_batch_size=24",
]
MATCHING = f"{ACTOR}.matching_loss_coef"
HALF = "algorithm.best_worst_k=4"
SAME_START = f"{ROLLOUT}.algo.init_same_noise=true"
AWM = ["algorithm.name=awm", *ALGORITHMS["awm"]]
ONE_STEP = [
    f"{ROLLOUT}.algo={{sde_type: sde, noise_level: 0.7, sde_window_size: 1, sde_window_range: [0, 4], "
    "sde_window_per: prompt}",
    f"{ACTOR}.diffusion_loss.temporal_gradient_rectification=true",
    f"{ROLLOUT}.micro_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "diffusion_nft": ("quickstart", FOUR_STEPS),
    "diffusion_nft, noise shared": ("quickstart", [*FOUR_STEPS, *BOTH[:1]]),
    "diffusion_nft, levels stratified": ("quickstart", [*FOUR_STEPS, *BOTH[1:]]),
    "diffusion_nft, both": ("quickstart", [*FOUR_STEPS, *BOTH]),
    "diffusion_nft, both, best and worst 4": ("quickstart", [*FOUR_STEPS, *BOTH, HALF]),
    "diffusion_nft, both, matching .25": ("quickstart", [*FOUR_STEPS, *BOTH, f"{MATCHING}=0.25"]),
    "diffusion_nft, both, matching .05": ("quickstart", [*FOUR_STEPS, *BOTH, f"{MATCHING}=0.05"]),
    "awm": ("flow-grpo", AWM),
    "awm, both": ("flow-grpo", [*AWM, *BOTH]),
    "awm, both, adaptive": ("flow-grpo", [*AWM, *BOTH, f"{ACTOR}.diffusion_loss.awm_weighting=adaptive"]),
    "flow_grpo": ("flow-grpo", []),
    "flow_grpo, one step a prompt": ("flow-grpo", ONE_STEP),
    "flow_grpo, best and worst 4": ("flow-grpo", [HALF]),
    "flow_grpo, same start": ("flow-grpo", [SAME_START]),
    "flow_grpo, same start, best and worst 4": ("flow-grpo", [SAME_START, HALF]),
}
"""Run -> recipe and what is changed of it. A run is compared with the one that has its name but for the last part."""


def job(name: str, seed: int, iterations: int, folder: Path) -> Job:
    """The run of a setting and a seed."""
    recipe, own = SETTINGS[name]
    common = [f"trainer.total_training_steps={iterations}", "trainer.test_freq=2", "trainer.save_freq=0"]
    return Job(name, seed, recipe, [*common, *own], folder_of(folder, name, seed))


def finished(logs: Sequence[Path]) -> dict[str, list[Curve]]:
    """The runs of these logs that came to their end, in the order of `SETTINGS`."""
    found = curves_of(read_lines(logs))
    ended = {
        name: [curve for curve in found.get(name, []) if any(is_done(name, curve.seed, log) for log in logs)]
        for name in SETTINGS
    }
    return {name: curves for name, curves in ended.items() if curves}


def mean_reward(curve: Curve) -> float:
    """Held-out reward, mean over the measurements after the first: how high and how soon."""
    return float(np.mean([line["held_out"] for line in curve.measured[1:]]))


def algorithm_of(name: str) -> str:
    """Of a run: what its name begins with."""
    return name.partition(",")[0]


def without_last(name: str) -> str:
    """The run that one with settings is compared with: that without the last of them, or without any."""
    shorter = name.rpartition(", ")[0]
    return shorter if shorter in SETTINGS else algorithm_of(name)


def header_of(curves: Mapping[str, Sequence[Curve]]) -> str:
    """The table's columns: those of the first seed of each run."""
    steps = " | ".join(f"after {step}" for step in _steps(curves))
    means = "Mean of the curve, each seed | More than without the last | p"
    return f"| Run | {steps} | Pictures until {REWARD}, each seed | {means} |"


def _steps(curves: Mapping[str, Sequence[Curve]]) -> list[int]:
    measured = {line["iteration"] for seeds in curves.values() for line in seeds[0].measured}
    return sorted(measured & {0, 4, 8, 12, 16})


def staying(rows: Mapping[str, str], header: str, page: Path) -> dict[str, str]:
    """Run -> row in the table of a page, of the runs that have no new row.

    Raises:
        ValueError: that table has other columns, or such a run was compared with one that has another row now.
    """
    before = {name.strip("`"): row for name, row in rows_by_name(page, SCRIPT).items()}
    stay = {name: row for name, row in before.items() if name not in rows}
    if stay and table_of(page, SCRIPT)[0] != header:
        raise ValueError(
            f"the table in {page} has other columns than these logs, so the rows of {', '.join(stay)} cannot stay: "
            "give their logs, too"
        )
    for name in stay:
        plain = without_last(name)
        if plain in rows and rows[plain] != before.get(plain):
            raise ValueError(f"{name} was compared with another measurement of {plain}: give its log, too")
    return stay


def table(curves: Mapping[str, Sequence[Curve]], page: Path | None = None) -> str:
    """A row a setting, in Markdown; differences are of the same seeds.

    Args:
        curves: the finished runs.
        page: of whose table those rows stay that no curve is of.
    """
    rows, header = {name: _row(name, curves) for name in curves}, header_of(curves)
    rows |= staying(rows, header, page) if page else {}
    return "\n".join(
        [header, f"|{'---|' * (header.count('|') - 1)}", *(rows[name] for name in SETTINGS if name in rows)]
    )


def _row(name: str, curves: Mapping[str, Sequence[Curve]]) -> str:
    seeds = curves[name]
    at = [{line["iteration"]: line["held_out"] for line in curve.measured} for curve in seeds]
    rewards = " | ".join(f"{np.mean([found[step] for found in at if step in found]):.3f}" for step in _steps(curves))
    reached = [curve.first_at(REWARD) for curve in seeds]
    pictures = ", ".join("not" if line is None else str(line["images"]) for line in reached)
    means = {curve.seed: mean_reward(curve) for curve in seeds}
    plain = {curve.seed: mean_reward(curve) for curve in curves.get(without_last(name), [])}
    more = [means[seed] - plain[seed] for seed in means.keys() & plain.keys()] if "," in name else []
    gain = f"{np.mean(more):+.3f} | {p_value(more):.3f}" if more else " | "
    return f"| `{name}` | {rewards} | {pictures} | {', '.join(f'{m:.3f}' for m in means.values())} | {gain} |"


def picture_of(algorithm: str) -> Path:
    """Where its curves are drawn."""
    return PAGE.with_name(f"fewer_images_{algorithm}.png")


def plot(curves: Mapping[str, Sequence[Curve]], algorithm: str) -> None:
    """Held-out reward against pictures: mean over the seeds and the range between them; all pictures have one scale."""
    figure, axes = plt.subplots(figsize=(4.9, 4), layout="constrained")
    for name, seeds in curves.items():
        if algorithm_of(name) == algorithm:
            plot_seeds(axes, seeds, lambda line: line["images"], name.partition(", ")[2] or "without")
    axes.set(title=algorithm, xlabel="pictures sampled", ylabel="held-out OCR reward", ylim=(0.48, 1.005))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture_of(algorithm), dpi=110)


def write(curves: Mapping[str, Sequence[Curve]]) -> None:
    """Table and pictures; a picture that shows a run without a curve here stays as it is, as the run's row does."""
    written, algorithms = table(curves, PAGE), dict.fromkeys(map(algorithm_of, SETTINGS))
    shown = [name for name in SETTINGS if f"| `{name}` |" in written]
    for algorithm in dict.fromkeys(map(algorithm_of, curves)):
        missing = [name for name in shown if algorithm_of(name) == algorithm and name not in curves]
        if missing:
            print(f"{picture_of(algorithm)} stays as it is: no log has {', '.join(missing)}")
        else:
            plot(curves, algorithm)
    drawn = [f"![held-out reward against pictures, {name}]({picture_of(name).name})" for name in algorithms]
    put_table(PAGE, SCRIPT, "\n".join([*drawn, "", written]))


def main() -> None:
    """Train, print; write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    add_run_options(parser, Path("runs/fewer_images"), iterations=16, at_once=1)
    given, failed = parser.parse_args(), list[str]()
    if given.write:
        refuse_missing(parser, given.log)
    else:
        jobs = [job(name, seed, given.iterations, given.folder) for seed in given.seeds for name in given.runs]
        failed = follow(jobs, given.log[0], at_once=given.at_once, limit=given.limit)
    curves = finished(given.log)
    print(table(curves))
    if given.write:
        write(curves)
    refuse_failed(failed)


if __name__ == "__main__":
    main()
