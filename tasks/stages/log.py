"""The tasks that write to MLflow: files of an iteration, and registered weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.records.model_registry import register
from tasks.records.tracking import Tracker
from tasks.system.stopwatch import Stopwatch


@task(name="register", cache_policy=NO_CACHE, persist_result=False)
def register_weights(
    clock: Stopwatch, tracker: Tracker, name: str, folder: Path, iteration: int, tags: Mapping[str, str]
) -> ModelVersion:
    """See `register`."""
    with clock.stage("register"):
        return register(tracker, name, folder, iteration, tags)


@task(name="log", cache_policy=NO_CACHE, persist_result=False)
def log_files(
    clock: Stopwatch, tracker: Tracker, step: int, pictures: Any = None, tables: Any = None, albums: Any = None
) -> None:
    """See `Tracker.log_files`."""
    with clock.stage("log"):
        tracker.log_files(step, pictures, tables, albums)
