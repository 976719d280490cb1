# SPDX-License-Identifier: Apache-2.0
"""A run of a deployment: created as `prefect deployment run` does it, shown line by line to its end, or cancelled."""

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import typer
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
from prefect.client.schemas.objects import FlowRun, Log
from prefect.deployments import run_deployment
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultRecordMetadata, ResultStore
from prefect.states import Cancelling, State
from prefect.utilities.urls import url_for

from models.errors import DoubleflowError

LOOK_SECONDS = 1.0
LATE = timedelta(seconds=30)
"""A log may come so much later than another one that says a later time: several threads send them."""
LAST_SECONDS = 3.0
"""After a run's end, within which its last logs come."""
CANCEL_SECONDS = 120
FRAMES = "\nTraceback (most recent call last):"
"""From here on a log is for the run's page."""
LOGS_AT_ONCE = 200
"""The most that the server gives."""


class RunError(DoubleflowError, RuntimeError):
    """The run of a deployment did not end well."""


def start_run(deployment: str, parameters: Mapping[str, Any]) -> FlowRun:
    """A run of the deployment, "flow/name", which a worker of its pool takes."""
    run = cast(FlowRun, run_deployment(deployment, parameters=dict(parameters), timeout=0, as_subflow=False))
    typer.echo(f"{deployment}: {url_for('flow-run', run.id)}")
    return run


def follow(run: FlowRun) -> FlowRun:
    """The run at its end; until then its states and its logs are shown. What interrupts this cancels the run.

    It asks again and again, in the main thread: there a signal ends it wherever it is.
    """
    try:
        with get_client(sync_client=True) as client:
            return _ended(client, run.id)
    except Exception:
        raise
    except BaseException:  # a signal
        cancel(run)
        raise


def _ended(client: SyncPrefectClient, run: UUID) -> FlowRun:
    shown, latest, said = set[UUID](), None, ""
    while True:
        found = client.read_flow_run(run)
        state = _state(found)
        if state.is_final():
            time.sleep(LAST_SECONDS)
        elif state.name and state.name != said:
            said = state.name
            typer.echo(f"the flow run is {said}")
        for log in _logs(client, run, latest):
            latest = log.timestamp - LATE
            if log.id not in shown:
                shown.add(log.id)
                typer.echo(log.message.partition(FRAMES)[0])
        if state.is_final():
            return found
        time.sleep(LOOK_SECONDS)


def _logs(client: SyncPrefectClient, run: UUID, after: Any) -> list[Log]:
    """Those since then, oldest first."""
    since = None if after is None else LogFilterTimestamp(after_=after)
    wanted, found = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]), timestamp=since), list[Log]()
    while len(found) % LOGS_AT_ONCE == 0:
        page = client.read_logs(wanted, limit=LOGS_AT_ONCE, offset=len(found))
        found += page
        if not page:
            break
    return found


def cancel(run: FlowRun) -> None:
    """Have the worker end it in order, and wait for that."""
    typer.echo("cancelling the flow run ...", err=True)
    deadline = time.monotonic() + CANCEL_SECONDS
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
        while not _state(client.read_flow_run(run.id)).is_final():
            if time.monotonic() > deadline:
                page = url_for("flow-run", run.id)
                typer.echo(f"the flow run did not end within {CANCEL_SECONDS} s: see {page}", err=True)
                return
            time.sleep(LOOK_SECONDS)


def check_completed(run: FlowRun) -> None:
    """Raise RunError, with what Prefect says of its end, where a run that has ended did not end well."""
    state = _state(run)
    if not state.is_completed():
        raise RunError(f"the flow run {run.name} is {state.name}: {state.message}")


def result_of(run: FlowRun) -> Any:
    """What a completed run returned, which its process wrote into a folder of this machine.

    That folder is the worker's: a PREFECT_HOME of this process has another one.
    """
    metadata = _state(run).data
    assert isinstance(metadata, ResultRecordMetadata)
    assert metadata.storage_key is not None
    folder = LocalFileSystem(basepath=str(Path(metadata.storage_key).parent))
    return ResultStore(result_storage=folder, serializer=metadata.serializer).read(metadata.storage_key).result


def _state(run: FlowRun) -> State:
    assert run.state is not None
    return run.state
