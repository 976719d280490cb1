# SPDX-License-Identifier: Apache-2.0
"""What a command says of a Prefect server that is not there, or is another's; its own is there until it ends."""

import asyncio
import logging
import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest
from prefect._internal.concurrency.services import QueueService
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.events import Event, Resource
from prefect.events.clients import EventsClient, PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.cli.lost_events import FirstOfLostEvents, give_up_events
from tasks.cli.terminal import last_words
from tasks.system.access import AccessError, guard_temporary_server, start_temporary_server
from tasks.system.ports import free_port
from tests.support.forked import Program
from tests.support.patience import PATIENCE
from tests.support.prefect_store import prefect_in


def words_about(url: str) -> str:
    """What the command ends with; nothing else is begun."""
    begun: list[str] = []
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(AccessError) as refused:
        start_temporary_server(lambda: begun.append("imports"))
    assert begun == []
    said, code = last_words(refused.value)
    assert (code, str(said).count("\n")) == (1, 0)
    return str(said)


def test_a_server_that_has_ended_is_told_in_a_sentence() -> None:
    """As after `make down`, in a terminal that `.services/environment` was read into."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
        said = words_about(url.replace("//", "//me:hidden@"))
    assert said.startswith(f"error: Prefect's server at {url.replace('//', '//***@')} does not answer (")
    assert "hidden" not in said
    assert "unset it, and the run starts a server of its own" in said


@contextmanager
def answering(body: str, status: Callable[[str], int]) -> Iterator[int]:
    """The port of a server that answers so, whatever it is asked; `status` is told the path."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status(self.path))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET
        log_message: Callable[..., None] = lambda *_: None

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def test_a_server_that_fails_at_a_request_is_told_in_a_sentence() -> None:
    """As one whose database has no room left."""
    with (
        answering("{}", lambda _: 500) as port,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
        get_client(sync_client=True) as client,
        pytest.raises(PrefectHTTPStatusError) as failed,
    ):
        client.read_flow_run(uuid4())
    said, code = last_words(failed.value)
    assert code == 1
    assert str(said).startswith("error: Prefect's server failed (500 for /api/flow_runs/")
    assert "its database's disk is full" in str(said)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, "{}", "answers 401: correct PREFECT_API_URL, or its secret, PREFECT_API_AUTH_STRING"),
        (200, "<html>", "does not answer ("),
    ],
)
def test_a_server_that_wants_a_secret_or_is_none_of_prefects(status: int, body: str, told: str) -> None:
    with answering(body, lambda _: status) as port:
        said = words_about(f"http://127.0.0.1:{port}/api")
    assert told in said


@pytest.mark.slow
def test_a_port_that_another_commands_server_takes_meanwhile_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its server says that it is well to anybody, and anything else to those who know its own secret."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    monkeypatch.setattr(os, "environ", others | {"PREFECT_HOME": str(tmp_path)})
    refresh_global_settings_context()
    with answering("true", lambda path: 200 if path == "/api/health" else 401) as other:
        ports = [other, free_port()]
        monkeypatch.setattr(SubprocessASGIServer, "find_available_port", lambda _: ports.pop(0))
        guard_temporary_server()
        start_temporary_server(lambda: None)
        with get_client(sync_client=True) as client:
            assert client.api_version()
            assert str(other) not in str(client.api_url)
    SubprocessASGIServer().stop()
    monkeypatch.undo()
    refresh_global_settings_context()


ENDS = """
import os
import signal
import sys
import time

import psutil
import typer
from prefect import flow, task

from tasks.cli.stopping import raise_it
from tasks.cli.terminal import in_a_sentence, run_flow
from tasks.system.processes import identity

def end_server(number):
    (server,) = [child for child in psutil.Process().children() if "uvicorn" in " ".join(child.cmdline())]
    server.send_signal(number)
    while identity(server.pid) is not None:
        time.sleep(0.1)

@task
def count():
    return 3

@flow
def goes_on():
    end_server(signal.SIGKILL)
    assert count() == 3

@flow
def is_stopped():
    end_server(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)

try:
    with in_a_sentence(on_signal=raise_it):
        run_flow({"goes on": goes_on, "is stopped": is_stopped}[sys.argv[1]], False, meanwhile=lambda: None)
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "state", "ended"),
    [("goes on", 0, "COMPLETED", -signal.SIGKILL), ("is stopped", 128 + signal.SIGTERM, "CRASHED", -signal.SIGTERM)],
)
def test_a_temporary_server_that_ends_before_its_command_is_started_again(
    what: str, code: int, state: str, ended: int, tmp_path: Path
) -> None:
    """It is killed, or told to end with all of a batch job's processes: Prefect still hears of the flow run's end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment |= prefect_in(tmp_path) | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    program = Program(["-c", ENDS, what], Path(__file__).parents[3], environment, tmp_path / "output")
    assert program.wait(PATIENCE) == code, program.output()
    assert f"Prefect's temporary server has ended ({ended}) and is started again" in program.output()
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        assert database.execute("SELECT state_type FROM flow_run").fetchall() == [(state,)]


def test_events_that_a_server_does_not_take_are_told_once() -> None:
    """By Prefect's own client, and its own service, which a run has of that name."""

    class OwnWorker(QueueService[str]):
        async def _handle(self, item: str) -> None:
            raise OSError("nobody answers")

    OwnWorker.__name__ = EventsWorker.__name__
    told: list[str] = []
    console = logging.Handler()
    console.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    console.addFilter(FirstOfLostEvents())
    client = PrefectEventsClient("ws://127.0.0.1:9/api")
    loggers = [logging.getLogger(name) for name in ("prefect.events.clients", "prefect._internal.concurrency")]
    for logger in loggers:
        logger.addHandler(console)
    try:
        for _ in range(2):
            client._log_connection_error(OSError("refused"))
            OwnWorker.instance().send("an event")
        OwnWorker.drain_all(PATIENCE)
        loggers[1].error("Service %r failed", "EventsWorker")
    finally:
        for logger in loggers:
            logger.removeHandler(console)
    first, *others = told
    assert first.startswith("Unable to connect to 'ws://127.0.0.1:9/api")
    assert others == ["Service 'EventsWorker' failed"], "which is another word"


def test_a_command_does_not_wait_for_events_that_nobody_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves those behind the one that is on its way, and says how many; Prefect's own wait at its end is short."""

    class Slow(EventsClient):
        async def _emit(self, event: Event) -> None:
            await asyncio.sleep(1)

    EventsWorker.set_client_override(Slow)
    try:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):  # else a server is started, and stays
            worker = EventsWorker.instance()
        for number in range(100):
            resource = Resource({"prefect.resource.id": "of.a.test"})
            worker.send(Event(event=f"event {number}", resource=resource))
        left = give_up_events(0.1)
        assert 90 < left <= 100
        # Prefect's own log may say beside it what is left, and complain that its stream, an earlier test's, is closed.
        said = [line for line in capsys.readouterr().err.splitlines() if "did not take" in line]
        assert said == [f"Prefect's server did not take the last {left} events of the run"]
        assert worker._drain().result(PATIENCE) is not None
        assert give_up_events(PATIENCE) == 0, "nothing is asked any more"
    finally:
        EventsWorker.set_client_override(None)
