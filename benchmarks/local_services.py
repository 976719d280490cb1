# SPDX-License-Identifier: Apache-2.0
"""A Prefect server, an MLflow server and a worker of a benchmark's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from mlflow import MlflowClient

from tasks.system.ports import free_port
from tasks.system.processes import wait_until_ended

ROOT = Path(__file__).resolve().parents[1]


def import_path(*folders: Path) -> str:
    """PYTHONPATH with these folders before what the caller has there, which may hold the packages."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class Services:
    """A Prefect server, an MLflow server and, where asked for, a worker, each of which can be killed and come back."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = {"prefect": free_port(), "mlflow": free_port()}
        self.environment = os.environ | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['mlflow']}",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": import_path(ROOT),
        }
        self.running: dict[str, subprocess.Popen] = {}

    @property
    def client(self) -> MlflowClient:
        """MLflow's own file, which can be read while its server is dead."""
        return MlflowClient(f"sqlite:///{self.folder}/mlflow.db")

    @property
    def store(self) -> list[str]:
        """Where MLflow's server has its records and its files."""
        artifacts = ["--default-artifact-root", (self.folder / "mlruns").as_uri(), "--no-serve-artifacts"]
        return ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", *artifacts]

    def start(self, name: str) -> None:
        """Start one, and wait until it answers."""
        address = ["--host", "127.0.0.1", "--port", str(self.ports.get(name))]
        commands = {
            "prefect": ["flows.deploy.prefect_command", "server", "start", *address],
            "mlflow": ["mlflow", "server", *address, *self.store, "--workers", "1"],
            "worker": ["prefect", "worker", "start", "--pool", "local"],
        }
        self.running[name] = self.python("-m", *commands[name], folder=self.folder)
        if name in self.ports:
            path = "/api/health" if name == "prefect" else "/health"
            wait_until(lambda: _answers(f"http://127.0.0.1:{self.ports[name]}{path}"), 180, f"{name}'s start")

    def kill(self, name: str) -> None:
        """kill -9 of it; of a server also its own workers, of a worker not the flow runs that it started."""
        process = psutil.Process(self.running.pop(name).pid)
        family = [process] if name == "worker" else [process, *process.children(recursive=True)]
        for member in family:
            member.kill()
        wait_until_ended(family, 30)

    def python(self, *arguments: str, folder: Path) -> subprocess.Popen:
        """`python ...` in a folder, in a session of its own, its output in a file."""
        with (folder / "output.log").open("a") as log:
            command = [sys.executable, *arguments]
            return subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


S = TypeVar("S", bound=Services)


@contextmanager
def serving(both: S, *before: str) -> Iterator[S]:
    """Both servers, after what they need, and a work pool; all that runs then ends with the block, the newest first."""
    try:
        for name in (*before, "prefect", "mlflow"):
            both.start(name)
        pool = [sys.executable, "-m", "prefect", "work-pool", "create", "local", "--type", "process"]
        subprocess.run(pool, env=both.environment, check=True, capture_output=True)
        yield both
    finally:
        for name in reversed(list(both.running)):
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                both.kill(name)


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Within it SIGTERM is a `SystemExit`: what was started is ended, which a second signal does not cut short."""

    def end(number: int, frame: Any) -> None:
        signal.signal(number, lambda *_: None)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float, what: str, every: float = 0.5) -> Any:
    """What `condition` gives, once it is true; TimeoutError where it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(every)
    raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
