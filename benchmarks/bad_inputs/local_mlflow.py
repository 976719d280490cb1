# SPDX-License-Identifier: Apache-2.0
"""An MLflow store of this process, made once."""

import atexit
import functools
import shutil
import tempfile

from tasks.config.tracking import TrackingConfig
from tasks.records.tracking import Tracker


@functools.cache
def tracking() -> TrackingConfig:
    """Where it is."""
    folder = tempfile.mkdtemp(prefix="bad-inputs-mlflow-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", artifacts=f"{folder}/artifacts", experiment="bad-inputs")


@functools.cache
def known_run() -> str:
    """The id of a run that is there."""
    return Tracker(tracking(), "known").run_id
