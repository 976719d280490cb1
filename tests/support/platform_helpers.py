# SPDX-License-Identifier: Apache-2.0
"""Real servers and whole runs: each test gets a workspace like a user's folder, on one Prefect server."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import psutil
import pytest
import yaml
from mlflow import MlflowClient

from tasks.actors.worker_forks import VARIABLE
from tasks.system.access import LOGS_FOR_WATCHERS
from tasks.system.ports import free_port
from tasks.system.processes import wait_until_ended
from tests.support.forked import Program
from tests.support.mlflow_store import mlflow_in, server_command
from tests.support.patience import PATIENCE, wait_for_server, wait_until
from tests.support.prefect_store import prefect_in
from tests.support.processes import kill_all

RECIPE = {
    "data": {"train_batch_size": 4},
    "actor_rollout_ref": {
        "model": {"path": "data/base_model"},
        "rollout": {
            "n": 4,
            "micro_batch_size": 4,
            "pipeline": {"height": 16, "width": 24, "num_inference_steps": 4},
            "algo": {"noise_level": 0.7, "sde_window_range": [0, 2]},
        },
        "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 4, "optim": {"lr": 1.0e-3}},
    },
    # The pictures of an untrained model hold no text: their size in bytes is a reward that always differs.
    "reward": {"functions": {"jpeg_incompressibility": {}}},
    "trainer": {"experiment_name": "tiny", "total_training_steps": 3, "test_freq": 2, "save_freq": 1},
}


Begun = TypeVar("Begun", Program, "subprocess.Popen[bytes]")


@dataclass(frozen=True)
class Workspace:
    """A folder with data and recipes, and the commands a user would give in it."""

    folder: Path
    environment: dict[str, str]

    def start(self, *arguments: str) -> Program:
        """`python ...` in the folder, as the leader of a process group of its own."""
        descriptor, log = tempfile.mkstemp(".log", f"{self.folder.name}-", self.folder.parent)
        os.close(descriptor)
        return Program(arguments, self.folder, self.environment, Path(log))

    def run(self, *arguments: str, check: bool = True) -> str:
        """The output of `python ...`, which must succeed if `check`."""
        process = self.start(*arguments)
        code = process.wait(PATIENCE)
        assert not check or code == 0, process.output()[-6000:]
        return process.output()

    def train(self, *settings: str, check: bool = True) -> str:
        """`python -m flows.train tiny --set ...`."""
        changes = [word for setting in settings for word in ("--set", setting)]
        return self.run("-m", "flows.train", "tiny", *changes, check=check)

    def on(self, head: "RayHead") -> "Workspace":
        """The same on a cluster that is there already, whose daemons need not start for every run."""
        return replace(self, environment=self.environment | head.joined)

    def forking(self, worker_forks: str) -> "Workspace":
        """The same with clusters of its own whose workers are forks of the tests' process for them."""
        return replace(self, environment=self.environment | {VARIABLE: worker_forks})

    def client(self) -> MlflowClient:
        """MLflow of this workspace."""
        return MlflowClient(f"sqlite:///{self.folder}/mlflow.db")

    def registered(self, version: str) -> Path:
        """A copy of the files of `models:/<version>`."""
        mlflow.set_tracking_uri(f"sqlite:///{self.folder}/mlflow.db")
        target = self.folder / "downloaded" / version
        target.mkdir(parents=True)
        return Path(mlflow.artifacts.download_artifacts(f"models:/{version}", dst_path=str(target)))

    def mlflow_runs(self) -> list[Any]:
        """All runs of the experiment, oldest first."""
        client = self.client()
        experiment = client.get_experiment_by_name("doubleflow")
        return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])

    def run_folder(self) -> Path:
        """The only training run's folder."""
        (folder,) = (self.folder / "runs").iterdir()
        return folder


@contextmanager
def background(arguments: list[str], environment: dict[str, str], log: Path, folder: Path) -> Iterator[None]:
    """A program that runs during the block, as `running` has it."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            arguments, cwd=folder, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    with running(process):
        yield


@contextmanager
def mlflow_served_in(folder: Path) -> Iterator[int]:
    """The port of MLflow's server of the folder's own database and files, on loopback, during the block."""
    command, told = server_command(folder, port := free_port())
    with background(command, os.environ | told, folder / "server.log", folder):
        wait_for_server(f"http://127.0.0.1:{port}/health", "MLflow's start")
        yield port


@contextmanager
def running(program: Begun) -> Iterator[Begun]:
    """A program with a process group of its own, which is ended, by its pid, after the block."""
    try:
        yield program
    finally:
        _signal_group(program.pid, signal.SIGTERM)
        try:
            program.wait(30)
        except (TimeoutError, subprocess.TimeoutExpired):
            _signal_group(program.pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(pid, number)


def run_as_forks(deployment: dict[str, Any], forked_python: Path) -> None:
    """A worker starts this deployment's flow runs as forks; not those of others that have the same work pool."""
    command = f"{forked_python} -m prefect.engine"
    deployment["work_pool"] = deployment["work_pool"] | {"job_variables": {"command": command}}


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Prefect server on loopback; the environment that leads to it."""
    home, port = tmp_path_factory.mktemp("prefect"), free_port()
    environment = os.environ | prefect_in(home) | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    environment |= {"PREFECT_LOGGING_LEVEL": "WARNING", "OMP_WAIT_POLICY": "passive"}
    environment |= LOGS_FOR_WATCHERS
    environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"  # of ten, in which a test waits for its worker to ask
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with running(Program(command, home, environment, home / "server.log")):
        wait_for_server(f"{environment['PREFECT_API_URL']}/health", "the Prefect server's start")
        yield environment


STARTS_RAY = """
from ray.scripts.scripts import main
from tasks.actors.worker_forks import set_up_at_once

