# SPDX-License-Identifier: Apache-2.0
"""Training runs in processes and folders of their own, several at once, followed while they train.

What they log is kept as lines of JSON as it comes, so that whatever ends a machine leaves what was measured until then.
The line of a run's end has the seconds of an iteration's stages.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from mlflow import MlflowClient

from benchmarks.local_services import ending_at_sigterm
from tasks.records.history import RunHistory
from tasks.system.signals import held_back

LOOK_S = 2.0
"""Between two looks at what the runs have logged."""
PATIENCE_S = 40.0
"""For a run to end in order after Ctrl-C; then it is killed."""
TIMES = "timing_s/"
STEP, VALIDATED = f"{TIMES}step", f"{TIMES}testing"
COMPILING = 2
"""Iterations that are left out of medians: kernels are compiled in them."""
LOGGED = {
    "step": STEP,
    "testing": VALIDATED,
    "images": "perf/total_num_images",
    "reward": "critic/rewards/mean",
    "held_out": "val/reward/mean",
    "read": "val/reward/ocr/mean",
    "colours": "val/reward/ink_and_paper/mean",
    "clipped": "actor/pg_clipfrac",
}
"""Name here -> MLflow's metric."""
PARTS = ("read", "colours")
"""Of the held-out reward; not every run has them."""
ENDED_WELL, STOPPED = ("finished", "goal"), "limit"
"""How a run ends that is not made again, and how one that has not failed either."""
Line = dict[str, Any]


def append_line(log: Path, line: Line) -> None:
    """Add a line of JSON, flushed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    short = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
    with log.open("a") as stream:
        stream.write(json.dumps(short) + "\n")
    if line.get("held_out") is not None or "end" in line:
        print(json.dumps(short), flush=True)


def read_lines(logs: Iterable[Path]) -> list[Line]:
    """All lines of those files that are there; of a run that was begun anew those since it was."""
    found: dict[tuple[str, int], list[Line]] = {}
    for log in logs:
        for text in log.read_text().splitlines() if log.is_file() else ():
            line = json.loads(text)
            of = found.setdefault((line["run"], line["seed"]), [])
            if line.get("iteration") == 0:
                of.clear()
            of.append(line)
    return [line for lines in found.values() for line in lines]


@dataclass(frozen=True)
class Job:
    """One run: its name in the log, and the recipe, by name or as a YAML file, and changes that make it."""

    name: str
    seed: int
    recipe: str
    changes: Sequence[str]
    folder: Path

    @property
    def database(self) -> str:
        """MLflow's address of the run's own records."""
        return f"sqlite:///{self.folder.resolve() / 'mlflow.db'}"


def folder_of(folder: Path, name: str, seed: int) -> Path:
    """Where a run keeps what it makes."""
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


@dataclass
class FollowedRun:
    """A run that trains, once it has begun."""

    job: Job
    log: Path
    gpu: str | None = None
    sharing: int = 1
    written: set[int] = field(default_factory=set)
    client: MlflowClient = field(init=False)
    began: float = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        folder = self.job.folder.resolve()
        shutil.rmtree(folder, ignore_errors=True)  # what a stopped run has left: it begins anew
        folder.mkdir(parents=True)
        self.client = MlflowClient(self.job.database)
        self.client.search_experiments()  # the database is made now, so that the run and this never make it together

    def begin(self) -> None:
        """Start its process."""
        folder = self.job.folder.resolve()
        changes = [*self.job.changes, f"trainer.seed={self.job.seed}", "trainer.experiment_name=train"]
        changes.append(f"trainer.default_local_dir={folder}")
        recipe = ["--config", self.job.recipe] if self.job.recipe.endswith(".yaml") else [self.job.recipe]
        command = [sys.executable, "-m", "flows.train", *recipe]
        command += [part for change in changes for part in ("--set", change)]
        environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "MLFLOW_TRACKING_URI": self.job.database}
        environment |= {"PREFECT_LOGGING_LEVEL": "WARNING", "OMP_WAIT_POLICY": "passive"}
        if self.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpu
        with (folder / "log.txt").open("a") as log:
            self.began = time.time()
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wall(self) -> float:
        """Seconds since the command began."""
        return time.time() - self.began

    def look(self, until: float | None) -> str | None:
        """Write what is new; how the run ended, None while it goes on."""
        code = self.process.poll()
        best = self._write_new()
        if until is not None and best >= until:
            self.stop()
            return "goal"
        if code is None:
            return None
        return "finished" if code == 0 else f"failed with exit code {code}, see {self.job.folder / 'log.txt'}"

    def stop(self) -> None:
        """By SIGTERM, which a script's background command heeds as well, and by force where that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _write_new(self) -> float:
        """The lines of iterations that are whole; the highest held-out reward among them."""
        logged = self._logged()
        best, seconds, images = float("-inf"), 0.0, 0.0
        done = sorted({0} & set(logged["held_out"]) | set(logged["step"]))
        for iteration in done:
            seconds += logged["step"].get(iteration, 0.0) - (logged["testing"].get(iteration, 0.0) if iteration else 0)
            images += logged["images"].get(iteration, 0.0)
            held_out = logged["held_out"].get(iteration)
            best = max(best, best if held_out is None else held_out)
            if iteration not in self.written:
                self.written.add(iteration)
                line = {"run": self.job.name, "seed": self.job.seed, "iteration": iteration, "images": round(images)}
                line |= {"training_s": seconds, "wall_s": self.wall(), "reward": logged["reward"].get(iteration)}
                line |= {"held_out": held_out, "clipped": logged["clipped"].get(iteration), "sharing": self.sharing}
                line |= {name: logged[name].get(iteration) for name in PARTS if logged[name]}
                append_line(self.log, line)
        return best

    def _logged(self) -> dict[str, dict[int, float]]:
        run_id = _run_id(self.client)
        if run_id is None:
            return {name: {} for name in LOGGED}
        return {
            name: {metric.step: metric.value for metric in self.client.get_metric_history(run_id, key)}
            for name, key in LOGGED.items()
        }


