# SPDX-License-Identifier: Apache-2.0
"""What a resumed run adds to its MLflow record."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from sqlalchemy import Engine, event

from tasks.config.errors import ConfigError
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records import owner, patience
from tasks.records.history import RunHistory
from tasks.records.owner import FLOW_RUN, OWNER, Owner, close_dead_runs
from tasks.records.patience import ONE_TRY, PatientClient
from tasks.records.tracking import RunGone, Tracker
from tasks.records.tracking_address import TrackingAway, require_answer
from tasks.run.early import check_tracking
from tasks.system.ports import free_port
from tasks.system.processes import ProcessIdentity
from tests.support.mlflow_store import mlflow_in, server_command
from tests.support.patience import PATIENCE, wait_for_server, wait_until


def tracker(folder: Path, run_id: str | None = None) -> Tracker:
    config = TrackingConfig(uri=mlflow_in(folder), artifacts=(folder / "artifacts").as_uri())
    return Tracker(config, "a-run", run_id)


@pytest.mark.parametrize("name", ["h#ash", "100%41", "ä b"])
def test_a_folders_name_stands_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In an address a # begins a fragment and %41 is an A."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / name
    folder.mkdir()
    config = TrackingConfig(uri=mlflow_in(folder), artifacts=str(folder / "artifacts"))
    run = Tracker(config, "a-run")
    (file := tmp_path / "kept.txt").write_text("kept")
    run.client.log_artifact(run.run_id, str(file))
    assert [kept.read_text() for kept in folder.glob("artifacts/**/kept.txt")] == ["kept"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]
    check_tracking(config.uri)
    (folder / "mlflow.db").unlink()
    with pytest.raises(ConfigError, match="there is no such file"):
        check_tracking(config.uri)


def test_a_resumed_run_may_go_on_for_longer(tmp_path: Path, monkeypatch) -> None:
    """MLflow refuses to change a parameter: the first value stays one, and a tag tells the present one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first = tracker(tmp_path)
    first.log_start(TrainConfig(trainer={"total_training_steps": 10, "seed": 3}), {"who": "a"})
    first.log_step(10, {"reward": 0.5})
    again = tracker(tmp_path, first.run_id)
    again.log_start(TrainConfig(trainer={"seed": 3, "save_freq": 4}), {"who": "b"})
    data = again.client.get_run(first.run_id).data
    assert data.params == {"trainer.total_training_steps": "10", "trainer.seed": "3"}
    told = {name: value for name, value in data.tags.items() if not name.startswith("mlflow.")}
    assert told.pop(OWNER) == str(Owner.this())
    assert told == {"resumed.trainer.total_training_steps": "100", "resumed.trainer.save_freq": "4", "who": "b"}
    third = tracker(tmp_path, first.run_id)
    third.log_start(TrainConfig(trainer={"total_training_steps": 10, "seed": 3, "save_freq": 4}), {"who": "b"})
    tags = third.client.get_run(first.run_id).data.tags
    assert tags["resumed.trainer.total_training_steps"] == "10", "what it is now, and not of the start before"
    assert not again.log_step(10, {"reward": 0.9})
    assert again.log_step(11, {"reward": 0.6})
    assert again.history("reward") == {10: 0.5, 11: 0.6}


