# SPDX-License-Identifier: Apache-2.0
"""A run that is followed goes on where Prefect's server has an error, and so does what it needs; a signal ends both."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from pydantic import ValidationError

from flows import services
from flows.deploy import deployed_run
from flows.deploy.deployed_run import RunError
from flows.deploy.service_record import HERE, Recorded, living_processes, write_record
from tasks.system.processes import identity
from tests.support.patience import PATIENCE

CTRL_C = "Ctrl-C"
RUN, FLOW, DEPLOYMENT = uuid4(), uuid4(), uuid4()


@dataclass
class Server:
    """What Prefect's server answers of one run of one deployment.

    Attributes:
        looks: for each question after the run, what comes: an HTTP status, a state, or Ctrl-C; the last goes on.
        asked: the paths that were asked for.
    """

    looks: list[int | str]
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        self.asked.append(path)
        if path == f"/api/flow_runs/{RUN}":
            look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            if look == CTRL_C:
                os.kill(os.getpid(), signal.SIGINT)
                look = "RUNNING"
            return (look, {}) if isinstance(look, int) else (200, run_in(look))
        if path == f"/api/flow_runs/{RUN}/set_state":
            if self.looks == [500]:
                return 500, {}
            self.looks = ["CANCELLED"]
            return 201, {"status": "ACCEPT", "details": {"type": "accept_details"}, "state": {"type": "CANCELLING"}}
        if path == "/api/logs/filter":
            return 200, []
        if path.startswith("/api/deployments/name/"):
            return 200, {"id": str(DEPLOYMENT), "name": "words", "flow_id": str(FLOW)}
        if path == f"/api/deployments/{DEPLOYMENT}/create_flow_run":
            return 201, run_in("SCHEDULED")
        return 404, {}


def run_in(state: str) -> dict[str, Any]:
    found = {"type": state, "name": state.capitalize(), "message": "as it is"}
    return {"id": str(RUN), "flow_id": str(FLOW), "name": "a run", "state": found}


@contextmanager
def serving(*looks: int | str) -> Iterator[Server]:
    """On a free port of loopback, where Prefect's client finds it; it is given up soon where it answers no more."""
    server, outage = Server(list(looks)), 0.2 if looks[-1] == 500 else PATIENCE

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, found = server.answer(self.command, self.path)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_address[1]}/api"
        settings = temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0})
        with settings, pytest.MonkeyPatch.context() as patch:
            for name in ("OUTAGE", "OUTAGE_OF_CANCELLING"):
                patch.setattr(deployed_run, f"{name}_SECONDS", outage)
            yield server
        listening.shutdown()


@pytest.fixture(autouse=True)
def brought_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `run` finds up once it has brought it up, in place of servers and worker; looks are short."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("LOOK", 0.01), ("LAST", 0)):
        monkeypatch.setattr(deployed_run, f"{name}_SECONDS", seconds)
    started: list[subprocess.Popen] = []

    def bring_up(*arguments: Any, **named: Any) -> dict[str, str]:
        HERE.mkdir()
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(process)
        write_record({"mlflow": Recorded(process.pid, identity(process.pid) or "", socket.gethostname())})
        return {"PREFECT_API_URL": "a", "MLFLOW_TRACKING_URI": "b"}

    monkeypatch.setattr(services, "bring_up", bring_up)
    monkeypatch.setattr(services, "_checked_parameters", lambda *arguments, **named: {})
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the tests are
    yield
    signal.signal(signal.SIGINT, earlier)
    for process in started:
        process.kill()
        process.wait()


def test_an_error_of_one_look_is_looked_after_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Two outages, each of which is told once; the run then ends as it ends."""
    looks = "RUNNING", 500, 500, "RUNNING", 500, "FAILED"
    with serving(*looks) as server, pytest.raises(RunError, match="the flow run a run is Failed: as it is"):
        services.run("words")
    said = capsys.readouterr().err
    assert said.count("Prefect's server does not answer (it says 500)") == 2
    assert said.count("Prefect's server answers again") == 2
    assert server.asked.count(f"/api/flow_runs/{RUN}") == len(looks)
    assert living_processes().keys() == {"mlflow"}


@pytest.mark.parametrize(
    ("look", "error", "told"),
    [
        (500, RunError, rf"not answered for \d+ s \(it says 500\): the flow run a run goes on, .*{RUN}.*status"),
        ("nonsense", ValidationError, "state.type"),
    ],
)
def test_what_the_run_needs_stays_whatever_prefects_server_says(
    look: int | str, error: type[Exception], told: str
) -> None:
    with serving("RUNNING", look), pytest.raises(error, match=told) as raised:
        services.run("words")
    (note,) = raised.value.__notes__
    assert note.startswith("still up: ")
    assert living_processes().keys() == {"mlflow"}


@pytest.mark.parametrize("then", ["RUNNING", 500])
def test_a_signal_ends_all_also_where_prefects_server_is_away(
    then: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("RUNNING", CTRL_C, then), pytest.raises(KeyboardInterrupt) as raised:
        services.run("words")
    assert any(note.startswith("continue: ") for note in raised.value.__notes__)
    assert not living_processes()
    assert ("was not seen to end" in capsys.readouterr().err) == (then == 500)
