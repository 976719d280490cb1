# SPDX-License-Identifier: Apache-2.0
"""The flow runs of this machine's worker: ended with it, and Prefect and MLflow told of those that could not say so."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil
import typer

from flows.deploy.service_processes import ask_to_end
from flows.deploy.service_record import ENVIRONMENT, POOL, Pool, ServiceError
from tasks.system.access import exported
from tasks.system.late_mlflow import mlflow

WORKER = "local"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""In the environment of a process that a worker started for a flow run."""
T = TypeVar("T")


def end_worker_flow_runs(worker: psutil.Process | None) -> None:
    """End the worker's flow runs: each says so itself, and Prefect and MLflow are told of those that could not.

    A server that does not answer keeps nothing alive: the next `up` makes up for it.
    """
    processes = _flow_processes(worker)
    pool = _known_pool()
    if not ENVIRONMENT.is_file() or pool is None:
        return ask_to_end(processes.values())
    os.environ |= exported(ENVIRONMENT) | {"PREFECT_CLIENT_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    from prefect.context import refresh_global_settings_context

    from flows.deploy import prefect_server

    refresh_global_settings_context()
    _attempt("Prefect", lambda: prefect_server.pause_pool(pool.name))
    ask_to_end(processes.values())
    message = "`make down` ended its process. Started again, a training run continues from its newest checkpoint."
    ended = _attempt("Prefect", lambda: prefect_server.end_flow_runs(pool.name, WORKER, list(processes), message))
    if count := max(len(processes), len(ended or [])):
        typer.echo(f"ended {count} flow run{'s' * (count > 1)}: a training run that is started again continues")
    _attempt("MLflow", fail_dead_runs)
    return None


def _known_pool() -> Pool | None:
    """The pool that is recorded; None, with a line, where the record is damaged: the processes are to end."""
    try:
        return Pool.recorded()
    except ServiceError:
        typer.echo(f"{POOL} does not say which work pool is up: what flow runs do not say is left to `up`", err=True)
        return None


def _flow_processes(worker: psutil.Process | None) -> dict[str, psutil.Process]:
    """Flow run id -> its process, of those that a worker runs."""
    found, children = {}, list[psutil.Process]()
    with suppress(psutil.NoSuchProcess):  # it has just ended
        children = [] if worker is None else worker.children()
    for process in children:
        with suppress(psutil.Error):
            environment = process.environ()
            if FLOW_RUN in environment:
                found[environment[FLOW_RUN]] = process
    return found


def _attempt(server: str, request: Callable[[], T]) -> T | None:
    """What the server answers; None, with a line, where it does not."""
    try:
        return request()
    except Exception as error:  # whatever it is, the processes are to end
        typer.echo(f"{server} could not be told: {' '.join(str(error).split())[:200] or repr(error)}", err=True)
        return None


def fail_dead_runs() -> None:
    """In MLflow, which the environment leads to: the runs of processes that are dead are FAILED, with a line each."""
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    from tasks.records.owner import close_dead_runs

    for run in close_dead_runs(mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])):
        typer.echo(f"MLflow run {run} is FAILED: its process ended without a word")
