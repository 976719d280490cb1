# SPDX-License-Identifier: Apache-2.0
"""What a finished run recorded, read back from MLflow."""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from PIL import Image

from models.errors import DoubleflowError
from tasks.records.headline import HEADLINE
from tasks.records.tracking import MISSING, logged_steps
from tasks.system.late_mlflow import MlflowClient, Run, mlflow

IMAGES = "cost/images"
"""A metric of every iteration of every training run, and of nothing else."""
NO_ID = "INVALID_PARAMETER_VALUE"
"""What MLflow says of a text that is no run's id, such as a path."""
MEASURED_ANEW = (
    *("timing", "perf/", "memory/", "cost/hours", "cost/gpu_hours"),
    *(f"{HEADLINE}/{name}" for name in ("images_per_second", "hours", "gpu_hours")),
    *("sync/canary_change", "sync/canary_missing"),
    *("machines/", "report/", "tracking/"),
)
"""Beginnings of the metrics that differ between two runs of the same thing: seconds, bytes, what a process compares
with its own weight sync before, and what failed beside the training."""


class HistoryError(DoubleflowError, RuntimeError):
    """A run has not recorded what is asked for."""


class RunUnknown(DoubleflowError, ValueError):
    """MLflow has no such run."""


class NoTrainingConfig(DoubleflowError, ValueError):
    """The run neither trains nor measures: a sweep's own, or one of another program."""


class RunHistory:
    """One run's record.

    Args:
        client: MLflow.
        run_id: the run.

    Raises:
        RunUnknown: MLflow has no such run.
        MlflowException: it cannot be asked.
    """

    def __init__(self, client: MlflowClient, run_id: str):
        """Ask MLflow for the run."""
        self.client, self.run_id = client, run_id
        try:
            self.run: Run = client.get_run(run_id)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code not in (MISSING, NO_ID):
                raise
            raise RunUnknown(f"{client.tracking_uri} has no run {run_id}") from error

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.run.info.run_name)

    def config(self) -> dict[str, Any]:
        """The config it ran with. Raises NoTrainingConfig, or HistoryError where the run has none."""
        result: dict[str, Any] = json.loads(self.content("config.json"))
        if not isinstance(result, dict) or "trainer" not in result:
            raise NoTrainingConfig(
                f"run {self.run_id}, {self.name}, neither trains nor measures: of a sweep give one of its runs"
            )
        return result

    def first_config(self) -> dict[str, Any]:
        """The config of its first start, as long as it is by now. What does not shape the weights may be another since,
        and what it measures with it. Raises as `config`, which it is of a run of older versions."""
        last = self.config()
        try:
            first: dict[str, Any] = json.loads(self.content("lineage/000000/config.json"))
        except HistoryError:
            return last
        length = {"total_training_steps": last["trainer"]["total_training_steps"]}
        return first | {"trainer": first["trainer"] | length}

    @property
    def trained(self) -> int:
        """Iterations of training that are recorded; 0 of a measurement."""
        return max(self.metric(IMAGES), default=0)

    def metric(self, name: str) -> dict[int, float]:
        """Step -> value of one metric; the first value of a step that has several."""
        points = self.client.get_metric_history(self.run_id, name)
        return {point.step: point.value for point in reversed(points)}

    def metrics(self) -> dict[str, dict[int, float]]:
        """Metric -> `metric` of it."""
        return {name: self.metric(name) for name in sorted(self.run.data.metrics)}

    @cached_property
    def logged_steps(self) -> set[int]:
        """Steps that are whole: of one that a kill came into, files may be half there."""
        return logged_steps(self.client, self.run_id)

    def steps(self, table: str) -> list[int]:
        """Those of `logged_steps` that have the table <name>/000010.parquet, ascending."""
        found = {int(Path(item.path).stem) for item in self.client.list_artifacts(self.run_id, table)}
        return sorted(found & self.logged_steps)

    def table(self, name: str, step: int) -> pd.DataFrame:
        """The table <name>/000010.parquet."""
        return self.parquet(f"{name}/{step:06d}.parquet")

    def pictures(self) -> Mapping[str, dict[int, str]]:
        """Image key -> step -> artifact path of the pictures on MLflow's slider."""
        found: dict[str, dict[int, str]] = {}
        for item in self.client.list_artifacts(self.run_id, "images"):
            match = re.match(rf"images/(?:{HEADLINE}~)?(.+?)([+%])step\2(\d+)\2.*\.png$", item.path)
            if match and int(match[3]) in self.logged_steps:
                found.setdefault(match[1], {})[int(match[3])] = item.path
        return found

    def parquet(self, path: str) -> pd.DataFrame:
        """One table among the artifacts."""
        return pd.read_parquet(BytesIO(self.content(path)))

    def image(self, path: str) -> Image.Image:
        """One picture among the artifacts."""
        return Image.open(BytesIO(self.content(path)))

    def content(self, path: str) -> bytes:
        """One artifact's bytes.

        Raises:
            HistoryError: the run has none there.
        """
        try:
            with TemporaryDirectory() as folder:  # without one, MLflow makes a folder that nobody removes
                return Path(self.client.download_artifacts(self.run_id, path, folder)).read_bytes()
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise HistoryError(f"run {self.run_id} has no {path}: {error}") from error


def comparable(metrics: Mapping[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Without those of `MEASURED_ANEW`."""
    return {name: points for name, points in metrics.items() if not name.startswith(MEASURED_ANEW)}
