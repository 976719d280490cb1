# SPDX-License-Identifier: Apache-2.0
"""A recipe's whole flow on more and more GPUs of one host: colocated, and with the GPUs divided.

    python -m benchmarks.scaling RECIPE [--gpus 1 2 4 8] [--kinds weak strong ahead] [--set NAME=VALUE ...]
    python -m benchmarks.scaling flow-grpo --device cpu --gpus 1 2 --prompts 6   # that it runs

Each cell is a run of its own, one after the other, in a folder of its own under `--folder`:

- `weak`: a trainer rank and a rollout worker on each GPU, and for each as many prompts as the recipe has for one;
- `strong`: the same, with the prompts of the largest number of GPUs, whatever the number;
- `ahead`: `one_step_off_policy` with the prompts of the largest number of GPUs; `--divided` of these are the rollout's.

Optimiser steps an iteration stay as many as the recipe makes, and reward workers a GPU, too. A row is the median over
the iterations but the first two, in which kernels are compiled, and the last, which ends with a validation. Adds a line
of JSON a cell to the log, also where it failed; cells that the log has are not trained again. Cells of different calls
may run side by side, on GPUs (`--first`) and by `taskset` on processors of their own. `--limit` begins no cell after so
many seconds, and stops the one that runs. The exit code is 1 where a cell failed, or is no run that the recipe can be.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.failures import refuse_failed
from benchmarks.followed_runs import (
    COMPILING,
    STEP,
    TIMES,
    Job,
    append_line,
    folder_of,
    follow,
    median_over,
    metrics_of,
    read_lines,
    steady_iterations,
)
from benchmarks.logs import rows_in
from tasks.config.errors import ConfigError
from tasks.config.overrides import merged
from tasks.config.recipes import changed_recipe, parse_changes
from tasks.config.reward import RewardFunctionConfig
from tasks.config.tree import TrainConfig

STAGES = ("gen", "gen_ahead", "reward", "old_log_prob", "update_actor", "update_weights", "sleep", "wait_for_writes")
"""Of `timing_s/`, as far as a run has them; the rest of an iteration is `other`."""
IMAGES = "perf/total_num_images"
KINDS = ("weak", "strong", "ahead")


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        trainers, workers: ranks, and rollout workers, each with a GPU of its own where they are divided.
        prompts: of an iteration.
    """

    kind: str
    trainers: int
    workers: int
    prompts: int

    @property
    def divided(self) -> bool:
        """Have ranks and workers GPUs of their own?"""
        return self.kind == "ahead"

    @property
    def gpus(self) -> int:
        """That it takes in all."""
        return self.trainers + self.workers if self.divided else self.trainers

    @property
    def name(self) -> str:
        """In the log; with the prompts, which tell a cell from one of another call."""
        parts = f"{self.workers}+{self.trainers}" if self.divided else f"{self.gpus}"
        return f"{self.kind} {parts} ({self.prompts} prompts)"

    def changes(self, config: TrainConfig, iterations: int, device: str) -> list[str]:
        """What makes the recipe this run."""
        policy = config.actor_rollout_ref
        share, rewards = self.gpus / gpus_of(config), config.reward.functions
        workers = {label: {"num_workers": max(1, round(share * rewards[label].num_workers))} for label in rewards}
        mini_batch = policy.actor.ppo_mini_batch_size * self.prompts / config.data.train_batch_size
        transport = ("collective" if self.divided else "ipc") if device == "cuda" else "object_store"
        changes: dict[str, Any] = {
            "data.train_batch_size": self.prompts,
            "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, round(mini_batch)),
            "actor_rollout_ref.rollout.num_actors": self.workers,
            "actor_rollout_ref.rollout.placement": "separate" if self.divided or device == "cpu" else "colocated",
            "actor_rollout_ref.rollout.weight_transport": transport,
            "trainer.n_gpus_per_node": self.trainers,
            "trainer.one_step_off_policy": str(self.divided).lower(),
            "trainer.device": device,
            "ray_init.gpu_pool": "null",  # the call says which GPUs, and no other run counts on them
            "trainer.total_training_steps": iterations,
            **{f"trainer.{field}": 0 for field in ("test_freq", "save_freq")},
            **{f"trainer.{field}": "false" for field in ("val_before_train", "keep_stages")},
            "reward.functions": json.dumps(merged(config.rewards(), workers, dict[str, RewardFunctionConfig])),
        }
        if device == "cuda" and "enable_sleep_mode" not in policy.rollout.model_fields_set:
            changes["actor_rollout_ref.rollout.enable_sleep_mode"] = "auto"  # as in machines/
        if self.divided:  # all of an iteration is handed out before the update
            batches = -(-self.prompts * policy.rollout.n // policy.rollout.batch_size)
            queued = max(policy.rollout.max_queued_batches, -(-batches // self.workers))
            changes["actor_rollout_ref.rollout.max_queued_batches"] = queued
        return [f"{name}={value}" for name, value in changes.items()]


def cells(kinds: Sequence[str], gpus: Sequence[int], prompts: int, divided: Sequence[int]) -> Iterator[Cell]:
    """The cells of a call.

    Args:
        prompts: for one GPU.
        divided: numbers of rollout workers among the largest number of GPUs.
    """
    most = max(gpus)
    for kind in kinds:
        if kind == "ahead":
            yield from (Cell(kind, most - workers, workers, most * prompts) for workers in divided)
        else:
            yield from (Cell(kind, number, number, (number if kind == "weak" else most) * prompts) for number in gpus)


def prompts_of_a_gpu(config: TrainConfig) -> int:
    """The recipe's prompts for each GPU that it holds for trainer and rollout."""
    return max(1, config.data.train_batch_size // gpus_of(config))


def gpus_of(config: TrainConfig) -> int:
    """How many GPUs the recipe holds for trainer and rollout."""
    ranks = config.trainer.world_size
    return ranks if config.shares_gpus else ranks + config.actor_rollout_ref.rollout.num_actors


def train(job: Job, cell: Cell, log: Path, first: int, limit: float | None) -> tuple[dict[str, Any], list[str]]:
    """Run a cell to its end on the GPUs from `first` on, or to that of so many seconds.

    Returns:
        (its row, what failed as of `follow`).
    """
    failed = follow([job], log, gpus=[",".join(map(str, range(first, first + cell.gpus)))], limit=limit)
    ends = {line["run"]: line["end"] for line in read_lines([log]) if "end" in line}
    known = {"recipe": job.recipe, "cell": cell.name, **asdict(cell), "gpus": cell.gpus, "end": ends[job.name]}
    return known | row(metrics_of(job)), failed


def row(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Medians of the iterations that count; nothing where the run did not come so far."""
    steps = steady_iterations(metrics)
    if not steps:
        return {}
    found = {"iterations": len(steps)}
    found |= {name: median_over(steps, metrics[of]) for name, of in {"step": STEP, "images": IMAGES}.items()}
    found |= {stage: median_over(steps, metrics[of]) for stage in STAGES if (of := f"{TIMES}{stage}") in metrics}
    found["other"] = found["step"] - sum(found.get(stage, 0.0) for stage in STAGES)
    peaks = [max(points.values()) for name, points in metrics.items() if "/gpu_peak_gib/" in name]
    return {name: round(value, 3) for name, value in found.items()} | ({"gib": round(max(peaks), 1)} if peaks else {})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a cell that trained, with how many iterations count; the share is of as many times the images/s of the
    recipe's weak cell of one GPU, with the same further settings."""
    whole = [one for one in rows if "step" in one]
    stages = [stage for stage in (*STAGES, "other") if any(one.get(stage) for one in whole)]
    heads = ["Recipe", "GPUs", "Pictures", "Seconds", *stages]
    heads += ["images/s", "of one GPU's, times the GPUs", "GiB", "Count"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    alone = {_setting(one): speed(one) for one in whole if one["gpus"] == 1 and one["kind"] == "weak"}
    several = len({tuple(one.get("set", [])) for one in whole}) > 1
    for one in whole:
        first = alone.get(_setting(one))
        share = f"{speed(one) / one['gpus'] / first:.1%}" if first else ""
        seconds = [f"{one.get(stage, 0.0):.2f}" for stage in ("step", *stages)]
        recipe = " ".join([one["recipe"], *one.get("set", [])]) if several else one["recipe"]
        words = [recipe, one["cell"], f"{one['images']:.0f}", *seconds, f"{speed(one):.2f}", share]
        end = "" if one["end"] == "finished" else f", {one['end']}"
        words += [str(one.get("gib", "")), f"{one['iterations']}{end}"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def speed(one: Mapping[str, Any]) -> float:
    """Images a second."""
    return float(one["images"] / one["step"])


def logged(log: Path) -> list[dict[str, Any]]:
    """What the log holds, of a cell the newest line."""
    return [*{_which(one): one for one in rows_in(log)}.values()]


def _setting(line: Mapping[str, Any]) -> tuple[str, str]:
    """Of which recipe and further settings it is."""
    return line["recipe"], " ".join(line.get("set", []))


def _which(line: Mapping[str, Any]) -> tuple[str, str, str]:
    """And of which cell."""
    return *_setting(line), line["cell"]


def main() -> None:
    """Train the cells that the log lacks, and print all that it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--first", type=int, default=0, help="number of the first GPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["weak"])
    parser.add_argument(
        "--divided", type=int, nargs="+", help="rollout workers of `ahead`; a half of the GPUs by default"
    )
    parser.add_argument("--prompts", type=int, help="of an iteration on one GPU; as the recipe's by default")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="further changes to the recipe")
    parser.add_argument("--limit", type=float, help="seconds of the command")
    parser.add_argument("--folder", type=Path, default=Path("build/scaling"), help="of the runs")
    parser.add_argument("--log", type=Path, default=Path("build/scaling/results.jsonl"))
    chosen = parser.parse_args()
    if chosen.iterations <= COMPILING + 1:
        parser.error(
            f"--iterations {chosen.iterations}: the first {COMPILING} and the last are left out, so it takes more"
        )
    until = None if chosen.limit is None else time.time() + chosen.limit
    try:
        config = changed_recipe(chosen.recipe, chosen.set)
    except ConfigError as error:
        parser.error(str(error))
    prompts, failed = chosen.prompts or prompts_of_a_gpu(config), list[str]()
    done = {_which(one) for one in logged(chosen.log) if one["end"] == "finished"}
    for cell in cells(chosen.kinds, chosen.gpus, prompts, chosen.divided or [max(chosen.gpus) // 2]):
        which = _which({"recipe": chosen.recipe, "cell": cell.name, "set": chosen.set})
        if which in done or (until is not None and time.time() > until):
            continue
        changes = cell.changes(config, chosen.iterations, chosen.device)
        try:
            config.with_changes(parse_changes(changes, recipe=config))
        except ValueError as error:  # the sizes do not divide, say
            failed.append(f"{cell.name} is left out: {error}")
            continue
        name = f"{chosen.recipe}, {cell.name}"
        job = Job(name, 0, chosen.recipe, [*chosen.set, *changes], folder_of(chosen.folder, name, 0))
        left = None if until is None else until - time.time()
        line, not_whole = train(job, cell, chosen.folder / "iterations.jsonl", chosen.first, left)
        append_line(chosen.log, {**line, "set": chosen.set})
        failed += not_whole
    print(table(logged(chosen.log)))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
