# SPDX-License-Identifier: Apache-2.0
"""MLflow's database for a test: a copy of one that MLflow made, whose tables take it a second."""

import functools
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
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
        with closing(sqlite3.connect(file)) as store, store:  # as if it was made here
            store.execute("UPDATE experiments SET artifact_location = ?", [f"{folder.resolve()}/mlruns/0"])
    return f"sqlite:///{file}"


def server_command(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """MLflow's server of the folder's own database, on loopback, which hands out files that it keeps there.

    What `mlflow server` would start, and its variables: importing MLflow to do so takes it three seconds.
    """
    from mlflow import server  # here, as few tests need it

    told = {server.BACKEND_STORE_URI_ENV_VAR: mlflow_in(folder), server.REGISTRY_STORE_URI_ENV_VAR: mlflow_in(folder)}
    told |= {server.ARTIFACTS_DESTINATION_ENV_VAR: str(folder), server.SERVE_ARTIFACTS_ENV_VAR: "true"}
    told |= {server.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    place = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "uvicorn", *place, "mlflow.server.fastapi_app:app"], told
