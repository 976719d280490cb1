# SPDX-License-Identifier: Apache-2.0
"""What one machine needs to run deployments: `python -m flows.services up`, `status`, `down` (make up, make down).

Up starts a Prefect server, MLflow and a worker, and makes the work pool, the GPU limit, the deployments and the
automations. The servers want a secret that is made here. It is in .services/, which only its owner can read, with the
processes' pids and logs; down ends them and removes it. Databases and results stay.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import psutil
import typer

from flows.deploy.flow_runs import WORKER, end_worker_flow_runs, fail_dead_runs
from flows.deploy.service_processes import end_process, require_free_port, start_process, wait_until_healthy
from flows.deploy.service_record import (
    ENVIRONMENT,
    HERE,
    POOL,
    ServiceError,
    clear_services,
    hold_services,
    living_processes,
    recorded_processes,
    write_record,
)
from tasks.cli.terminal import commands
from tasks.system.access import (
    USER,
    dvc_environment,
    exported,
    exports,
    new_access,
    server_settings,
    write_private,
)
from tasks.system.heartbeats import HEARTBEATS

MLFLOW_APP = "doubleflow"
app = commands("Servers and a worker on this machine.")


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
    with hold_services():
        there = living_processes()
        _require_app()
        access = _access_of(there, ports) if there else new_access()
        for name, port in ports.items():
            if name not in there:
                require_free_port(name, port)
        if not there:
            clear_services()
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
            fail_dead_runs()
            if "worker" not in there:
                typer.echo("worker ...")
                start_process("worker", ["prefect", "worker", "start", "--pool", pool, "--name", WORKER], environment)
        except BaseException:
            for name, process in reversed(living_processes().items()):
                if name not in there:
                    end_process(process)
            if not there:
                clear_services()
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
    names, written = ", ".join(living), exported(ENVIRONMENT) if ENVIRONMENT.is_file() else {}
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
        start_process(name, arguments, servers)
    health = {"prefect": f"{urls['PREFECT_API_URL']}/health", "mlflow": f"{urls['MLFLOW_TRACKING_URI']}/health"}
    for name in missing:
        wait_until_healthy(name, health[name])
        typer.echo(f"{name} answers")


@app.command()
def status() -> None:
    """Which of the processes are alive; exit code 1 if one is not."""
    recorded = recorded_processes()
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
    with hold_services():
        recorded, living = recorded_processes(), living_processes()
        end_worker_flow_runs(living.get("worker"))
        for process in reversed(living.values()):
            end_process(process)
        missing = {name: entry for name, entry in recorded.items() if name not in living and not entry.ended}
        if not missing:
            shutil.rmtree(HERE)
            return
        write_record(missing)
        for name, entry in missing.items():
            typer.echo(f"{name} (pid {entry.pid} on {entry.host}) was not found: has it ended by itself?", err=True)
        typer.echo(
            f"Their record and logs stay in {HERE}/. If they run in another container or on that machine, run `down` "
            f"there; else remove the folder, or the next `up` does.",
            err=True,
        )
    raise typer.Exit(1)


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