def metrics_of(job: Job) -> dict[str, dict[int, float]]:
    """All that its run has logged: metric -> step -> value."""
    client = MlflowClient(job.database)
    run_id = _run_id(client)
    return {} if run_id is None else RunHistory(client, run_id).metrics()


def steady_iterations(metrics: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Those of a run that medians are of: after `COMPILING`, and without a validation."""
    return [step for step in metrics.get(STEP, {}) if step > COMPILING and step not in metrics.get(VALIDATED, {})]


def median_over(steps: Sequence[int], metric: Mapping[int, float]) -> float:
    """Of these iterations; one without the metric counts as 0, as a stage that it did not need."""
    return median(metric.get(step, 0.0) for step in steps)


def parts_of_an_iteration(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Stage -> median seconds of the steady iterations, with `step` and what lies inside and beside it; empty where
    there are none."""
    steps = steady_iterations(metrics)
    times = {name.removeprefix(TIMES): points for name, points in metrics.items() if name.startswith(TIMES)}
    return {name: round(median_over(steps, points), 3) for name, points in times.items()} if steps else {}


def _run_id(client: MlflowClient) -> str | None:
    """Of the run that trains; None where there is none yet."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = [run for run in client.search_runs(experiments) if run.info.run_name.startswith("train")]
    return runs[0].info.run_id if runs else None


@ending_at_sigterm()
def follow(
    jobs: Sequence[Job],
    log: Path,
    *,
    at_once: int = 1,
    gpus: Sequence[str] = (),
    limit: float | None = None,
    limit_each: float | None = None,
    until: float | None = None,
    others: int = 0,
) -> list[str]:
    """Train these, so many at a time, and write their lines; what failed, how and where its log is, one by one.

    The others go on where one fails.

    Args:
        gpus: which of them a run sees, in turn; none leaves the environment as it is.
        limit: seconds after which all that train are stopped, and no other is begun.
        limit_each: seconds after which one run is stopped.
        until: held-out reward at which a run is stopped.
        others: what else trains on each GPU, for the log.
    """
    began, waiting = time.time(), [job for job in jobs if not is_done(job.name, job.seed, log)]
    sharing = others - (-min(at_once, len(waiting)) // max(1, len(gpus)))
    free, training, failed = list(range(at_once)), dict[int, FollowedRun](), list[str]()
    try:
        while waiting or training:
            over = limit is not None and time.time() - began > limit
            while waiting and free and not over:
                place = free.pop(0)
                gpu = gpus[place % len(gpus)] if gpus else None
                run = FollowedRun(waiting.pop(0), log, gpu, sharing)
                with held_back():  # SIGTERM would not end one that is not yet known here
                    run.begin()
                    training[place] = run
            time.sleep(LOOK_S)
            for place, run in list(training.items()):
                end = run.look(until)
                if end is None and (over or (limit_each is not None and run.wall() > limit_each)):
                    run.stop()
                    end = "goal" if run.look(until) == "goal" else STOPPED
                if end is not None:
                    line = {"run": run.job.name, "seed": run.job.seed, "end": end, "wall_s": run.wall()}
                    parts = parts_of_an_iteration(metrics_of(run.job))
                    append_line(log, line | ({"seconds": parts} if parts else {}))
                    if end not in (*ENDED_WELL, STOPPED):
                        failed.append(f"{run.job.name} (seed {run.job.seed}) {end}")
                    free.append(place)
                    del training[place]
            if over and not training:
                left_out = ", ".join(f"{job.name} (seed {job.seed})" for job in waiting)
                print(f"{limit:.0f} s are over; not begun: {left_out or 'none'}", flush=True)
                break
    finally:
        for run in training.values():
            run.stop()
    return failed


def add_run_options(parser: argparse.ArgumentParser, folder: Path, *, iterations: int, at_once: int) -> None:
    """What a benchmark of many runs is told of them; the log lies in their folder."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=at_once, help="runs at a time, over all GPUs")
    parser.add_argument("--limit", type=float, help="seconds of the command")
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--folder", type=Path, default=folder, help="of the runs")
    parser.add_argument("--log", type=Path, nargs="+", default=[folder / "results.jsonl"])
    parser.add_argument("--write", action="store_true", help="train nothing, write table and picture of the logs")


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Where the runs are, and what else is there."""
    parser.add_argument("--gpus", nargs="+", default=[], help="numbers of the GPUs, which the runs take in turn")
    parser.add_argument("--others-on-gpu", type=int, default=0, help="runs of other commands on each GPU, for the log")


def is_done(run: str, seed: int, log: Path) -> bool:
    """Has the log its end, and was that no failure and no limit?"""
    ends = {(line["run"], line["seed"]): line["end"] for line in read_lines([log]) if "end" in line}
    return ends.get((run, seed)) in ENDED_WELL


@dataclass(frozen=True)
class Curve:
    """What a log has of one run: its iterations, first the measurement before training."""

    run: str
    seed: int
    lines: Sequence[Line]

    @property
    def measured(self) -> Sequence[Line]:
        """The iterations with a held-out reward."""
        return [line for line in self.lines if line["held_out"] is not None]

    def first_at(self, reward: float) -> Line | None:
        """The first measurement that reached it."""
        return next((line for line in self.measured if line["held_out"] >= reward), None)


def plot_seeds(
    axes: Axes, seeds: Sequence[Curve], along: Callable[[Line], float], label: str, colour: Any = None
) -> None:
    """Held-out reward, as far as two of the seeds came: mean of those that came so far, and the range between them."""
    measured = [[line for line in lines if line] for lines in zip_longest(*(curve.measured for curve in seeds))]
    measured = [lines for lines in measured if len(lines) >= min(2, len(seeds))]
    rewards = [[line["held_out"] for line in lines] for lines in measured]
    where = [float(np.mean([along(line) for line in lines])) for lines in measured]
    (drawn,) = axes.plot(where, [*map(np.mean, rewards)], "o-", color=colour, markersize=3, label=label)
    ends = [[*map(end, rewards)] for end in (min, max)]
    axes.fill_between(where, *ends, color=drawn.get_color(), alpha=0.12, linewidth=0)


def curves_of(lines: Iterable[Line]) -> dict[str, list[Curve]]:
    """Run -> its seeds; runs without a measurement are left out."""
    found: dict[str, dict[int, list[Line]]] = {}
    for line in lines:
        if "iteration" in line:
            found.setdefault(line["run"], {}).setdefault(line["seed"], []).append(line)
    curves = {
        run: [Curve(run, seed, sorted(of, key=lambda line: line["iteration"])) for seed, of in sorted(seeds.items())]
        for run, seeds in found.items()
    }
    measured = {run: [curve for curve in seeds if curve.measured] for run, seeds in curves.items()}
    return {run: seeds for run, seeds in measured.items() if seeds}
