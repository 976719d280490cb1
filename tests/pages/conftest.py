# SPDX-License-Identifier: Apache-2.0
"""One short run on real servers, and a browser. Without Playwright nothing here is collected."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]

from tasks.records.headline import REPORT
from tasks.records.history import RunHistory
from tests.support.patience import post
from tests.support.platform_helpers import Workspace, make_workspace, prefect_server, prepared
from tests.support.shown_run import USER, MlflowServer, mlflow_server

__all__ = ["prefect_server", "prepared"]


@dataclass(frozen=True)
class Shown:
    """A finished run, and where it is seen."""

    workspace: Workspace
    mlflow: MlflowServer
    run_id: str
    experiment: str
    tags: dict[str, str]
    name: str

    @property
    def page(self) -> str:
        """The run's page in MLflow."""
        return f"{self.mlflow.address}/#/experiments/{self.experiment}/runs/{self.run_id}"

    @property
    def report(self) -> Path:
        """The run's own page, in its folder."""
        return self.workspace.run_folder() / REPORT

    @property
    def history(self) -> RunHistory:
        """The run's record."""
        return RunHistory(MlflowClient(self.mlflow.address), self.run_id)

    @property
    def prefect(self) -> str:
        """Address of the Prefect server."""
        return self.workspace.environment["PREFECT_API_URL"].removesuffix("/api")


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Iterator[Shown]:
    """A run of two iterations; the servers stay for the session."""
    workspace = make_workspace(tmp_path_factory.mktemp("shown") / "workspace", prepared, prefect_server)
    with mlflow_server(workspace.folder) as server:
        there = replace(workspace, environment=workspace.environment | server.environment)
        there.train("trainer.total_training_steps=2", "trainer.seed=1")
        (run,) = server.runs()
        yield Shown(there, server, run.info.run_id, run.info.experiment_id, dict(run.data.tags), run.info.run_name)


@pytest.fixture(scope="session")
def deployment(shown: Shown) -> str:
    """Address of the page of the run's recipe, deployed as `make up` does it."""
    workspace = shown.workspace
    (workspace.folder / "flows").symlink_to(Path(__file__).parents[2] / "flows")
    prefect = ("-m", "prefect", "--no-prompt")
    workspace.run(*prefect, "work-pool", "create", "local", "--type", "process", "--overwrite")
    workspace.run(*prefect, "deploy", "--all")
    (made,) = post(f"{shown.prefect}/api/deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    return f"{shown.prefect}/deployments/deployment/{made['id']}"


@pytest.fixture
def browser(shown: Shown) -> Iterator[Any]:
    """A new browser for each test, which remembers nothing."""
    from tests.support.browser import browsing

    with browsing(USER, shown.mlflow.password) as context:
        yield context
