# SPDX-License-Identifier: Apache-2.0
"""Trackers beside MLflow, by their own libraries: Weights & Biases and TensorBoard get a run's metrics and pictures."""

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from models.errors import DoubleflowError
from tasks.config.tracking import TrackerName, TrackingConfig

log = logging.getLogger(__name__)
START_S, END_S = 60.0, 20.0
"""How long W&B's server may take to begin a run, and to take in the rest of one that ends."""
STEP = "trainer/global_step"
"""The axis of W&B's curves, a metric like the others."""


class SecondTrackerError(DoubleflowError, ValueError):
    """A tracker beside MLflow that is asked for cannot be had here."""


class Subject(NamedTuple):
    """The run that is tracked.

    Attributes:
        name, run_id: of MLflow's run.
        folder: the run's.
        next_step: the first step that MLflow has not got.
        settings: the config, as JSON has it.
    """

    name: str
    run_id: str
    folder: Path
    next_step: int
    tracking: TrackingConfig
    settings: Mapping[str, object]


class SecondTracker(Protocol):
    """What another tracker gets of a run; `where` is where that can be seen."""

    where: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step."""

    def picture(self, step: int, key: str, picture: Image.Image) -> None:
        """A picture of a step."""

    def close(self, failed: bool) -> None:
        """The run has ended."""


class TensorBoardTracker:
    """Event files in the run's folder, which `tensorboard --logdir runs` finds."""

    def __init__(self, subject: Subject):
        from torch.utils.tensorboard import SummaryWriter

        self.where = str((subject.folder / "tensorboard").resolve())
        # What an earlier process wrote of steps that are done again is hidden.
        self._writer = SummaryWriter(self.where, purge_step=subject.next_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each, under the name that MLflow has."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, step: int, key: str, picture: Image.Image) -> None:
        """On the pictures' step slider."""
        self._writer.add_image(key, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases with MLflow's run id; W&B's own variables say where, as whom, and if offline."""

    def __init__(self, subject: Subject):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        # The terminal is the run's own, and the code's state is in MLflow's lineage, without what is private.
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, init_timeout=START_S, finish_timeout=END_S
        )
        subject.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "-", subject.tracking.experiment),
                name=subject.name,
                id=subject.run_id,
                resume="allow",
                dir=str(subject.folder),
                config=dict(subject.settings),
                reinit="create_new",
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            raise SecondTrackerError(
                f"tracking.also names wandb, which cannot begin a run: {' '.join(str(error).split())} Give "
                "WANDB_API_KEY, set WANDB_MODE=offline, or leave it out"
            ) from error
        self._run.define_metric("*", step_metric=STEP)
        self.where = self._run.url or str(Path(self._run.dir).resolve().parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All in one row, whose axis is the iteration."""
        self._run.log({**metrics, STEP: step})

    def picture(self, step: int, key: str, picture: Image.Image) -> None:
        """Among the run's media."""
        self._run.log({key: self._wandb.Image(picture), STEP: step})

    def close(self, failed: bool) -> None:
        """Wait until the rest is there, for a while; what is not is on disk, for `wandb sync`."""
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[TrackerName, Callable[[Subject], SecondTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
"""By the name of their library, which is also the name of the project's extra."""


def check_libraries(config: TrackingConfig) -> None:
    """Raise SecondTrackerError where a tracker is asked for whose library is not installed."""
    for name in config.also:
        if importlib.util.find_spec(name) is None:
            raise SecondTrackerError(
                f"tracking.also names {name}, whose library is not installed: `pip install 'doubleflow[{name}]'`, or "
                "leave it out"
            )


class SecondTrackers:
    """All trackers beside MLflow, which stays the record: what fails of one is said once and counted.

    Args:
        warn: takes the sentence about the first failure of each.
    """

    def __init__(self, warn: Callable[[str], None] = log.warning):
        self._warn = warn
        self._open: dict[str, SecondTracker | None] = {}
        self._failures: dict[str, int] = {}

    def open(self, names: Sequence[TrackerName], subject: Subject) -> dict[str, str]:
        """Begin, or go on; name -> where it can be seen, of those that could.

        Raises:
            SecondTrackerError: one cannot be had here.
        """
        for name in names:
            self._open[name] = None
            with self._told(name):
                self._open[name] = TRACKERS[name](subject)
        return {name: tracker.where for name, tracker in self._open.items() if tracker is not None}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, to each; one that could not be opened counts it as a failure."""
        for name, tracker in self._open.items():
            if tracker is None:
                self._failures[name] += 1
                continue
            with self._told(name):
                tracker.log(step, metrics)

    def picture(self, step: int, key: str, picture: Image.Image) -> None:
        """A picture of a step, to each."""
        for name, tracker in self._open.items():
            with self._told(name):
                if tracker is not None:
                    tracker.picture(step, key, picture)

    def close(self, failed: bool) -> None:
        """The run has ended."""
        for name, tracker in self._open.items():
            with self._told(name):
                if tracker is not None:
                    tracker.close(failed)
        self._open.clear()

    def metrics(self) -> dict[str, float]:
        """How often each has failed, of those that have."""
        return {f"tracking/{name}_failures": float(count) for name, count in self._failures.items() if count}

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except SecondTrackerError:
            raise
        except Exception as error:
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] == 1:
                self._warn(
                    f"{name}, a tracker beside MLflow, has not got all of this run "
                    f"({type(error).__name__}: {' '.join(str(error).split())}); MLflow has, and "
                    f"tracking/{name}_failures counts"
                )
