# SPDX-License-Identifier: Apache-2.0
"""What one machine needs to run deployments: `python -m flows.services up`, `status`, `down` (make up, make down).

Up starts a Prefect server, MLflow and a worker, and makes the work pool, the GPU limit, the deployments and the
automations. The servers want a secret that is made here. It is in .services/, which only its owner can read, with the
processes' pids and logs; down ends them and removes it. Databases and results stay.
"""

import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import psutil
import typer

from flows.deploy import service_log
from flows.deploy.access import (
    USER,
    dvc_environment,
    exports,
    new_access,
    private_folder,
    server_settings,
    write_private,
)
from flows.deploy.heartbeats import HEARTBEATS
from flows.terminal import commands
from models.errors import DoubleflowError
from tasks.system.processes import boot_id, identity, lives

HERE = Path(".services")
RECORD = HERE / "pids.json"
ENVIRONMENT = HERE / "environment"
POOL = HERE / "pool"
WORKER = "local"
START_SECONDS, END_SECONDS = 120, 30
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""In the environment of a process that a worker started for a flow run."""
LARGEST_LOG = 10_000_000
LARGEST_PID = 2**22
"""proc(5), pid_max."""
MLFLOW_APP = "doubleflow"
LOG_WRITERS: dict[str, subprocess.Popen] = {}
T = TypeVar("T")
app = commands("Servers and a worker on this machine.")


class ServiceError(DoubleflowError, RuntimeError):
    """The services cannot be started as asked."""


@dataclass(frozen=True)
class Recorded:
    """A process that was started: `identity` is that of `tasks.system.processes`, `host` the machine."""

    pid: int
    identity: str
    host: str

    @property
    def alive(self) -> bool:
        """Does it still run, here?"""
        return self.host == socket.gethostname() and lives(self.pid, self.identity)

    @property
    def ended(self) -> bool:
        """Has it surely ended: this machine was started again since?"""
        return self.host == socket.gethostname() and not self.identity.startswith(f"{boot_id()}/")


@app.command()
def up(
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's server.")] = 5000,
    pool: Annotated[str, typer.Option(help="Work pool that the deployments name.")] = "local",
    runs: Annotated[int, typer.Option(help="Flow runs that the pool lets run at once.")] = 2,
    gpus: Annotated[int | None, typer.Option(help="GPUs of this machine; left out, as many as torch finds.")] = None,
) -> None:
    """Start what is not up yet; if a part does not start, nothing of what this began stays."""
    ports = {"prefect": prefect_port, "mlflow": mlflow_port}
    with _alone():
        there = _living()
        _require_app()
        access = _access_of(there, ports) if there else new_access()
        for name, port in ports.items():
            if name not in there:
                _require_free(name, port)
        if not there:
            _clear()
        urls = _urls(prefect_port, mlflow_port)
        write_private(ENVIRONMENT, exports(urls | access))
        write_private(POOL, pool)
        # Never as an argument: every user of the machine sees those.
        environment = os.environ | urls | access | dvc_environment(Path.cwd())
        try:
            _start_servers(there, ports, urls, environment | server_settings(access, prefect_port))
            gpus = _gpu_count() if gpus is None else gpus
            typer.echo(f"pool {pool} ({runs} runs at a time, {gpus} GPUs), deployments of prefect.yaml ...")
            _prepare_server(environment, pool, runs, gpus)
            _close_dead_runs()
            if "worker" not in there:
                typer.echo("worker ...")
                _start("worker", ["prefect", "worker", "start", "--pool", pool, "--name", WORKER], environment)
        except BaseException:
            for name, process in reversed(_living().items()):
                if name not in there:
                    _end(process)
            if not there:
                _clear()
            raise
    typer.echo(f"{'already up' if there.keys() >= {*ports, 'worker'} else 'up'}: {_addresses(urls)}")
    typer.echo(f"Prefect's page asks for PREFECT_API_AUTH_STRING, MLflow's for {USER} and MLFLOW_TRACKING_PASSWORD.")
    typer.echo(f"For another terminal, `. {ENVIRONMENT}` or:\n{exports(urls | access)}", nl=False)


def _urls(prefect_port: int, mlflow_port: int) -> dict[str, str]:
    """The variables that lead to the servers and to this folder, and say how often a run gives a sign of life."""
    return {
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        "DOUBLEFLOW_HOME": str(Path.cwd()),
    } | HEARTBEATS


def _addresses(urls: Mapping[str, str]) -> str:
    return f"Prefect {urls['PREFECT_API_URL'].removesuffix('/api')}   MLflow {urls['MLFLOW_TRACKING_URI']}"


def _access_of(living: Mapping[str, psutil.Process], ports: Mapping[str, int]) -> dict[str, str]:
    """The secrets of what is up, which what is started beside it needs.

    Raises:
        ServiceError: they are not there, or it is at other ports.
    """
    names, written = ", ".join(living), _exported() if ENVIRONMENT.is_file() else {}
    if not written.keys() >= {*new_access(), *_urls(0, 0)}:
        raise ServiceError(f"already up ({names}), but {ENVIRONMENT} is not whole: `make down` first")
    wanted = _urls(ports["prefect"], ports["mlflow"])
    if any(written[name] != url for name, url in wanted.items()):
        raise ServiceError(
            f"already up ({names}) at {_addresses(written)} for {written['DOUBLEFLOW_HOME']}, not at "
            f"{_addresses(wanted)}: give these ports, or `make down` first"
        )
    return {name: written[name] for name in new_access()}


def _start_servers(
    there: Mapping[str, psutil.Process], ports: Mapping[str, int], urls: Mapping[str, str], servers: Mapping[str, str]
) -> None:
    """Those that are not there, both at once; they answer afterwards."""
    prefect = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(ports["prefect"])]
    commands = {"prefect": prefect, "mlflow": _mlflow_server(ports["mlflow"])}
    missing = {name: arguments for name, arguments in commands.items() if name not in there}
    for name, arguments in missing.items():
        typer.echo(f"{name} at port {ports[name]}, which takes up to a minute ({HERE / f'{name}.log'}) ...")
        _start(name, arguments, servers)
    health = {"prefect": f"{urls['PREFECT_API_URL']}/health", "mlflow": f"{urls['MLFLOW_TRACKING_URI']}/health"}
    for name in missing:
        _wait_for(name, health[name])
        typer.echo(f"{name} answers")


@app.command()
def status() -> None:
    """Which of the processes are alive; exit code 1 if one is not."""
    recorded = _recorded()
    for name, process in recorded.items():
        state = "up" if process.alive else f"gone, see {HERE / f'{name}.log'}"
        typer.echo(f"{name:10} pid {process.pid:<8} {state}")
    raise typer.Exit(0 if recorded and all(process.alive for process in recorded.values()) else 1)


@app.command()
def down() -> None:
    """End the processes and all that they started, the flow runs and the worker first; exit code 1 if one is missing.

    The flow runs are Crashed then, and their MLflow runs KILLED or FAILED: the servers hear of it before they end.
    The record of a process that was not found stays: it has ended by itself, or is in another container or machine.
    """
    if not HERE.is_dir():
        return
    with _alone():
        recorded, living = _recorded(), _living()
        _end_flow_runs(living.get("worker"))
        for process in reversed(living.values()):
            _end(process)
        missing = {name: entry for name, entry in recorded.items() if name not in living and not entry.ended}
        if not missing:
            shutil.rmtree(HERE)
            return
        _write_record(missing)
        for name, entry in missing.items():
            typer.echo(f"{name} (pid {entry.pid} on {entry.host}) was not found: has it ended by itself?", err=True)
        typer.echo(
            f"Their record and logs stay in {HERE}/. If they run in another container or on that machine, run `down` "
            f"there; else remove the folder, or the next `up` does.",
            err=True,
        )
    raise typer.Exit(1)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold .services/, which is made: no two of `up` and `down` work at the same time.

    Raises:
        ServiceError: another one does.
    """
    busy = f"another `up` or `down` is at work in {Path.cwd()}: wait for it"
    with (private_folder(HERE) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.stat(lock.name).st_ino == os.fstat(lock.fileno()).st_ino  # not one that has been removed since
        except (BlockingIOError, FileNotFoundError) as error:
            raise ServiceError(busy) from error
        if not same:
            raise ServiceError(busy)
        yield


def _clear() -> None:
    """Remove what an earlier start has left, but the lock."""
    for file in HERE.iterdir():
        if file.name != "lock":
            file.unlink()


def _mlflow_server(port: int) -> list[str]:
    """Artifacts are files of this machine, so runs write them without a detour over HTTP."""
    root = Path("mlruns").resolve().as_uri()
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", "sqlite:///mlflow.db", "--default-artifact-root", root, "--no-serve-artifacts"]
    return ["mlflow", "server", "--app-name", MLFLOW_APP, *address, *store]


def _prepare_server(environment: Mapping[str, str], pool: str, runs: int, gpus: int) -> None:
    """Work pool, GPU limit, deployments and automations; those that exist are brought up to date."""
    os.environ |= environment
    from prefect.context import refresh_global_settings_context

    from flows.deploy.prefect_server import set_up_pool, update_automations

    refresh_global_settings_context()
    set_up_pool(pool, runs, f"{pool}-gpus", gpus)
    deploy = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    result = subprocess.run(deploy, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ServiceError(f"`prefect deploy --all` failed: {(result.stdout + result.stderr)[-2000:]}")
    update_automations()


def _start(name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """A process of a session of its own, so that Ctrl-C in this terminal does not reach it."""
    log = [sys.executable, "-S", service_log.__file__, str(HERE / f"{name}.log"), str(LARGEST_LOG)]
    writer = subprocess.Popen(log, stdin=subprocess.PIPE, start_new_session=True)
    assert writer.stdin is not None
    with writer.stdin as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdout=pipe, stderr=pipe, start_new_session=True
        )
    LOG_WRITERS[name] = writer
    # One that has ended already is recorded, too: `_wait_for` says why.
    recorded = Recorded(process.pid, identity(process.pid) or f"{boot_id()}/ended", socket.gethostname())
    _write_record(_recorded() | {name: recorded})


def _wait_for(name: str, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and name in _living():
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    if name not in _living():
        with suppress(subprocess.TimeoutExpired):
            LOG_WRITERS[name].wait(END_SECONDS)  # it writes the last words
    raise ServiceError(f"{name} did not start: {(HERE / f'{name}.log').read_text(errors='replace')[-2000:]}")


def _recorded() -> dict[str, Recorded]:
    return recorded_in(RECORD)


def recorded_in(file: Path) -> dict[str, Recorded]:
    """Name -> process of what was started; nothing without the file.

    Raises:
        ServiceError: the record is broken.
    """
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text(), object_pairs_hook=_once)
        return {name: _checked(entry) for name, entry in record.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ServiceError(
            f"{file} cannot be read ({error}): end the servers and the worker by hand, if they run (`pgrep -af "
            f"'prefect|mlflow'`), then remove {file.parent}/"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two processes under one name only one would be ended."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _checked(entry: Any) -> Recorded:
    """One process of the record. Raises ValueError or TypeError where it is none."""
    pid, who, host = entry
    if type(pid) is not int or not 0 < pid <= LARGEST_PID or not isinstance(who, str) or not isinstance(host, str):
        raise ValueError(f"{str(entry)[:60]} is no process")
    return Recorded(pid, who, host)


def _write_record(processes: Mapping[str, Recorded]) -> None:
    """Written aside and renamed: there is the old record or the new one."""
    aside = RECORD.with_suffix(".new")
    write_private(aside, json.dumps({name: (p.pid, p.identity, p.host) for name, p in processes.items()}))
    os.replace(aside, RECORD)


def _living() -> dict[str, psutil.Process]:
    """Name -> process of those that are alive; a pid that has gone to another process since is not one of them."""
    found = {}
    for name, process in _recorded().items():
        with suppress(psutil.NoSuchProcess):
            if process.alive:
                found[name] = psutil.Process(process.pid)
    return found


def _end(process: psutil.Process) -> None:
    """Ask it to end; after `END_SECONDS` it and what it has started are killed."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    for member in left:
        member.kill()
    psutil.wait_procs(left, timeout=END_SECONDS)


def _end_flow_runs(worker: psutil.Process | None) -> None:
    """End the worker's flow runs: each says so itself, and Prefect and MLflow are told of those that could not.

    A server that does not answer keeps nothing alive: the next `up` makes up for it.
    """
    processes = _flow_processes(worker)
    if not ENVIRONMENT.is_file() or not POOL.is_file():
        return _ask_to_end(processes.values())
    os.environ |= _exported() | {"PREFECT_CLIENT_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    from prefect.context import refresh_global_settings_context

    from flows.deploy import prefect_server

    refresh_global_settings_context()
    pool = POOL.read_text()
    _attempt("Prefect", lambda: prefect_server.pause_pool(pool))
    _ask_to_end(processes.values())
    message = "`make down` ended its process. Started again, a training run continues from its newest checkpoint."
    ended = _attempt("Prefect", lambda: prefect_server.end_flow_runs(pool, WORKER, list(processes), message))
    if count := max(len(processes), len(ended or [])):
        typer.echo(f"ended {count} flow run{'s' * (count > 1)}: a training run that is started again continues")
    _attempt("MLflow", _close_dead_runs)
    return None


def _flow_processes(worker: psutil.Process | None) -> dict[str, psutil.Process]:
    """Flow run id -> its process, of those that a worker runs."""
    found = {}
    for process in [] if worker is None else worker.children():
        with suppress(psutil.Error):
            environment = process.environ()
            if FLOW_RUN in environment:
                found[environment[FLOW_RUN]] = process
    return found


def _ask_to_end(processes: Collection[psutil.Process]) -> None:
    """Ask them to end, and wait `END_SECONDS` for it."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(_runs(process) for process in processes):
        time.sleep(0.2)
    for process in filter(_runs, processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    """One that has ended stays in the list of processes until its parent has asked for its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _attempt(server: str, request: Callable[[], T]) -> T | None:
    """What the server answers; None, with a line, where it does not."""
    try:
        return request()
    except Exception as error:  # whatever it is, the processes are to end
        typer.echo(f"{server} could not be told: {' '.join(str(error).split())[:200] or repr(error)}", err=True)
        return None


def _close_dead_runs() -> None:
    """Of MLflow, which the environment leads to."""
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    from mlflow import MlflowClient

    from tasks.records.owner import close_dead_runs

    for run in close_dead_runs(MlflowClient(os.environ["MLFLOW_TRACKING_URI"])):
        typer.echo(f"MLflow run {run} is FAILED: its process ended without a word")


def _exported() -> dict[str, str]:
    """The variables of .services/environment."""
    words = (shlex.split(line)[1] for line in ENVIRONMENT.read_text().splitlines())
    return dict(word.split("=", 1) for word in words)


def _require_free(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServiceError(
                f"port {port} for {name} is taken: choose another with --{name}-port, "
                f"`make up {name.upper()}_PORT={port + 1}`"
            ) from error


def _require_app() -> None:
    if MLFLOW_APP not in entry_points(group="mlflow.app").names:
        raise ServiceError(
            "the installed package does not have MLflow's guard yet: `pip install -e .` again (`make up` does it)"
        )


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    app()
