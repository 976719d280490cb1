# SPDX-License-Identifier: Apache-2.0
"""A short real run on the servers whose pages are looked at."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.system.ports import free_port
from tests.support.patience import wait_for_server
from tests.support.platform_helpers import background

USER = "doubleflow"


@dataclass(frozen=True)
class MlflowServer:
    """MLflow as `make up` starts it.

    Attributes:
        address: without a slash at its end.
        password: of `USER`.
        environment: what leads a program to it.
    """

    address: str
    password: str
    environment: dict[str, str]

    def runs(self) -> list[Run]:
        """All runs, the newest first."""
        os.environ.update(self.environment)
        client = MlflowClient(self.address)
        experiment = client.get_experiment_by_name("doubleflow")
        return list(client.search_runs([experiment.experiment_id]))


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server on loopback, whose files are in the folder."""
    port, password = free_port(), secrets.token_hex(16)
    address = f"http://127.0.0.1:{port}"
    access = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}
    environment = access | {"MLFLOW_TRACKING_URI": address, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--no-serve-artifacts"]
    place = ["--default-artifact-root", str(folder / "mlruns"), "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "doubleflow", *store, *place]
    with background(command, os.environ | environment, folder / "mlflow-server.log", folder):
        wait_for_server(f"{address}/health", f"MLflow's start ({folder / 'mlflow-server.log'})")
        yield MlflowServer(address, password, environment)
