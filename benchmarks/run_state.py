# SPDX-License-Identifier: Apache-2.0
"""How far a run in a folder is, what it has finished, and what it leaves, for `benchmarks.kill_rounds`."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from mlflow import MlflowClient
from safetensors.torch import load_file

from tasks.records.history import RunHistory, comparable
from tasks.records.run_store import verify
from tasks.records.tracking import logged_steps

T = TypeVar("T")
STAGES = {"rollout": None, "reward": "stages/rollout", "update": "stages/reward", "record": "checkpoints"}
"""What an iteration goes through, each with the folder that has the iteration from the stage's beginning on. `record`
is weight sync, validation and log. Before the first iteration a run is `starting`."""
WRITING = "writing"
"""A run in which something of an iteration is being written, while a stage of it or of the next one goes on."""


@dataclass(frozen=True)
class Outcome:
    """What two runs of the same config must share to the last bit."""

    weights: dict[str, Any]
    history: dict[str, dict[int, float]]
    duplicates: list[str]
    samples: dict[int, pd.DataFrame]

    def difference(self, other: "Outcome") -> str | None:
        """In words; None if there is none."""
        if self.duplicates or other.duplicates:
            return f"steps logged twice: {self.duplicates or other.duplicates}"
        metrics = [name for name in self.history | other.history if self.history.get(name) != other.history.get(name)]
        weights = [n for n in self.weights | other.weights if not _in_both(n, self.weights, other.weights, _alike)]
        tables = [
            step
            for step in self.samples | other.samples
            if not _in_both(step, self.samples, other.samples, pd.DataFrame.equals)
        ]
        found = {"metrics": metrics, "weights": weights, "samples": tables}
        return str({name: names[:4] for name, names in found.items() if names}) if any(found.values()) else None


def _in_both(key: Any, one: Mapping[Any, T], other: Mapping[Any, T], same: Callable[[T, T], bool]) -> bool:
    """Have both such an entry, and the same one?"""
    return key in one and key in other and same(one[key], other[key])


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def outcome(folder: Path, client: MlflowClient) -> Outcome:
    """Of the only run in a folder; every checkpoint's digests are checked on the way."""
    (run_dir,) = (path for path in (folder / "runs").iterdir() if (path / "run.json").is_file())
    history = RunHistory(client, json.loads((run_dir / "run.json").read_text())["mlflow_run_id"])
    for checkpoint in (run_dir / "checkpoints").iterdir():
        verify(checkpoint)
    metrics = comparable(history.metrics())
    points = {name: client.get_metric_history(history.run_id, name) for name in metrics}
    return Outcome(
        weights=load_file(run_dir / "weights/transformer/diffusion_pytorch_model.safetensors"),
        history=metrics,
        duplicates=[name for name, found in points.items() if len(found) != len({p.step for p in found})],
        samples={step: history.table("samples", step) for step in history.steps("samples")},
    )


def logged(folder: Path, client: MlflowClient) -> int:
    """The newest iteration in MLflow of the only run in a folder; -1 before the first record."""
    records = list((folder / "runs").glob("*/run.json"))
    if not records:
        return -1
    return max(logged_steps(client, json.loads(records[0].read_text())["mlflow_run_id"]), default=-1)


def run_folder(folder: Path) -> Path | None:
    """Of the only run in a folder, once it has a record."""
    return next((record.parent for record in (folder / "runs").glob("*/run.json")), None)


def iterations(folder: Path, kind: str) -> set[int]:
    """The iterations that a run's checkpoints or kept stages have."""
    run = run_folder(folder)
    return set() if run is None else {int(path.name.removeprefix("iter_")) for path in (run / kind).glob("iter_*")}


def being_written(folder: Path) -> set[int]:
    """The iterations of which a checkpoint or a kept stage is begun and not whole."""
    run = run_folder(folder)
    aside = [] if run is None else [*run.glob("checkpoints/.writing-*"), *run.glob("stages/*/.writing-*")]
    return {int(path.name.removeprefix(".writing-")) for path in aside}


def stage_now(folder: Path, client: MlflowClient) -> tuple[int, str]:
    """(iteration, stage) that the only run in a folder is in."""
    if unfinished := being_written(folder):
        return min(unfinished), WRITING
    done = logged(folder, client)
    if done < 0 and not iterations(folder, "stages/rollout"):
        return 0, "starting"
    begun = [stage for stage, kind in STAGES.items() if kind is None or max(done, 0) + 1 in iterations(folder, kind)]
    return max(done, 0) + 1, begun[-1]


def lost_seconds(folder: Path) -> float:
    """Since the run finished a stage whose result it keeps, or began."""
    run = run_folder(folder)
    if run is None:
        return 0.0
    kept = [path for kind in STAGES.values() if kind for path in (run / kind).glob("iter_*")]
    return time.time() - max(path.stat().st_mtime for path in (*kept, run / "run.json"))


@dataclass(frozen=True)
class Finished:
    """What a run that has just died had finished of iterations that MLflow does not have."""

    sampled: set[int]
    updated: set[int]

    @classmethod
    def of(cls, folder: Path, client: MlflowClient) -> "Finished":
        """Of the only run in a folder."""
        done = logged(folder, client)
        kinds = ("stages/rollout", "checkpoints")
        return cls(*({step for step in iterations(folder, kind) if step > done} for kind in kinds))

    def repeated(self, folder: Path, client: MlflowClient) -> list[str]:
        """What was done again all the same, by the times that the next process logged."""
        run = run_folder(folder)
        assert run is not None
        run_id = json.loads((run / "run.json").read_text())["mlflow_run_id"]
        busy = {point.step for point in client.get_metric_history(run_id, "perf/rollout_busy_s") if point.value > 0}
        trained = {point.step for point in client.get_metric_history(run_id, "timing_s/update_actor")}
        return [f"rollout {step}" for step in self.sampled & busy] + [f"update {n}" for n in self.updated & trained]


def status(folder: Path, client: MlflowClient) -> str | None:
    """MLflow's, of the only run in a folder; None if MLflow does not know it yet."""
    run = run_folder(folder)
    record = None if run is None else json.loads((run / "run.json").read_text())
    return None if record is None else str(client.get_run(record["mlflow_run_id"]).info.status)
