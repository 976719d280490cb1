# SPDX-License-Identifier: Apache-2.0
"""A run's page while it runs: written at each validation and at the end, from what the run has in hand."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from models.errors import causes
from tasks.config.tree import TrainConfig
from tasks.records.flow_page import page_logger
from tasks.records.headline import REPORT
from tasks.records.history import RunHistory
from tasks.records.pictures import still
from tasks.records.tracking import Tracker
from tasks.report.charts import spread
from tasks.report.page import hero, links, render
from tasks.report.recorded import (
    EXTREMES,
    FRAMES,
    OVERRIDES,
    PLACEHOLDERS,
    Recorded,
    as_json,
    by_prompt,
    read,
    validation_samples,
)
from tasks.report.samples import extremes
from tasks.report.sections import HELD_OUT, differences
from tasks.report.thumbnails import of_grid
from tasks.run.held_out_grids import kept_grids
from tasks.stages.validation import Validation
from tasks.system.files import put_in_place
from tasks.system.late_mlflow import mlflow

FAILURES = "report/failures"
"""Metric: how often the page could not be made, in the iterations of this process."""
CARD_SIZE = (700, 260)
"""Of the chart on another page."""


class RunReport:
    """The page of a run that is going on.

    It is made of what MLflow had when this process began, read once, and of what each iteration brings. The page is no
    part of the record: where it cannot be made the run warns, counts it, and goes on. What is put into MLflow is, and
    fails like the rest of the record.

    Args:
        config: of the run.
        tracker: its MLflow run.
        recipe: the config before it was changed for this run.
    """

    def __init__(self, config: TrainConfig, tracker: Tracker, recipe: TrainConfig):
        """Nothing is read or written yet."""
        self.config, self.tracker = config, tracker
        self.changed = dict(differences([recipe.model_dump(mode="json"), config.asked.model_dump(mode="json")]))
        self.failures = 0
        self._recorded: Recorded | None = None

    @property
    def path(self) -> Path:
        """Where the page is."""
        return self.config.run_dir / REPORT

    def log_changes(self) -> None:
        """Put into MLflow what was changed of the recipe."""
        self.tracker.client.log_dict(self.tracker.run_id, self.changed, OVERRIDES)

    def metrics(self) -> dict[str, float]:
        """How often the page could not be made; nothing where it always could."""
        return {FAILURES: float(self.failures)} if self.failures else {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in metrics of an iteration."""
        with self._told():
            for name, value in metrics.items():
                self._so_far().metrics.setdefault(name, {})[step] = value

    def add_samples(self, step: int, samples: pd.DataFrame, pictures: Sequence[np.ndarray]) -> None:
        """Take in an iteration's samples, and the pictures [H, W, 3] uint8 of the first of them."""
        with self._told():
            recorded = self._so_far()
            recorded.sampled[step] = by_prompt(samples)
            if len(pictures) and "reward" in samples:
                kept = extremes(samples.iloc[: len(pictures)], lambda row: Image.fromarray(still(pictures[row])))
                recorded.samples["training"] = step, kept

    def add_validation(self, step: int, validation: Validation) -> None:
        """Take in a validation, and put its best and worst pictures into MLflow."""
        kept: dict[str, Any] = {}
        with self._told():
            recorded, table = self._so_far(), validation.samples
            recorded.held_out[step] = table.assign(**PLACEHOLDERS)
            found = extremes(validation_samples(table), lambda row: Image.fromarray(still(validation.pictures[row])))
            recorded.samples["held-out"], kept = (step, found), as_json(step, found)
        if kept:
            self.tracker.client.log_dict(self.tracker.run_id, kept, f"{EXTREMES}/{step:06d}.json")

    def write(self, ended: str = "") -> None:
        """Write the page, here and in MLflow; `ended` is how the run ends now."""
        if self._write(ended):
            self.tracker.client.log_artifact(self.tracker.run_id, str(self.path))

    def card(self) -> str:
        """The page's first chart and the last held-out grid, as markdown that holds them."""
        parts = []
        with self._told():
            recorded, files = self._so_far(), kept_grids(self.config)
            chart = hero(recorded, CARD_SIZE)
            if chart is not None:
                parts.append(f"![{chart.title}]({chart.as_address()})")
            if files:
                last = max(files)
                recorded.grids.setdefault("validation", {}).update(_drawn(recorded, files, [last]))
                title = f"held-out pictures, iteration {last}"
                parts.append(f"{title}\n\n![{title}]({recorded.grids['validation'][last]})")
        return "\n\n".join(parts)

    @contextmanager
    def concluded(self) -> Iterator[None]:
        """If the block fails, the page says so and why.

        MLflow gets that page unless it is what failed, or the run was interrupted: then nothing may be waited for.
        """
        try:
            yield
        except BaseException as error:
            ended = "FAILED" if isinstance(error, Exception) else "KILLED"
            answers = ended == "FAILED" and not _is_of_mlflow(error)
            known = self._recorded is not None or answers
            written = known and self._write(ended, " ".join(str(error).split())[:1000])
            if written and answers:
                with self._told():
                    self.tracker.log_last(self.path)
            raise

    def _write(self, ended: str, reason: str = "") -> bool:
        """Is it written?"""
        failures = self.failures
        with self._told():
            recorded = self._so_far()
            if not ended:  # tags and parameters as they are now; at the end nobody waits for MLflow
                recorded.run = self.tracker.client.get_run(self.tracker.run_id)
            self._draw_grids(recorded)
            with put_in_place(self.path) as aside:
                aside.write_text(render(recorded, links(self.tracker.client, recorded.run), ended, reason))
        return self.failures == failures

    def _so_far(self) -> Recorded:
        """What is known of the run, at first what MLflow has."""
        if self._recorded is None:
            self._recorded = read(RunHistory(self.tracker.client, self.tracker.run_id), grids=())
            self._recorded.config, self._recorded.overrides = self.config.model_dump(mode="json"), self.changed
        return self._recorded

    def _draw_grids(self, recorded: Recorded) -> None:
        """Small copies of the grids in the run's folder; those that are drawn already stay."""
        files = kept_grids(self.config)
        chosen = spread(files, FRAMES, {*files, *recorded.metrics.get(HELD_OUT, {})})
        recorded.grids["validation"] = _drawn(recorded, files, chosen)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong in the block is a warning, and counted."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            page_logger().warning(
                "the run's page could not be made (%s: %s); `python -m flows.report %s` makes it of what is recorded",
                type(error).__name__,
                " ".join(str(error).split()),
                self.tracker.run_id,
            )


def _drawn(recorded: Recorded, files: Mapping[int, Path], steps: Iterable[int]) -> dict[int, str]:
    """Small copies of the held-out grids of these iterations; those that are drawn already stay."""
    before = recorded.grids.get("validation", {})
    return {step: before.get(step) or of_grid(Image.open(files[step])) for step in steps}


def _is_of_mlflow(error: BaseException) -> bool:
    """Is it, or what it was raised from, an error of MLflow?"""
    return any(isinstance(found, mlflow.exceptions.MlflowException) for found in causes(error))
