# SPDX-License-Identifier: Apache-2.0
"""Starts what is not up yet of `make up`: servers, worker, work pool, GPU limit, deployments and automations."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import typer

from flows.deploy.flow_runs import WORKER, fail_dead_runs
from flows.deploy.service_processes import (
    end_leftovers,
    end_process,
    free_port,
    require_free_port,
    start_process,
    wait_until_healthy,
)
from flows.deploy.service_record import (
    ENVIRONMENT,
    HERE,
    Pool,
    ServiceError,
    clear_services,
    hold_services,
    living_processes,
)
from tasks.records.moved_records import DATABASE, FILES, require_own_files
from tasks.system.access import dvc_environment, exported, exports, new_access, server_settings, write_private
from tasks.system.heartbeats import HEARTBEATS

MLFLOW_APP = "doubleflow"
PORTS = {"prefect": 4200, "mlflow": 5000}
POOL_NAME, RUNS = "local", 2
SERVICES = {*PORTS, "worker"}
ADDRESSES = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}


def bring_up(
    ports: Mapping[str, int],
    pool: str | None = None,
    runs: int | None = None,
    gpus: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Start what is not up yet, or nothing; the variables that lead to it, which this process has then, too.

    Args:
        pool: which work pool; left out, as runs at a time and GPUs may be, that of what is up, or the usual one.
        check: called while the servers start; where it raises, nothing stays that this has started.
    """
    with hold_services():
        there = living_processes()
        _require_app()
        access = _access_of(there, ports) if there else new_access()
        require_own_files(Path())
        end_leftovers()
        for name, port in ports.items():
            if name not in there:
                require_free_port(name, port)
        if not there:
            clear_services()
        urls = _home_of(there) | _urls(ports["prefect"], ports["mlflow"])
        asked = _pool(there, pool, runs, gpus)
        write_private(ENVIRONMENT, exports(urls | access))
        asked.record()
        # Never as an argument: every user of the machine sees those.
        environment = os.environ | urls | access | dvc_environment(Path.cwd())
        try:
            _start_servers(there, ports, urls, environment | server_settings(access, ports["prefect"]), check)
            typer.echo(
                f"pool {asked.name} ({asked.runs} runs at a time, {asked.gpus} GPUs), deployments of prefect.yaml ..."
            )
            _prepare_server(environment, asked)
            fail_dead_runs()
            if "worker" not in there:
                typer.echo("worker ...")
                worker = ["prefect", "worker", "start", "--pool", asked.name, "--name", WORKER]
                start_process("worker", worker, environment)
        except BaseException:
            for name, process in reversed(living_processes().items()):
                if name not in there:
                    end_process(process)
            if not there:
                clear_services()
            raise
    return urls | access


def use(recipe: str) -> dict[str, str]:
    """The variables that lead to what is up, which this process has then, too; the recipe there is as it is now."""
    environment = exported(ENVIRONMENT)
    _enter(environment)
    typer.echo(f"already up: {addresses(environment)}; deployment {recipe} ...")
    _deploy(environment, "--name", recipe)
    return environment


def addresses(urls: Mapping[str, str]) -> str:
    """Where both servers' pages are, in a line."""
    return f"Prefect {urls['PREFECT_API_URL'].removesuffix('/api')}   MLflow {urls['MLFLOW_TRACKING_URI']}"


def ports_for(there: Mapping[str, psutil.Process]) -> dict[str, int]:
    """Those of what is there; else the usual ones, and in place of one that is taken a free one."""
    if not there:
        return {name: free_port(port) for name, port in PORTS.items()}
    written = _written()
    return {name: urlsplit(written.get(ADDRESSES[name], "")).port or port for name, port in PORTS.items()}


def _written() -> dict[str, str]:
    """The variables that the last `up` has written; none without."""
    return exported(ENVIRONMENT) if ENVIRONMENT.is_file() else {}


def _pool(there: Mapping[str, psutil.Process], name: str | None, runs: int | None, gpus: int | None) -> Pool:
    """What is asked for; what is not said as it is up, or as usual.

    Raises:
        ServiceError: the worker that is up is of another pool.
    """
    up = Pool.recorded() if there else None
    if up is not None and "worker" in there and name not in (None, up.name):
        raise ServiceError(f"the worker is up in pool {up.name}, not in {name}: leave --pool out, or `make down` first")
    if gpus is None:
        gpus = _gpu_count() if up is None else up.gpus
    usual = up or Pool(POOL_NAME, RUNS, gpus)
    return Pool(name or usual.name, runs or usual.runs, gpus)