@pytest.mark.parametrize(("gone", "said"), [("deleted", "has deleted the run {run}"), ("never", "has no run {run}")])
def test_a_run_that_mlflow_has_no_more_is_told_with_what_helps(
    tmp_path: Path, monkeypatch, gone: str, said: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracker(tmp_path).run_id
    if gone == "deleted":
        MlflowClient(mlflow_in(tmp_path)).delete_run(run)
    else:
        run = "0" * 32
    with pytest.raises(RunGone, match=said.format(run=run) + ", which is to go on: restore it"):
        tracker(tmp_path, run)


def test_two_first_runs_that_start_together_share_the_experiment(tmp_path: Path, monkeypatch) -> None:
    """Both look for it before either has made it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow_in(tmp_path)
    both, looked = threading.Barrier(2), MlflowClient.get_experiment_by_name
    has_looked = threading.local()

    def look(client: MlflowClient, name: str) -> Any:
        found = looked(client, name)
        if not hasattr(has_looked, "once"):
            has_looked.once = True
            both.wait(PATIENCE)
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look)
    with ThreadPoolExecutor(2) as threads:
        first, second = [begun.result() for begun in [threads.submit(tracker, tmp_path) for _ in range(2)]]
    assert first.run_id != second.run_id
    assert first.experiment_id == second.experiment_id != "0"


def test_a_run_has_its_owner_from_the_first_moment_on(tmp_path: Path, monkeypatch) -> None:
    """Whose process is killed in the next one is closed by whoever comes next."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def killed(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MlflowClient, "log_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        tracker(tmp_path)
    client = MlflowClient(mlflow_in(tmp_path))
    experiments = [found.experiment_id for found in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.status == "RUNNING"
    assert run.data.tags[OWNER] == str(Owner.this())


def test_parameters_are_what_was_chosen_and_config_json_is_everything(tmp_path: Path, monkeypatch) -> None:
    """Chosen: set, even to the default, as a sweep sets what it tries; or set by the algorithm's name."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrainConfig(trainer={"seed": 0}, algorithm={"name": "grpo_guard"})
    run = tracker(tmp_path)
    run.log_start(config, {})
    params = run.client.get_run(run.run_id).data.params
    assert params.items() >= {"trainer.seed": "0", "algorithm.name": "grpo_guard"}.items()
    assert params["actor_rollout_ref.actor.diffusion_loss.loss_mode"] == "grpo_guard"
    assert "trainer.total_training_steps" not in params
    assert RunHistory(run.client, run.run_id).config() == config.model_dump(mode="json")


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "KILLED"), (TerminationSignal(signal.SIGTERM), "KILLED"), (ValueError(), "FAILED")],
)
def test_a_run_is_killed_by_a_signal_and_failed_by_an_error(tmp_path: Path, monkeypatch, error, status: str) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracker(tmp_path)
    with pytest.raises(type(error)), run.concluded():
        raise error
    assert run.client.get_run(run.run_id).info.status == status


def test_a_signal_after_the_last_record_of_a_flow_run_waits_for_nothing_but_its_end(tmp_path, monkeypatch) -> None:
    """A run within a flow run, as a sweep of validations has them, leaves it as it was; and a flow run its process."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    within, last = tracker(tmp_path), tracker(tmp_path)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler), signal.getsignal(signal.SIGINT)
    try:
        with FlowRunContext.model_construct():
            with within.concluded():
                pass
            with pytest.raises(KeyboardInterrupt), last.concluded(ends_flow_run=True):
                signal.raise_signal(signal.SIGTERM)
            assert last.client.get_run(last.run_id).info.status == "KILLED"
            with last.concluded(ends_flow_run=True):
                pass
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for kind, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(kind, handler)


@pytest.fixture
def soon_locked() -> Iterator[None]:
    """SQLite waits for another program for a moment, where MLflow has it wait for 20 seconds."""

    def shorter(connection: Any, cursor: Any, statement: str, *others: Any) -> tuple[str, Any]:
        return re.sub(r"^PRAGMA busy_timeout = \d+", "PRAGMA busy_timeout = 50", statement), others[0]

    event.listen(Engine, "before_cursor_execute", shorter, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorter)


@pytest.mark.usefixtures("soon_locked")
def test_a_database_that_another_program_holds_is_waited_for(tmp_path: Path, monkeypatch, caplog) -> None:
    """As a browser of databases or a backup may. It lets go once the run has said that it waits."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracker(tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None, check_same_thread=False)) as other:

        @contextmanager
        def let_go() -> Iterator[None]:
            other.execute("ROLLBACK")
            yield

        run.patience.meanwhile = let_go
        other.execute("BEGIN IMMEDIATE")
        assert run.log_step(1, {"reward": 0.5})
        assert run.history("reward") == {1: 0.5}
        first, last = [record.getMessage() for record in caplog.records if record.name == patience.__name__]
        assert "mlflow.db does not answer (another program holds its database): asked again in 1 s" in first
        assert "answers again" in last

        run.patience._seconds, run.patience.meanwhile = 0, nullcontext
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TrackingAway, match=r"tracking.max_outage_s 0 \(another program holds .*: end what holds"):
            run.log_step(2, {"reward": 0.6})
        other.execute("ROLLBACK")
    assert run.log_step(2, {"reward": 0.6})


@pytest.mark.usefixtures("soon_locked")
@pytest.mark.parametrize(
    ("error", "status"), [(TerminationSignal(signal.SIGTERM), "KILLED"), (OSError("no memory"), "FAILED")]
)
def test_what_ends_a_run_while_its_end_is_written_leaves_it_not_running(
    tmp_path: Path, monkeypatch, error: BaseException, status: str
) -> None:
    """All is done, and another program holds the database: MLflow is waited for when the run is ended."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracker(tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:

        @contextmanager
        def ended() -> Iterator[None]:
            other.execute("ROLLBACK")
            raise error
            yield

        run.patience.meanwhile = ended
        with pytest.raises(type(error)), run.concluded():
            other.execute("BEGIN IMMEDIATE")
    assert run.client.get_run(run.run_id).info.status == status


@pytest.mark.parametrize("away", [False, True])
def test_an_answer_that_is_an_error_ends_what_the_wait_was_spent_in_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """Whoever asked may go on after it, and the rollout's workers, asleep meanwhile, must be awake then: as where the
    first answer to a creation was lost. No answer at all ends the run, and wakes nobody."""
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: None)
    seen: list[str] = []

    @contextmanager
    def meanwhile() -> Iterator[None]:
        seen.append("asleep")
        yield
        seen.append("awake")

    answers: Iterator[Exception] = iter(
        [
            requests.exceptions.ConnectionError("lost"),
            MlflowException("it is there already", error_code=RESOURCE_ALREADY_EXISTS),
        ]
    )

    class Client:
        tracking_uri = "http://mlflow"

        def create_registered_model(self, name: str) -> None:
            raise next(answers)

    client: Any = PatientClient(cast(MlflowClient, Client()), Client.tracking_uri, 0 if away else 60)
    client.meanwhile = meanwhile
    with pytest.raises(TrackingAway if away else MlflowException):
        client.create_registered_model("a-model")
    assert seen == (["asleep"] if away else ["asleep", "awake"])


def listening(port: int) -> socket.socket | None:
    """A socket that listens there; None while another one does."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


@pytest.mark.slow  # it starts MLflow's server
def test_mlflow_that_is_gone_does_not_hide_what_ended_the_run(tmp_path: Path, monkeypatch, caplog, capfd) -> None:
    """Nor is it asked as often as in a run that goes on: each time it answers nothing is one try.

    Before, it is away for a while: what is asked of it then waits, and says so; and ends after the set time. A run that
    ends well leaves no line of MLflow's in the terminal.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", ONE_TRY["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    port = free_port()
    command, told = server_command(tmp_path, port)
    environment, nowhere = os.environ | told, subprocess.DEVNULL
    server = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    try:
        wait_for_server(f"http://127.0.0.1:{port}/health", "MLflow's start")
        tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
        runs = {end: Tracker(tracking, end.__name__) for end in (ZeroDivisionError, KeyboardInterrupt)}
        waiting = runs[ZeroDivisionError]

        @contextmanager
        def resumed() -> Iterator[None]:
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
            os.killpg(server.pid, signal.SIGCONT)
            yield

        waiting.patience.meanwhile = resumed
        os.killpg(server.pid, signal.SIGSTOP)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        waiting.tag("waited", "yes")
        assert waiting.client.get_run(waiting.run_id).data.tags["waited"] == "yes"
        first, *_, last = [record.getMessage() for record in caplog.records if record.name == patience.__name__]
        assert f"MLflow at http://127.0.0.1:{port} does not answer (no answer in time): asked again in 1 s" in first
        assert "answers again" in last
        with Tracker(tracking, "well").concluded():
            pass
        assert "View run" not in capfd.readouterr().out
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    tries: list[int] = []
    with wait_until(lambda: listening(port), "the last of MLflow's processes to let go of its port") as deaf:

        def hang_up() -> None:
            while True:
                try:
                    caller, _ = deaf.accept()
                except OSError:
                    return
                tries.append(1)  # first: once it is hung up, the next run may begin to count
                caller.close()

        threading.Thread(target=hang_up, daemon=True).start()
        for ended_by, run in runs.items():
            tries.clear()
            with pytest.raises(ended_by) as raised, run.concluded():
                raise ended_by
            told = f"MLflow at http://127.0.0.1:{port} was not told that run {run.run_id} is "
            status = "KILLED" if ended_by is KeyboardInterrupt else "FAILED"
            assert raised.value.__notes__ == [f"{told}{status}: no connection"]
            assert 1 <= len(tries) <= 3
        impatient = Tracker.__new__(Tracker)
        impatient.__dict__ |= waiting.__dict__
        impatient.patience = PatientClient(waiting._plain, waiting.uri, 4)
        impatient.client = cast(MlflowClient, impatient.patience)
        tries.clear()
        caplog.clear()

        @contextmanager
        def beside() -> Iterator[None]:
            """Another thread waits for the server by now, and has said so."""
            other = threading.Thread(target=lambda: suppressed(impatient), daemon=True)
            other.start()
            wait_until(lambda: "asked again in 1 s" in caplog.text, "the other's warning", every=0.05)
            try:
                yield
            finally:
                other.join()

        impatient.patience.meanwhile = beside
        with pytest.raises(
            TrackingAway, match=r"has not answered for [\d.]+ s, longer than tracking.max_outage_s 4 \(no c"
        ):
            impatient.tag("too", "late")
        assert 3 <= len(tries) <= 12
        warned = {record.thread for record in caplog.records if record.name == patience.__name__}
        assert len(warned) == 1, "one speaks for both"
        assert threading.get_ident() not in warned
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"


def suppressed(run: Tracker) -> None:
    with suppress(TrackingAway):
        run.tag("too", "late")


def test_a_server_that_is_not_there_is_told_at_the_start() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"  # bound, and nobody listens
        with pytest.raises(TrackingAway, match=f"MLflow at {uri} did not answer within 0.5 s .*MLFLOW_TRACKING_URI"):
            require_answer(uri, 0.5)
    require_answer("sqlite:///mlflow.db")


def as_a_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, number: str = f"{7:032x}\n") -> Path:
    """This process is in no container, and its machine has that number; the number's file."""
    file = folder / "machine-id"
    file.write_text(number)
    monkeypatch.setattr(owner, "MACHINE_ID", file)
    monkeypatch.setattr(owner, "OF_THE_MACHINE", os.readlink("/proc/self/ns/pid"))
    monkeypatch.setattr(owner, "OF_AN_IMAGE", ())
    return file


