# SPDX-License-Identifier: Apache-2.0
"""A run of a deployment: created as `prefect deployment run` does it, shown line by line to its end, or cancelled."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

import httpx
import typer
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
from prefect.client.schemas.objects import FlowRun, Log
from prefect.deployments import run_deployment
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultRecordMetadata, ResultStore
from prefect.states import Cancelling, State
from prefect.utilities.urls import url_for

from flows.deploy.service_record import HERE
from models.errors import DoubleflowError

T = TypeVar("T")
LOOK_SECONDS = 1.0
OUTAGE_SECONDS, OUTAGE_OF_CANCELLING_SECONDS = 300.0, 10.0
"""For how long a server that does not answer is asked again; Prefect's client has its own retries within."""
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
    """The run of a deployment did not end well, or cannot be followed to its end."""


class Asked:
    """What is asked of Prefect's server about a run; where that answers with an error or not at all, again for a while.

    Args:
        run: which one.
        seconds: for how long.
    """

    def __init__(self, run: FlowRun, seconds: float):
        self._run, self._seconds = run, seconds

    def answer(self, request: Callable[[], T]) -> T:
        """The request's answer.

        Raises:
            RunError: there was none for so long; the run does not depend on it.
        """
        begun, warned = time.monotonic(), False
        while True:
            try:
                found = request()
            except httpx.HTTPError as error:
                why, waited = _why(error), time.monotonic() - begun
            else:
                if warned:
                    typer.echo("Prefect's server answers again", err=True)
                return found
            if waited > self._seconds:
                page = url_for("flow-run", self._run.id)
                raise RunError(
                    f"Prefect's server has not answered for {waited:.0f} s ({why}): the flow run {self._run.name} goes "
                    f"on, but is not shown any more; see {page} and {HERE / 'worker.log'}, and "
                    "`python -m flows.services status` for what is up"
                )
            if not warned:
                warned = True
                typer.echo(f"Prefect's server does not answer ({why}): asked again for {self._seconds:.0f} s", err=True)
            time.sleep(LOOK_SECONDS)


def _why(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"it says {error.response.status_code}"
    return f"{type(error).__name__}: {error}"


def start_run(deployment: str, parameters: Mapping[str, Any]) -> FlowRun:
    """A run of the deployment, "flow/name", which a worker of its pool takes."""
    once = str(uuid4())  # where the answer is lost, Prefect's client asks again: without it for another run
    run = run_deployment(deployment, parameters=dict(parameters), timeout=0, as_subflow=False, idempotency_key=once)
    run = cast(FlowRun, run)
    typer.echo(f"{deployment}: {url_for('flow-run', run.id)}")
    return run


def follow(run: FlowRun) -> FlowRun:
    """The run at its end; until then its states and its logs are shown. A signal that interrupts this cancels the run.

    It asks again and again, in the main thread: there a signal ends it wherever it is.

    Raises:
        RunError: Prefect's server has not answered for `OUTAGE_SECONDS`; the run goes on.
    """
    try:
        with get_client(sync_client=True) as client:
            return _ended(client, run)
    except Exception:
        raise
    except BaseException:  # a signal
        cancel(run)
        raise


def _ended(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    shown, latest, said, asked = set[UUID](), None, "", Asked(run, OUTAGE_SECONDS)
    while True:
        found = asked.answer(lambda: client.read_flow_run(run.id))
        state = _state(found)
        if state.is_final():
            time.sleep(LAST_SECONDS)
        elif state.name and state.name != said:
            said = state.name
            typer.echo(f"the flow run is {said}")
        for log in asked.answer(partial(_logs, client, run.id, latest)):
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
    """Have the worker end it in order, and wait for that; where that is not to be had, say so."""
    typer.echo("cancelling the flow run ...", err=True)
    try:
        _cancel(run)
    except RunError as error:  # whatever else ends, ends for the signal and not for this
        typer.echo(f"the flow run was not seen to end: {error}", err=True)


def _cancel(run: FlowRun) -> None:
    deadline, asked = time.monotonic() + CANCEL_SECONDS, Asked(run, OUTAGE_OF_CANCELLING_SECONDS)
    with get_client(sync_client=True) as client:
        asked.answer(lambda: client.set_flow_run_state(run.id, Cancelling()))
        while not _state(asked.answer(lambda: client.read_flow_run(run.id))).is_final():
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

    Raises:
        RunError: it left none.
    """
    metadata = _state(run).data
    if not isinstance(metadata, ResultRecordMetadata) or metadata.storage_key is None:
        raise RunError(f"the flow run {run.name} is Completed and left no result, as where somebody set that by hand")
    folder = LocalFileSystem(basepath=str(Path(metadata.storage_key).parent))
    return ResultStore(result_storage=folder, serializer=metadata.serializer).read(metadata.storage_key).result


def _state(run: FlowRun) -> State:
    assert run.state is not None
    return run.state
