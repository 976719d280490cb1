"""What one machine needs to run deployments: `python -m flows.services up`, `status`, `down` (make up, make down).

Up starts a Prefect server, MLflow and a worker, and makes the work pool, the GPU limit, the deployments and the
automations. The processes' pids and logs are in .services/; down ends them and removes it. Databases and results stay.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from flows.terminal import commands
from models.errors import DoubleflowError

HERE = Path(".services")
RECORD = HERE / "pids.json"
START_SECONDS, END_SECONDS = 120, 30
app = commands("Servers and a worker on this machine.")


class ServiceError(DoubleflowError, RuntimeError):
    """The services cannot be started as asked."""


@app.command()
def up(
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's server.")] = 5000,
    pool: Annotated[str, typer.Option(help="Work pool that the deployments name.")] = "local",
    runs: Annotated[int, typer.Option(help="Flow runs that the pool lets run at once.")] = 2,
    gpus: Annotated[int | None, typer.Option(help="GPUs of this machine; left out, as many as torch finds.")] = None,
) -> None:
    """Start everything; if one part does not start, nothing stays."""
    if RECORD.is_file() and _living():
        raise ServiceError(f"already up ({', '.join(_living())}): `make down` first")
    for name, port in (("prefect", prefect_port), ("mlflow", mlflow_port)):
        _require_free(name, port)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    urls = {
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        "DOUBLEFLOW_HOME": str(Path.cwd()),
    }
    environment = os.environ | urls
    try:
        server = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
        _start("prefect", server, environment)
        _start("mlflow", _mlflow_server(mlflow_port), environment)
        _wait_for("prefect", f"{urls['PREFECT_API_URL']}/health")
        _wait_for("mlflow", f"{urls['MLFLOW_TRACKING_URI']}/health")
        _prepare_server(environment, pool, runs, _gpu_count() if gpus is None else gpus)
        _start("worker", ["prefect", "worker", "start", "--pool", pool, "--name", "local"], environment)
    except BaseException:
        down()
        raise
    typer.echo(f"Prefect {urls['PREFECT_API_URL'].removesuffix('/api')}   MLflow {urls['MLFLOW_TRACKING_URI']}")
    for name, value in urls.items():
        typer.echo(f"export {name}={value}")


@app.command()
def status() -> None:
    """Which of the processes are alive; exit code 1 if one is not."""
    recorded = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    alive = _living()
    for name, (pid, _) in recorded.items():
        typer.echo(f"{name:10} pid {pid:<8} {'up' if name in alive else 'gone, see ' + str(HERE / f'{name}.log')}")
    raise typer.Exit(0 if recorded and len(alive) == len(recorded) else 1)


@app.command()
def down() -> None:
    """End the processes and all that they started, the worker and its flow runs first."""
    for process in reversed(_living().values()):
        _end(process)
    shutil.rmtree(HERE, ignore_errors=True)


def _mlflow_server(port: int) -> list[str]:
    """Artifacts are files of this machine, so runs write them without a detour over HTTP."""
    root = Path("mlruns").resolve().as_uri()
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", "sqlite:///mlflow.db", "--default-artifact-root", root, "--no-serve-artifacts"]
    return ["mlflow", "server", *address, *store]


def _prepare_server(environment: Mapping[str, str], pool: str, runs: int, gpus: int) -> None:
    """Work pool, GPU limit, deployments and automations; those that exist are brought up to date."""
    os.environ |= environment  # before Prefect is imported, which reads its address once
    from flows.server import set_up_pool, update_automations

    set_up_pool(pool, runs, f"{pool}-gpus", gpus)
    deploy = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    result = subprocess.run(deploy, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ServiceError(f"`prefect deploy --all` failed: {(result.stdout + result.stderr)[-2000:]}")
    update_automations()


def _start(name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """A process of a session of its own, so that Ctrl-C in this terminal does not reach it."""
    with (HERE / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    recorded = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    RECORD.write_text(json.dumps(recorded | {name: (process.pid, psutil.Process(process.pid).create_time())}))


def _wait_for(name: str, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and name in _living():
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise ServiceError(f"{name} did not start: {(HERE / f'{name}.log').read_text()[-2000:]}")


def _living() -> dict[str, psutil.Process]:
    """Name -> process of those that are alive; a pid that has gone to another process since is not one of them."""
    found = {}
    for name, (pid, created) in (json.loads(RECORD.read_text()) if RECORD.is_file() else {}).items():
        try:
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                found[name] = process
        except psutil.NoSuchProcess:
            continue
    return found


def _end(process: psutil.Process) -> None:
    """Ask it to end; after `END_SECONDS` it and what it has started are killed."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    for member in left:
        member.kill()
    psutil.wait_procs(left, timeout=END_SECONDS)


def _require_free(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServiceError(f"port {port} for {name} is taken: choose another with --{name}-port") from error


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    app()