def _home_of(there: Mapping[str, psutil.Process]) -> dict[str, str]:
    """Where Prefect has its data base: with this folder, so that two checkouts have one each, unless somebody says."""
    written = _written() if there else {}
    given = written.get("PREFECT_HOME") or os.environ.get("PREFECT_HOME") or str(Path.cwd() / ".prefect")
    return {"PREFECT_HOME": given}


def _urls(prefect_port: int, mlflow_port: int) -> dict[str, str]:
    """The variables that lead to the servers and to this folder, and say how often a run gives a sign of life."""
    return {
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        "DOUBLEFLOW_HOME": str(Path.cwd()),
    } | HEARTBEATS


def _access_of(living: Mapping[str, psutil.Process], ports: Mapping[str, int]) -> dict[str, str]:
    """The secrets of what is up, which what is started beside it needs.

    Raises:
        ServiceError: they are not there, or it is at other ports.
    """
    names, written = ", ".join(living), _written()
    if not written.keys() >= {*new_access(), *_urls(0, 0)}:
        raise ServiceError(f"already up ({names}), but {ENVIRONMENT} is not whole: `make down` first")
    wanted = _urls(ports["prefect"], ports["mlflow"])
    if any(written[name] != url for name, url in wanted.items()):
        raise ServiceError(
            f"already up ({names}) at {addresses(written)} for {written['DOUBLEFLOW_HOME']}, not at "
            f"{addresses(wanted)}: give these ports, or `make down` first"
        )
    return {name: written[name] for name in new_access()}


def _start_servers(
    there: Mapping[str, psutil.Process],
    ports: Mapping[str, int],
    urls: Mapping[str, str],
    servers: Mapping[str, str],
    check: Callable[[], None],
) -> None:
    """Those that are not there, both at once; they answer afterwards."""
    prefect = ["flows.deploy.prefect_command", "server", "start", *_address(ports["prefect"])]
    commands = {"prefect": prefect, "mlflow": _mlflow_server(ports["mlflow"])}
    missing = {name: arguments for name, arguments in commands.items() if name not in there}
    for name, arguments in missing.items():
        typer.echo(f"{name} at port {ports[name]}, which takes up to a minute ({HERE / f'{name}.log'}) ...")
        start_process(name, arguments, servers)
    health = {"prefect": f"{urls['PREFECT_API_URL']}/health", "mlflow": f"{urls['MLFLOW_TRACKING_URI']}/health"}
    for name in missing:
        wait_until_healthy(name, health[name], check)
        typer.echo(f"{name} answers")


def _mlflow_server(port: int) -> list[str]:
    """Artifacts are files of this machine, so runs write them without a detour over HTTP."""
    root = Path(FILES).resolve().as_uri()
    store = ["--backend-store-uri", f"sqlite:///{DATABASE}", "--default-artifact-root", root, "--no-serve-artifacts"]
    return ["mlflow", "server", "--app-name", MLFLOW_APP, *_address(port), "--workers", "1", *store]


def _address(port: int) -> list[str]:
    """Where a server listens: on this machine alone."""
    return ["--host", "127.0.0.1", "--port", str(port)]


def _prepare_server(environment: Mapping[str, str], pool: Pool) -> None:
    """Work pool, GPU limit, deployments and automations; those that exist are brought up to date."""
    _enter(environment)
    from flows.deploy.prefect_server import set_up_pool, update_automations

    set_up_pool(pool.name, pool.runs, f"{pool.name}-gpus", pool.gpus)
    _deploy(environment, "--all")
    update_automations()


def _enter(environment: Mapping[str, str]) -> None:
    """From now on this process's own clients talk to the servers that these variables lead to."""
    os.environ |= environment
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()


def _deploy(environment: Mapping[str, str], *which: str) -> None:
    deploy = [sys.executable, "-m", "flows.deploy.deploy_command", "--no-prompt", "deploy", *which]
    result = subprocess.run(deploy, env=os.environ | environment, capture_output=True, text=True)
    if result.returncode:
        raise ServiceError(f"`prefect deploy {' '.join(which)}` failed: {(result.stdout + result.stderr)[-2000:]}")


def _require_app() -> None:
    if MLFLOW_APP not in entry_points(group="mlflow.app").names:
        raise ServiceError(
            "the installed package does not have MLflow's guard yet: `pip install -e .` again (`make up` does it)"
        )


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()
