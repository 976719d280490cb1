# SPDX-License-Identifier: Apache-2.0
"""MLflow's database for a test: a copy of one that MLflow made, whose tables take it a second."""

import functools
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from mlflow import MlflowClient


@functools.cache
def _empty() -> Path:
    """A database with MLflow's tables and its default experiment."""
    folder = Path(tempfile.mkdtemp(prefix="mlflow-empty-"))
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)  # unlike atexit's, at the end of a fork, too
    file = folder / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


def mlflow_in(folder: Path) -> str:
    """The URI of the folder's own database, which is made where there is none."""
    file = folder / "mlflow.db"
    if not file.exists():
        shutil.copyfile(_empty(), file)
    return f"sqlite:///{file}"
