# SPDX-License-Identifier: Apache-2.0
"""What is written of an iteration that is done: to MLflow and to the run's page, behind the run."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tasks.records.metrics import behind_metrics
from tasks.records.pictures import WIDEST_GRID, grid
from tasks.records.tracking import STEP_MARK
from tasks.run.collect import Iteration
from tasks.run.held_out_grids import remove_old
from tasks.run.note import write_note
from tasks.run.training import TrainingRun
from tasks.stages.validation import Validation
from tasks.system.stopwatch import Stopwatch


def write_record(
    run: TrainingRun,
    iteration: Iteration,
    metrics: dict[str, float],
    memory: Callable[[], Mapping[str, float]],
    validation: Validation | None,
    clock: Stopwatch,
) -> None:
    """Log an iteration, behind the run: all that was given to write before it is on the disk.

    Its last request ends the iteration: killed before it, the iteration's record is made again, from what is kept of
    its samples and its checkpoint.
    """
    number = iteration.number
    with clock.stage_behind("memory"):
        metrics |= memory()
    with clock.stage_behind("log"):
        pictures, tables = validation_records(validation)
        if iteration.pictures:
            columns = min(run.config.actor_rollout_ref.rollout.n, WIDEST_GRID)
            pictures["samples"] = grid(np.stack(iteration.pictures), columns=columns)
        tables["samples"] = iteration.samples
        run.tracker.log_files(number, pictures, tables, {"pictures": iteration.pictures})
        remove_old(run.config, run.tracker)
    with clock.stage_behind("report"):
        show_iteration(run, iteration, metrics, validation)
    behind = behind_metrics(clock.behind)
    run.tracker.log_step(number, metrics | behind | run.report.metrics())
    run.report.add(number, behind)
    if validation:
        write_note(run)
    run.forget_stages()


def show_iteration(
    run: TrainingRun, iteration: Iteration, metrics: Mapping[str, float], validation: Validation | None
) -> None:
    """Give the iteration to the run's page, and write that where there was a validation."""
    number = iteration.number
    run.report.add(number, {**metrics, STEP_MARK: float(number)})
    run.report.add_samples(number, iteration.samples, iteration.pictures)
    if validation is not None:
        run.report.add_validation(number, validation)
        run.report.write()


def validation_records(result: Validation | None) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Its pictures and its tables, as `Tracker` logs them; none without one."""
    if result is None:
        return {}, {}
    return {"validation": result.sheet}, {"validation": result.samples}