def test_a_process_of_another_boot_is_dead_only_if_it_was_of_this_machine(tmp_path: Path, monkeypatch) -> None:
    """Pods of two namespaces have one host name, and each its boot."""
    number = as_a_machine(monkeypatch, tmp_path)
    this = Owner.this()
    before = this._replace(process=this.process._replace(boot="an-earlier-boot"))
    assert (this.alive, before.alive) == (True, False)
    assert Owner.parsed(str(before)) == before
    assert number.read_text().strip() not in str(before), "which is to stay on the machine"
    assert before._replace(machine="another").alive is None
    assert before._replace(machine=None).alive is None
    old = Owner.parsed(json.dumps(json.loads(str(before))[:3]))
    assert old == before._replace(machine=None)
    number.write_text(f"{8:032x}\n")
    assert before.alive is None


@pytest.mark.parametrize("why", ["missing", "not filled", "no text", "an image's", "in a container"])
def test_a_machine_of_no_number_has_no_mark(tmp_path: Path, monkeypatch, why: str) -> None:
    """That of an image is the same on every machine."""
    number = as_a_machine(monkeypatch, tmp_path)
    assert Owner.this().machine is not None
    contents = {"not filled": b"uninitialized\n", "no text": b"\xff"}
    if why == "missing":
        number.unlink()
    elif why in contents:
        number.write_bytes(contents[why])
    elif why == "an image's":
        monkeypatch.setattr(owner, "OF_AN_IMAGE", (tmp_path / "none", tmp_path))
    else:
        monkeypatch.setattr(owner, "OF_THE_MACHINE", "pid:[1]")
    before = Owner.this()._replace(process=Owner.this().process._replace(boot="an-earlier-boot"))
    assert (before.machine, before.alive) == (None, None)
    assert Owner.this().alive is True


