# SPDX-License-Identifier: Apache-2.0
"""The record of `make up`, the password before MLflow, the secret of the temporary server, and `make prune`."""

import asyncio
import base64
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings
from typer.testing import CliRunner

from flows import prune
from flows.deploy import service_log
from flows.deploy.bring_up import _access_of, _urls
from flows.deploy.flow_runs import end_worker_flow_runs
from flows.deploy.mlflow_app import create_app, guarded
from flows.deploy.service_processes import end_leftovers, end_process, free_port, require_free_port
from flows.deploy.service_record import (
    ENVIRONMENT,
    HERE,
    POOL,
    RECORD,
    ServiceError,
    clear_services,
    hold_services,
    living_processes,
)
from flows.services import _ended_with_an_error, app
from tasks.actors.reward_group import Scores
from tasks.cli.terminal import command_of
from tasks.config.recipes import PREFECT_FILE
from tasks.records.run_lock import run_lock
from tasks.records.run_store import CheckpointStore, RunState
from tasks.run.kept_stages import KeptStages
from tasks.system.access import STARTUP_SECONDS, exports, guard_temporary_server, new_access
from tasks.system.files import bytes_on_disk
from tasks.system.heartbeats import heartbeats
from tasks.system.processes import boot_id, identity
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until
from tests.support.prefect_store import prefect_in

CREDENTIALS = "me:secret"
TEMPORARY = """
import contextlib, json, os, re, signal
import httpx, psutil
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings
import tasks.cli.commands, flows.compare, flows.reproduce, flows.train
from prefect.context import refresh_global_settings_context
from tests.support.processes import with_word, words_of

before, told = dict(os.environ), {}

def train(*arguments, **named):
    secret = os.environ["PREFECT_SERVER_API_AUTH_STRING"]
    with get_client(sync_client=True) as client:
        client.read_flows()
        api = str(client.api_url).rstrip("/")
    post = {"content": "{}", "headers": {"Content-Type": "text/plain", "Origin": "http://evil.example"}}
    refused = httpx.post(f"{api}/flows/filter", **post)
    let_in = httpx.post(f"{api}/flows/filter", auth=httpx.BasicAuth(*secret.split(":", 1)), json={})
    arguments = [word for process in psutil.process_iter() for word in words_of(process)]
    password = secret.split(":")[1]
    (server,) = with_word(psutil.Process().children(), "uvicorn")
    blocked = int(re.search(r"SigBlk:\\s*(\\w+)", open(f"/proc/{server.pid}/status").read())[1], 16)
    told["train"] = {
        "refused": refused.status_code,
        "allowed": refused.headers.get("access-control-allow-origin"),
        "let_in": let_in.status_code,
        "shown": any(password in argument for argument in arguments),
        "hears_ctrl_c": not blocked & 1 << (signal.SIGINT - 1),
        "seconds": get_current_settings().server.ephemeral.startup_timeout_seconds,
    }
    raise SystemExit

def other(name):
    def flow(*arguments, **named):
        settings = get_current_settings()
        secret = settings.server.api.auth_string.get_secret_value()
        told[name] = [secret == settings.api.auth_string.get_secret_value(), len(secret)]
        raise SystemExit
    return flow

flows.train.train, flows.reproduce.reproduce, flows.compare.compare = train, other("reproduce"), other("compare")
tasks.cli.commands._chosen = lambda *arguments, **named: (None, None)
tasks.cli.commands._recorded = lambda *arguments: None
for command, runs in (("train", []), ("reproduce", ["a"]), ("compare", ["a", "b"])):
    os.environ.clear()
    os.environ.update(before)
    refresh_global_settings_context()
    assert get_current_settings().server.api.auth_string is None
    with contextlib.suppress(SystemExit):
        getattr(tasks.cli.commands, command)(*runs)
print("what was told:", json.dumps(told), flush=True)
"""


