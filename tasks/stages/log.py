# SPDX-License-Identifier: Apache-2.0
"""The task that registers weights in MLflow."""

from collections.abc import Mapping
from pathlib import Path

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
