# SPDX-License-Identifier: Apache-2.0
"""One short run on real servers, and a browser. Without Playwright nothing here is collected."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]

from tests.support.platform_helpers import make_workspace, prefect_server, prepared
from tests.support.shown_run import USER, MlflowServer, mlflow_server

__all__ = ["prefect_server", "prepared"]


@dataclass(frozen=True)
class Shown:
    """A finished run, and where it is seen."""

    mlflow: MlflowServer
    run_id: str
    experiment: str
    tags: dict[str, str]
    name: str

    @property
    def page(self) -> str:
        """The run's page in MLflow."""
        return f"{self.mlflow.address}/#/experiments/{self.experiment}/runs/{self.run_id}"


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Iterator[Shown]:
    """A run of two iterations; the servers stay for the session."""
    workspace = make_workspace(tmp_path_factory.mktemp("shown") / "workspace", prepared, prefect_server)
    with mlflow_server(workspace.folder) as server:
        there = replace(workspace, environment=workspace.environment | server.environment)
        there.train("trainer.total_training_steps=2", "trainer.seed=1")
        (run,) = server.runs()
        yield Shown(server, run.info.run_id, run.info.experiment_id, dict(run.data.tags), run.info.run_name)


@pytest.fixture
def browser(shown: Shown) -> Iterator[Any]:
    """A new browser for each test, which remembers nothing."""
    from tests.support.browser import browsing

    with browsing(USER, shown.mlflow.password) as context:
        yield context