@pytest.mark.slow
def test_the_temporary_server_of_a_run_wants_a_secret(tmp_path: Path) -> None:
    """Started as by `python -m flows.train`; the request is one that a browser sends for a page without asking.

    The other commands that start a flow give their server the same settings.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment |= {"PREFECT_HOME": str(tmp_path / "not" / "there yet"), "PYTHONPATH": str(Path(__file__).parents[3])}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    program = Program(["-c", TEMPORARY], Path(__file__).parents[3], environment, tmp_path / "output")
    assert program.wait(PATIENCE) == 0, program.output()
    said = program.output().partition("what was told: ")[2]
    told = json.loads(said.splitlines()[0])  # after it the server may go on to speak, to the same file
    wanted = {"refused": 401, "allowed": None, "let_in": 200, "shown": False, "hears_ctrl_c": False}
    assert told.pop("train") == wanted | {"seconds": STARTUP_SECONDS}
    secret = [True, len(new_access()["PREFECT_API_AUTH_STRING"])]
    assert told == {"reproduce": secret, "compare": secret}


KILLED = """
import os, signal
import psutil
from tasks.cli.terminal import run_flow

def flow():
    (server,) = [child for child in psutil.Process().children() if "uvicorn" in " ".join(child.cmdline())]
    print("the server is", server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

run_flow(flow, False, meanwhile=lambda: None)
"""


@pytest.mark.slow
def test_the_temporary_server_ends_with_a_command_that_is_killed_before_it_has_a_cluster(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment |= prefect_in(tmp_path) | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    program = Program(["-c", KILLED], Path(__file__).parents[3], environment, tmp_path / "output")
    assert program.wait(PATIENCE) == -signal.SIGKILL, program.output()
    server = int(program.output().partition("the server is ")[2].split()[0])  # which goes on to speak, to the same file
    wait_until(lambda: identity(server) is None, "the server's end", every=0.1)


@pytest.mark.parametrize("where", ["nowhere", "environment", "profile"])
def test_the_temporary_server_has_time_to_start_unless_the_user_says_how_much(where: str, tmp_path: Path) -> None:
    """Prefect's own 20 s are too few for a first start on a busy machine."""
    name = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
    others = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    given = {name: "7"} if where == "environment" else {}
    if where == "profile":
        (tmp_path / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\n{name} = "7"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", others | given | {"PREFECT_HOME": str(tmp_path)})
        refresh_global_settings_context()
        guard_temporary_server()
        found = get_current_settings().server.ephemeral.startup_timeout_seconds
    refresh_global_settings_context()
    assert found == (STARTUP_SECONDS if where == "nowhere" else 7)


@pytest.mark.parametrize("server", ["of the command", "another"])
def test_heartbeats_go_where_somebody_listens(server: str, tmp_path: Path) -> None:
    """A server of the command's own has nobody who does, and each flow run's end would wait a second for them."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    given = {"PREFECT_API_URL": "http://127.0.0.1:1/api"} if server == "another" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", others | given | {"PREFECT_HOME": str(tmp_path)})
        refresh_global_settings_context()
        guard_temporary_server()
        with heartbeats():
            found = get_current_settings().flows.heartbeat_frequency
    refresh_global_settings_context()
    assert found == (30 if server == "another" else None)


def answer(path: str = "/api", method: str = "GET", kind: str = "http", **headers: str) -> int | str:
    """What the guarded application answers to a request; "let in" where it reaches MLflow."""
    sent: list[dict] = []

    async def inner(scope, receive, send) -> None:
        sent.append({"status": "let in"})

    async def send(message) -> None:
        sent.append(message)

    coded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "method": method, "headers": coded}
    asyncio.run(guarded(inner, CREDENTIALS)(scope, None, send))
    return sent[0].get("status") or sent[0]["code"]


def test_mlflow_answers_only_those_who_know_the_password() -> None:
    right = "Basic " + base64.b64encode(CREDENTIALS.encode()).decode()
    wrong = "Basic " + base64.b64encode(b"me:secreT").decode()
    assert answer(authorization=right) == "let in"
    assert answer(authorization=right.replace("Basic", "basic")) == "let in"
    other = right.replace("Basic", "Bearer")
    for bad in ({}, *({"authorization": given} for given in (wrong, "Basic %%%", f"Bearer {right}", other))):
        assert answer(**bad) == 401
        assert answer("/", **bad) == 401
        assert answer("/health", "POST", **bad) == 401
        assert answer("/health/../api", **bad) == 401
    assert answer("/health") == "let in", "so that `up` sees the start"
    assert answer(kind="websocket", authorization=right) == 1008


@pytest.mark.parametrize("lacks", ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"])
def test_mlflow_does_not_start_with_half_of_its_credentials(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half would be the word None, which everybody knows."""
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "there")
    monkeypatch.delenv(lacks)
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD must be set"):
        create_app()


def test_a_page_of_another_server_gets_nothing_by_the_browsers_password() -> None:
    right = "Basic " + base64.b64encode(CREDENTIALS.encode()).decode()
    same = {"authorization": right, "host": "127.0.0.1:5000"}
    assert answer(**same, origin="http://127.0.0.1:5000") == "let in"
    for origin in ("http://evil.example", "http://localhost:5000", "http://127.0.0.1:9999", "null"):
        assert answer(**same, origin=origin) == 403


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder as the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def write_record(**entries: tuple[int, str | None, str]) -> None:
    HERE.mkdir(mode=0o700, exist_ok=True)
    RECORD.write_text(json.dumps(entries))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["--debug", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_down_ends_what_it_recorded_whatever_the_clock_says(here: Path, sleeper: subprocess.Popen) -> None:
    """The record is ticks since the boot, which a step of the clock does not move."""
    write_record(worker=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    assert run("status") == (0, f"worker     pid {sleeper.pid:<8} up\n")
    assert run("down") == (0, "")
    assert identity(sleeper.pid) is None
    assert not HERE.exists()


def test_down_ends_what_a_killed_server_has_left(here: Path) -> None:
    """MLflow's own command starts the process that listens, which lives on and keeps its port."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True) as server:
        assert server.stdout is not None
        listener = int(server.stdout.readline())
        write_record(mlflow=(server.pid, identity(server.pid), socket.gethostname()))
        server.kill()
        server.wait()
        assert identity(listener) is not None
        assert run("down") == (0, f"mlflow was killed: ending what it has left (pid {listener})\n")
        assert identity(listener) is None
    assert not HERE.exists()


@pytest.mark.parametrize("content", [b"local", b'{"name": "local"}', b"[1]", b"\xff", b""])
def test_down_ends_what_it_recorded_also_where_the_pool_is_not_known(
    content: bytes, here: Path, sleeper: subprocess.Popen
) -> None:
    """The first is what older versions wrote."""
    write_record(worker=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    ENVIRONMENT.write_text(exports(_urls(4301, 5301) | new_access()))
    POOL.write_bytes(content)
    code, output = run("down")
    assert code == 0
    (line,) = output.splitlines()
    assert line.startswith(".services/pool does not say which work pool is up: ")
    assert identity(sleeper.pid) is None
    assert not HERE.exists()


def test_what_has_just_ended_by_itself_needs_no_end(here: Path, sleeper: subprocess.Popen) -> None:
    """It was there when `down` looked."""
    ended = psutil.Process(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    end_worker_flow_runs(ended)
    end_process(ended)


@pytest.mark.parametrize("why", ["gone", "another process", "another machine"])
def test_down_keeps_the_record_of_what_it_does_not_find(why: str, here: Path, sleeper: subprocess.Popen) -> None:
    host = "elsewhere" if why == "another machine" else socket.gethostname()
    who = f"{boot_id()}/1" if why == "another process" else identity(sleeper.pid)
    if why == "gone":
        sleeper.kill()
        sleeper.wait()
    write_record(mlflow=(sleeper.pid, who, host))
    code, output = run("down")
    assert code == 1
    assert f"mlflow (pid {sleeper.pid} on {host}) was not found" in output
    assert json.loads(RECORD.read_text()).keys() == {"mlflow"}
    if why != "gone":
        assert sleeper.poll() is None, "somebody else's"


def test_status_says_what_has_died_and_where_its_log_is(here: Path, sleeper: subprocess.Popen) -> None:
    write_record(mlflow=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    assert run("status") == (0, f"mlflow     pid {sleeper.pid:<8} up\n")
    sleeper.kill()
    sleeper.wait()
    assert run("status") == (1, f"mlflow     pid {sleeper.pid:<8} gone, see .services/mlflow.log\n")


def test_what_a_restart_of_the_machine_has_ended_is_not_missed(here: Path) -> None:
    write_record(mlflow=(1, "an-older-boot/5", socket.gethostname()))
    assert run("down") == (0, "")
    assert not HERE.exists()


def test_what_lives_is_no_leftover(here: Path) -> None:
    """`up` beside a living server starts what is missing, and lets that one be."""
    session = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        write_record(mlflow=(session.pid, identity(session.pid), socket.gethostname()))
        assert end_leftovers() == set()
        assert session.poll() is None
    finally:
        session.kill()
        session.wait()


def test_in_place_of_a_taken_port_a_free_one_is_found_or_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
        assert _proposed_instead_of(port) != port


def test_in_place_of_the_last_port_one_is_named_that_there_is() -> None:
    with socket.socket() as taken:
        with suppress(OSError):  # it is taken anyway
            taken.bind(("127.0.0.1", 65535))
            taken.listen()
        assert 0 < _proposed_instead_of(65535) < 65535


AS_NOBODY = """
import os
from flows.deploy.service_processes import free_port, require_free_port
from flows.deploy.service_record import ServiceError

if os.geteuid() == 0:
    os.setuid(65534)
assert free_port(1) > 1023
try:
    require_free_port("mlflow", 1)
except ServiceError as error:
    print(error)
    require_free_port("mlflow", int(str(error).rpartition("=")[2].rstrip("`")))
    print("it may")
"""


@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 2, reason="anybody may use any port here"
)
def test_in_place_of_a_port_that_the_user_may_not_use_one_is_named_that_he_may() -> None:
    root = Path(__file__).parents[3]
    said = subprocess.run([sys.executable, "-c", AS_NOBODY], cwd=root, capture_output=True, text=True, check=True)
    refusal, last = said.stdout.splitlines()
    barred = r"port 1 for mlflow may not be used by this user \(Permission denied\), as those below 1024: choose "
    assert re.match(barred, refusal)
    assert last == "it may"


def _proposed_instead_of(port: int) -> int:
    """What is said of a taken port names this one, which nobody has."""
    with pytest.raises(ServiceError, match=r"with --mlflow-port, `make up MLFLOW_PORT=\d+`") as said:
        require_free_port("mlflow", port)
    named = int(str(said.value).rpartition("=")[2].rstrip("`"))
    require_free_port("mlflow", named)
    return named


def test_what_is_up_at_other_ports_is_not_what_is_asked_for(here: Path, sleeper: subprocess.Popen) -> None:
    write_record(mlflow=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    access = new_access()
    ENVIRONMENT.write_text(exports(_urls(4301, 5301) | access))
    assert _access_of(living_processes(), {"prefect": 4301, "mlflow": 5301}) == access
    for ports in ({"prefect": 4302, "mlflow": 5301}, {"prefect": 4301, "mlflow": 5302}):
        with pytest.raises(ServiceError, match=r"already up \(mlflow\) at .*:4301 .*, not at .*: give these ports, or"):
            _access_of(living_processes(), ports)


def test_nothing_that_was_started_is_not_up(here: Path) -> None:
    assert run("status") == (1, "nothing was started here: `python -m flows.services up` does\n")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"a": 1}', '{"a": [1, 2]}', '{"a": ["x", "y", "z"]}', '{"a": [0, "y", "z"]}', "\\xff"],
)
def test_a_broken_record_is_a_clear_error(content: str, here: Path) -> None:
    HERE.mkdir()
    RECORD.write_text(content)
    for command in ("up", "status", "down"):
        with pytest.raises(ServiceError, match=r"\.services/pids\.json cannot be read .* by hand"):
            run(command)
    assert RECORD.read_text() == content


def test_no_two_at_a_time(here: Path) -> None:
    shutil.copyfile(Path(__file__).parents[3] / PREFECT_FILE, here / PREFECT_FILE)
    HERE.mkdir()
    with (HERE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ("up", "down"):
            with pytest.raises(ServiceError, match="another `up` or `down` is at work"):
                run(command)


def test_what_is_cleared_for_a_new_start_is_still_held(here: Path) -> None:
    with hold_services():
        write_record(mlflow=(1, f"{boot_id()}/5", socket.gethostname()))
        clear_services()
        assert not RECORD.exists()
        with pytest.raises(ServiceError, match="another `up` or `down` is at work"), hold_services():
            pass


def test_a_run_that_fails_ends_what_it_began_and_not_what_was_up(
    here: Path, sleeper: subprocess.Popen, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(mlflow=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    with pytest.raises(ServiceError), _ended_with_an_error(living_processes()):
        raise ServiceError("a stage failed")
    assert sleeper.poll() is None
    with pytest.raises(ServiceError), _ended_with_an_error({}):
        raise ServiceError("a stage failed")
    assert sleeper.wait(PATIENCE) != 0
    assert "ending the servers ..." in capsys.readouterr().err


def test_the_services_folder_is_its_owners_alone(here: Path) -> None:
    HERE.mkdir(mode=0o777)
    HERE.chmod(0o777)
    write_record(mlflow=(1, f"{boot_id()}/5", socket.gethostname()))
    run("down")
    assert HERE.stat().st_mode & 0o777 == 0o700
    assert RECORD.stat().st_mode & 0o777 == 0o600


def test_a_services_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    log = tmp_path / "mlflow.log"
    command = [sys.executable, "-S", service_log.__file__, str(log), "1000"]
    lines = "".join(f"line {number}\n" for number in range(1000))
    subprocess.run(command, input=lines + "x" * 5000 + "\nlast words", text=True, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.log", "mlflow.log.1"}
    assert log.read_text() == "last words"
    subprocess.run(command, input="again\n", text=True, check=True)
    assert log.read_text() == "last wordsagain\n"


def has_written(process: psutil.Process, times: int) -> bool:
    """Or tried to."""
    return process.io_counters().write_count >= times


def test_a_services_log_that_cannot_be_written_is_read_on_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Whoever writes into a pipe without a reader ends: Prefect's worker, and its flow runs with it."""
    log = tmp_path / "worker.log"
    log.symlink_to("/dev/full")
    command = [sys.executable, "-S", service_log.__file__, str(log), "1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1) as writer:
        assert writer.stdin is not None
        tried = psutil.Process(writer.pid)
        for number in (1, 2):
            writer.stdin.write(f"line {number}\n")
            wait_until(partial(has_written, tried, number), "a try to write it", every=0.02)
        log.unlink()
        writer.stdin.write("line 3\nline 4\n")
    assert writer.returncode == 0
    assert log.read_text() == "[2 lines could not be written and are left out here]\nline 3\nline 4\n"


def test_who_reads_what_up_says_does_not_wait_for_the_servers(here: Path) -> None:
    """As `make up | tee FILE` does; the log's writer lives as long as what it writes of."""
    HERE.mkdir()
    code = (
        "import os; from flows.deploy.service_processes import start_process; "
        "start_process('mlflow', ['timeit', '-n1', '-r1', 'import time; time.sleep(60)'], os.environ)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert "up" in run("status")[1], "this came back after its end"
    assert run("down") == (0, "")


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"z" * 10_000)
    return folder


def made_up(project: Path, temporary: Path) -> tuple[list[Path], list[Path]]:
    """(what nobody needs, what somebody does)."""
    runs = project / "runs"
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = [filled(temporary / f"ray/session_2026-01-01_00-00-00_1_{gone.pid}")]
    kept = [filled(temporary / f"ray/session_2026-01-01_00-00-00_2_{os.getpid()}")]
    kept.append(filled(temporary / f"raytracing/project/session_{gone.pid}"))  # somebody's own
    for number, (name, age) in enumerate((("old", 20), ("busy", 20), ("new", 1))):
        folders = [filled(runs / name / kind) for kind in ("stages", "validation")]
        kept += [filled(runs / name / "checkpoints")]
        (runs / name / "run.json").write_text("{}")
        (runs / name / ".lock").touch()
        for path in (runs / name, *(runs / name).rglob("*")):
            os.utime(path, (time.time() - age * 86_400,) * 2)
        (kept if number else dead).extend(folders)
    for name, list_ in ((f"{gone.pid}-ab", dead), (f"{os.getpid()}-cd", kept), ("xyz", dead)):
        folder = filled(temporary / f"doubleflow-{name}")
        (folder / "code").mkdir()
        (folder / "code/.git").write_text("gitdir: elsewhere")
        list_.append(folder)
    kept.append(filled(temporary / "doubleflow-papers"))
    host = socket.gethostname()
    for name, list_ in ((f"{host}-{gone.pid}-ab_c", dead), (f"{host}-{os.getpid()}-cd", kept), ("other-1-ef", kept)):
        list_.append(filled(runs / f"measured-{name}"))
    dead.append(filled(runs / "measured-other-2-gh"))
    os.utime(dead[-1], (time.time() - 20 * 86_400,) * 2)
    for name, age, beside, list_ in (("old", 20, "", dead), ("new", 1, "", kept), ("at-work", 20, "r", kept)):
        folder = temporary / f"ray-{name}"
        (filled(folder / "logs") / "raylet.out").touch()
        if beside:
            (folder / beside).mkdir()
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (time.time() - age * 86_400,) * 2)
        list_.append(folder)
    return dead, kept


def test_prune_lists_what_dead_runs_left_and_removes_only_that(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    dead, kept = made_up(here, temporary)
    with run_lock(here / "runs/busy"):
        os.utime(here / "runs/busy/.lock", (0, 0))
        os.utime(here / "runs/busy", (0, 0))
        write_record(mlflow=(1, "an-older-boot/5", socket.gethostname()))
        found = prune.leftovers(here, [temporary], days=14)
        assert sorted(item.path for item in found) == sorted([*dead, here / ".services"])
        assert all(item.bytes >= 10_000 for item in found if item.kind != prune.LOGS)
        assert all(path.exists() for path in dead), "it only looked"
        for item in found:
            prune.remove(item)
    assert not [path for path in dead if path.exists()]
    assert all(path.exists() for path in kept)


def test_prune_removes_what_it_lists_only_if_asked_to_and_says_what_stays(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    dead, kept = made_up(here, temporary)
    looked = prune.leftovers
    monkeypatch.setattr(prune, "leftovers", lambda project, _, days: looked(project, [temporary], days))

    def said(*arguments: str) -> tuple[list[str], str]:
        result = CliRunner().invoke(command_of(prune.main), [*arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines(), result.stderr

    with run_lock(here / "runs/busy"):
        os.utime(here / "runs/busy/.lock", (0, 0))
        os.utime(here / "runs/busy", (0, 0))
        assert not [line for line in said("--days", "21")[0] if str(here / "runs/old") in line], "it is 20 days old"
        lines, _ = said()
        assert {path for path in dead if any(line.endswith(f" {path}") for line in lines)} == {*dead}
        assert lines[-1].endswith(" MB to be removed by --yes")
        assert all(path.exists() for path in dead)
        stays, remove_tree = dead[0], shutil.rmtree

        def spared(path: Path, **how: Any) -> None:
            if path != stays:
                remove_tree(path, **how)

        monkeypatch.setattr(shutil, "rmtree", spared)
        lines, complaint = said("--yes")
    assert lines[-1].endswith(" MB removed")
    assert complaint == f"{stays} stays, or a part of it: it cannot be removed\n"
    assert [path for path in dead if path.exists()] == [stays]
    assert all(path.exists() for path in kept)


def test_prune_looks_while_runs_and_clusters_come_and_go(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "process_iter", lambda: [])  # a look takes a hundredth of the time
    (here / "runs/busy").mkdir(parents=True)
    (here / "runs/busy/run.json").write_text("{}")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for number in range(8):
                filled(here / f"temporary/ray-{number}/session_2026-01-01_00-00-00_{number}_1/logs")
                filled(here / f"runs/busy/folder-{number}/.partial")
                shutil.rmtree(here / f"temporary/ray-{number}")
                shutil.rmtree(here / f"runs/busy/folder-{number}")

    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        for _ in range(200):
            prune.leftovers(here, [here / "temporary"], days=1)
            bytes_on_disk(here)
    finally:
        over.set()
        others.join()


def test_prune_says_where_there_is_nothing_of_a_project(here: Path, tmp_path: Path) -> None:
    def said() -> str:
        result = CliRunner().invoke(command_of(prune.main), [], env={"TMPDIR": str(tmp_path)})
        assert result.exit_code == 0, result.output
        return result.stderr

    assert said() == f"{here} has no runs/ and no .services/, so nothing of runs and services is there to look at\n"
    (here / "runs").mkdir()
    assert said() == ""


def test_prune_says_what_it_may_not_read_and_where_with_debug(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> list[prune.Leftover]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/one")

    monkeypatch.setattr(prune, "leftovers", refused)
    result = CliRunner().invoke(command_of(prune.main), [])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error: a file or folder cannot be used: [Errno 13] Permission denied: 'runs/one'"
    )
    assert isinstance(CliRunner().invoke(command_of(prune.main), ["--debug"]).exception, PermissionError)


def test_prune_leaves_a_run_what_it_goes_on_with(here: Path) -> None:
    """MLflow was away when the newest checkpoint's iteration was to be recorded: its scores are the only way on. And a
    run that has begun since its leftovers were listed keeps all of them."""
    run, ages = here / "runs/old", (time.time() - 20 * 86_400,) * 2
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    states = [RunState(iteration, "config", "data", "mlflow") for iteration in (6, 7)]
    kept, scores = KeptStages(run / "stages"), Scores(pd.DataFrame({"reward": [0.5]}), {"a": 1.0}, {"a": 0.0})
    for state in states:
        kept.keep_scores(state, 5, scores, [])
        filled(run / f"stages/rollout/iter_{state.iteration:06d}")
        CheckpointStore(run / "checkpoints", keep=2).save(state, lambda folder: filled(folder / "weights") and None)
    for path in (run, *run.rglob("*")):
        os.utime(path, ages)
    found = prune.leftovers(here, [], days=14)
    assert [item.path for item in found] == [run / "stages/reward/iter_000006", run / "stages/rollout"]
    with run_lock(run):
        assert not any(map(prune.remove, found))
        assert all(item.path.is_dir() for item in found)
    assert all(map(prune.remove, found))
    assert not any(item.path.exists() for item in found)
    again = KeptStages(run / "stages")
    assert again.scores(states[0], {"a": 1.0}) is None
    _, rewards, _ = again.scores(states[1], {"a": 1.0}) or pytest.fail("the run would refuse to go on")
    assert rewards.rewards.tolist() == [0.5]


def test_prune_leaves_services_alone_that_run(here: Path, sleeper: subprocess.Popen) -> None:
    write_record(worker=(sleeper.pid, identity(sleeper.pid), socket.gethostname()))
    assert prune.leftovers(here, [], days=14) == []
    write_record(worker=(sleeper.pid, identity(sleeper.pid), "another-machine"))
    assert prune.leftovers(here, [], days=14) == []