def test_runs_of_dead_processes_are_closed_by_whoever_comes_next(tmp_path: Path, monkeypatch) -> None:
    """A dead process's, by name; of another machine's those whose flow run crashed. Living ones are left alone."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    as_a_machine(monkeypatch, tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead = Owner.this()._replace(process=ProcessIdentity.of(child.pid))
        child.communicate(b"\n")
    elsewhere = Owner.this()._replace(host="elsewhere")
    contained = dead._replace(namespace="pid:[1]")  # a container of this machine, whose processes nobody here sees
    before = contained._replace(process=dead.process._replace(boot="an-earlier-boot"))
    names = ("mine", "dead", "far", "far and crashed", "mine, silent", "no owner", "contained", "of an earlier boot")
    runs = {name: tracker(tmp_path) for name in (*names, "of another machine of this name")}
    owners = {"dead": dead, "far": elsewhere, "far and crashed": elsewhere}
    owners |= {"contained": contained, "of an earlier boot": before}
    owners["of another machine of this name"] = before._replace(machine="another")
    for name, owned_by in owners.items():
        runs[name].tag(OWNER, str(owned_by))
    runs["no owner"].tag(OWNER, "?")
    for name in ("far and crashed", "mine, silent"):
        runs[name].tag(FLOW_RUN, "a-flow-run")
    closed = close_dead_runs(runs["mine"].client, crashed="a-flow-run")
    assert set(closed) == {runs[name].run_id for name in ("dead", "far and crashed", "of an earlier boot")}
    states = {name: run.client.get_run(run.run_id) for name, run in runs.items()}
    failed = {name for name, run in states.items() if run.info.status == "FAILED"}
    assert failed == {"dead", "far and crashed", "of an earlier boot"}
    assert f"pid {dead.process.pid} on {dead.host}" in states["dead"].data.tags["doubleflow.ended"]

    runs["far"].tag(OWNER, str(dead))
    again = tracker(tmp_path, runs["dead"].run_id)  # the same command, and any other start
    assert again.client.get_run(runs["dead"].run_id).info.status == "RUNNING"
    assert again.client.get_run(runs["far"].run_id).info.status == "FAILED"


class PagesOfTwo(MlflowClient):
    def search_runs(self, *given: Any, **named: Any) -> Any:
        return super().search_runs(*given, **named, max_results=2)

    def search_experiments(self, **named: Any) -> Any:
        return super().search_experiments(**named, max_results=2)


def test_dead_runs_of_every_page_are_closed(tmp_path: Path) -> None:
    """A run that is closed is on no page any more: those after it move up."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead = Owner.this()._replace(process=ProcessIdentity.of(child.pid))
        child.communicate(b"\n")
    client = PagesOfTwo(mlflow_in(tmp_path))
    experiments = [client.create_experiment(name) for name in "abc"]
    runs = [client.create_run(name, tags={OWNER: str(dead)}).info.run_id for name in experiments * 2]
    assert sorted(close_dead_runs(client)) == sorted(runs)
    assert {client.get_run(run).info.status for run in runs} == {"FAILED"}
