# SPDX-License-Identifier: Apache-2.0
"""MLflow's database for a test: a copy of one that MLflow made, whose tables take it a second."""

import functools
import shutil
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from mlflow import MlflowClient


@functools.cache
def empty_database() -> Path:
    """A database with MLflow's tables and its default experiment. To be copied only."""
    folder = Path(tempfile.mkdtemp(prefix="mlflow-empty-"))
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)  # unlike atexit's, at the end of a fork, too
    file = folder / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


def mlflow_in(folder: Path) -> str:
    """The URI of the folder's own database, which is made where there is none."""
    file = folder / "mlflow.db"
    if not file.exists():
        shutil.copyfile(empty_database(), file)
    return f"sqlite:///{file}"


def server_command(folder: Path, port: int) -> list[str]:
    """MLflow's server of the folder's own database, on loopback, which hands out files that it keeps there."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return [*command, "--backend-store-uri", mlflow_in(folder), "--artifacts-destination", str(folder)]