with set_up_at_once():
    main()
"""
"""`ray start`, whose workers are set up as those of a run's own cluster are; `ray` has no option for it."""
FEW_DAEMONS = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Of a machine of `ray.cluster_utils`: nobody shows its workers' output, and nobody adds machines by load."""


@dataclass(frozen=True)
class RayHead:
    """A cluster of one machine: its process, and the variables of those who may see it, and of those who join it."""

    process: psutil.Process
    seen: dict[str, str]
    joined: dict[str, str]


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory, worker_forks: str) -> Iterator[RayHead]:
    """As `ray start` makes it in a folder of its own, with a token; the workers of runs that join it are forks."""
    folder, port = tmp_path_factory.mktemp("head"), free_port()
    # Where Ray writes the address of the latest cluster; the name is short because its sockets are there too.
    temporary = tempfile.mkdtemp(prefix="ray-")
    seen = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": temporary}
    place = ["--head", "--block", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false"]
    # Processes of Ray's that serve drivers which show their workers' output, and clouds.
    place += ["--include-log-monitor=false", "--no-monitor"]
    log = folder / "ray.log"
    with log.open("w") as stream:
        # Not by PYTHONUNBUFFERED: the workers would have it too, and be no forks of a process that has it not.
        command = [sys.executable, "-u", "-c", STARTS_RAY, "start", *place]
        head = psutil.Popen(command, cwd=folder, env=os.environ | seen, stdout=stream, stderr=stream)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), f"Ray's start ({log})")
        yield RayHead(head, seen, seen | {VARIABLE: worker_forks, "RAY_ADDRESS": f"127.0.0.1:{port}"})
    finally:
        family = [head, *head.children(recursive=True)]
        kill_all(family)
        wait_until_ended(family, PATIENCE)
        shutil.rmtree(temporary)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prefect_server: dict[str, str]) -> Path:
    """A folder with the data stages' outputs for an untrained tiny model and twelve prompts."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "data" / "raw").mkdir(parents=True)
    prompts = [f"the number {number}" for number in range(472, 484)]
    (folder / "data" / "raw" / "numbers.txt").write_text("\n".join(prompts) + "\n")
    params = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    params["data_sets"]["digits"]["prompts"] |= {"n_test": 4, "n_train": 8}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    shutil.copytree(tiny_model, folder / "data" / "base_model")
    workspace = Workspace(folder, prefect_server)
    workspace.run("-m", "flows.prepare", "prompts")
    workspace.run("-m", "flows.prepare", "embeddings")
    return folder


@pytest.fixture
def workspace(tmp_path: Path, prepared: Path, prefect_server: dict[str, str]) -> Workspace:
    """A fresh copy of the prepared folder with the recipe `tiny`."""
    return make_workspace(tmp_path / "workspace", prepared, prefect_server)


def make_workspace(
    folder: Path, prepared: Path, environment: dict[str, str], *, has_database: bool = True
) -> Workspace:
    """Copy the prepared data to `folder` and write its prefect.yaml.

    Args:
        has_database: with MLflow's, which has no experiment of ours. Without, the first run makes it, as a user's does.
    """
    shutil.copytree(prepared, folder)
    if has_database:
        mlflow_in(folder)
    deployment = {
        "name": "tiny",
        "entrypoint": "flows/train.py:train",
        "work_pool": {"name": "local"},
        "parameters": {"config": RECIPE},
    }
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"name": "doubleflow", "deployments": [deployment]}))
    return Workspace(folder, dict(environment))


def paths_below(folder: Path) -> Iterator[Path]:
    """All below it but folders, where others work: of a folder that goes meanwhile `Path.rglob` makes an error."""
    return (Path(root, name) for root, _, names in os.walk(folder) for name in names)


def write_module(workspace: Workspace, name: str, source: str) -> None:
    """A user's own module, which driver and workers find."""
    (workspace.folder / f"{name}.py").write_text(source)
    others = workspace.environment.get("PYTHONPATH")
    paths = [str(workspace.folder)] + ([others] if others else [])
    workspace.environment["PYTHONPATH"] = os.pathsep.join(paths)
