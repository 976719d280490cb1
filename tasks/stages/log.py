# SPDX-License-Identifier: Apache-2.0
"""The tasks that write to MLflow: files of an iteration, and registered weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.records.model_registry import register
from tasks.records.notes import Weights
from tasks.records.tracking import Tracker
from tasks.stages.stage import stage
from tasks.system.late_mlflow import ModelVersion


@stage("register")
def register_weights(
    tracker: Tracker, name: str, folder: Path, iteration: int, tags: Mapping[str, str], weights: Weights
) -> ModelVersion:
    """See `register`."""
    return register(tracker, name, folder, iteration, tags, weights)


@stage("log")
def log_files(tracker: Tracker, step: int, pictures: Any = None, tables: Any = None, albums: Any = None) -> None:
    """See `Tracker.log_files`."""
    tracker.log_files(step, pictures, tables, albums)
