# SPDX-License-Identifier: Apache-2.0
"""GPU slots on a real Prefect server: who waits is told for whom, and a run that goes on does not wait for itself."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from httpx import HTTPStatusError
from prefect import flow
from prefect._internal.concurrency.cancellation import CancelledError
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.events.worker import EventsWorker
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed

from tasks.actors.cluster import ClusterError
from tasks.actors.watchdog import MARK
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.trainer import RayConfig
from tasks.records.owner import Owner
from tasks.run import slot_lease
from tasks.run.gpu_slots import RECORD, Held, gpu_slots
from tasks.run.opening import open_cluster_and_tracker
from tasks.run.slot_lease import SlotLease
from tasks.run.start_times import StartTimes
from tasks.system.access import KEPT_LEASES
from tasks.system.ports import free_port
from tasks.system.processes import ProcessIdentity
from tests.support.forked import Program
from tests.support.patience import PATIENCE, post, wait_for_server, wait_until
from tests.support.platform_helpers import Workspace, running
from tests.support.prefect_store import prefect_in

POOL = "two-gpus"
AWAY_SECONDS = 6.0
HOLDS = """
import os, subprocess, sys, time
from pathlib import Path
from prefect import flow
from tasks.actors.watchdog import watchdog
from tasks.config.trainer import RayConfig
from tasks.records.run_lock import run_lock
from tasks.run.gpu_slots import gpu_slots

pool, gpus, name, folder = *sys.argv[1:4], Path(sys.argv[4])

@flow(flow_run_name=name)
def hold():
    with run_lock(folder), gpu_slots(RayConfig(gpu_pool=pool), float(gpus), folder) as waited, watchdog():
        (folder / "waited").write_text(str(waited))
        while not (folder / "leave").exists():
            time.sleep(0.05)

hold()
"""
"""A run that has slots until there is a file `leave` in its folder."""


def on(server: dict[str, str]) -> AbstractContextManager[Any]:
    """This thread talks to that server."""
    return temporary_settings({PREFECT_API_URL: server["PREFECT_API_URL"]})


@pytest.fixture
def pool(prefect_server: dict[str, str]) -> Iterator[str]:
    """A limit of two GPUs on the server, which this process talks to."""
    with on(prefect_server):
        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=POOL, limit=2))
        yield POOL
        with get_client(sync_client=True) as client:
            client.delete_global_concurrency_limit_by_name(POOL)


def taken(pool: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(pool).active_slots


def leased(pool: str, slots: int) -> UUID:
    """A lease of somebody's, who does not renew it."""
    with get_client(sync_client=True) as client:
        lease = SlotLease.acquired(client, pool, slots)
    assert lease is not None
    return lease.id


def release(lease: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(lease)


@contextmanager
def sleeping(**variables: str) -> Iterator[ProcessIdentity]:
    """A process with these variables that sleeps during the block."""
    with subprocess.Popen(["sleep", str(PATIENCE)], env=os.environ | variables) as process:
        try:
            yield ProcessIdentity.of(process.pid)
        finally:
            process.kill()


def dead() -> Owner:
    """A process of this machine that was."""
    with sleeping() as process:
        pass
    return Owner.this()._replace(process=process)


@contextmanager
def waiting(server: dict[str, str], pool: str, gpus: float, folder: Path | None) -> Iterator[list[str]]:
    """During the block another thread waits for slots; afterwards it has them. The lines that it told."""
    told: list[str] = []
    entered = threading.Event()

    def ask() -> None:
        with on(server), gpu_slots(RayConfig(gpu_pool=pool), gpus, folder, told.append) as waited:
            assert waited > 0
            entered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_until(lambda: told, "a line about the wait", every=0.05)
    assert not entered.is_set()
    yield told
    thread.join(PATIENCE)
    assert entered.is_set()


@pytest.fixture
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases, each second."""
    monkeypatch.setattr(slot_lease, "RENEWED_EVERY", 1.0)


def said(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    """Has a lease's renewal told this?"""
    return any(words in record.getMessage() for record in caplog.records if record.name == slot_lease.__name__)


def test_slots_are_held_and_given_back_across_a_servers_death(
    tmp_path: Path, renewed_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    """With the variables that `make up` gives its server, which is away for longer than Prefect itself tries."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/api"
    environment = os.environ | prefect_in(tmp_path) | {"PREFECT_API_URL": address} | KEPT_LEASES
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]

    def server(log: str) -> AbstractContextManager[Program]:
        return running(Program(command, tmp_path, environment, tmp_path / log))

    with temporary_settings({PREFECT_API_URL: address}):
        with server("first.log") as first:
            wait_for_server(f"{address}/health", "the first server's start")
            with get_client(sync_client=True) as client:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=POOL, limit=2))
            holding = gpu_slots(RayConfig(gpu_pool=POOL), 2, tmp_path)
            holding.__enter__()
            held = Held.read(tmp_path / RECORD)
            os.kill(first.pid, signal.SIGKILL)
            first.wait(PATIENCE)
            wait_until(lambda: said(caplog, "is not renewed, tried on"), "word of the outage")
            time.sleep(AWAY_SECONDS)
        with server("second.log"):
            wait_for_server(f"{address}/health", "the second server's start")
            wait_until(lambda: said(caplog, "is renewed, after"), "word of the outage's end")
            assert held == Held.read(tmp_path / RECORD)
            assert taken(POOL) == 2
            holding.__exit__(None, None, None)
            assert taken(POOL) == 0
            EventsWorker.drain_all(PATIENCE)  # or Prefect goes on telling of them in the tests after this one


def test_an_expired_lease_has_another_in_its_place(
    pool: str, tmp_path: Path, renewed_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    with gpu_slots(RayConfig(gpu_pool=pool), 2, tmp_path):
        expired = Held.read(tmp_path / RECORD)
        assert expired is not None
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(expired.lease)
        wait_until(lambda: Held.read(tmp_path / RECORD) != expired, "the record of another")
        assert said(caplog, "has another one")
        assert taken(pool) == 2
    assert taken(pool) == 0


def given_to_another(pool: str, folder: Path) -> SlotLease:
    """One of the slots of the run in this folder."""
    with get_client(sync_client=True) as client:
        while True:
            held = Held.read(folder / RECORD)
            assert held is not None
            client.release_concurrency_slots_with_lease(held.lease)
            with suppress(HTTPStatusError):  # the run was quicker
                other = SlotLease.acquired(client, pool, 1)
                assert other is not None
                return other


def test_a_run_whose_slots_are_others_ends(
    pool: str, tmp_path: Path, renewed_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    """And leaves them theirs."""
    others: list[SlotLease] = []

    def train() -> None:
        with gpu_slots(RayConfig(gpu_pool=pool), 2, tmp_path):
            others.append(given_to_another(pool, tmp_path))
            while True:
                time.sleep(0.05)

    with pytest.raises(CancelledError):
        train()
    assert said(caplog, "not reserved any more")
    assert taken(pool) == 1
    assert not (tmp_path / RECORD).exists()
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(others[0].id)


def test_a_run_holds_a_slot_for_each_gpu_and_another_waits_for_them(pool: str, prefect_server: dict[str, str]) -> None:
    config, entered, leave = RayConfig(gpu_pool=pool), threading.Event(), threading.Event()
    told: list[str] = []

    def second() -> None:
        with on(prefect_server), gpu_slots(config, 1, told=told.append):
            entered.set()
            leave.wait(PATIENCE)

    with gpu_slots(config, 1.5) as waited:
        assert waited == 0
        assert taken(pool) == 2  # half a GPU takes a whole slot
        other = threading.Thread(target=second, daemon=True)
        other.start()
        wait_until(lambda: told, "a line about the wait", every=0.05)
        assert not entered.is_set()
    assert entered.wait(PATIENCE)
    assert told == ["waits for GPU slots of two-gpus: needs 1, and 2 of 2 are taken"]
    assert taken(pool) == 1
    leave.set()
    other.join()
    assert taken(pool) == 0
    with gpu_slots(config, 0), gpu_slots(RayConfig(), 4):
        assert taken(pool) == 0  # a run without GPUs, or without a pool, asks for none


def test_a_pool_that_cannot_hold_the_run_is_an_error(pool: str) -> None:
    with (
        pytest.raises(ClusterError, match=r"needs 3 GPUs but ray_init\.gpu_pool two-gpus has 2 in all"),
        gpu_slots(RayConfig(gpu_pool=pool), 2.5),
    ):
        pass
    with (
        pytest.raises(ClusterError, match="'nowhere', which Prefect does not know"),
        gpu_slots(RayConfig(gpu_pool="nowhere"), 1),
    ):
        pass


def test_a_pool_that_becomes_too_small_is_an_error_of_who_waits(pool: str) -> None:
    lease, told = leased(pool, 2), []

    def tell(line: str) -> None:
        told.append(line)
        with get_client(sync_client=True) as client:
            client.update_global_concurrency_limit(pool, GlobalConcurrencyLimitUpdate(limit=1))

    with (
        pytest.raises(ClusterError, match=r"needs 2 GPUs but ray_init\.gpu_pool two-gpus has 1 in all"),
        gpu_slots(RayConfig(gpu_pool=pool), 2, told=tell),
    ):
        pass
    assert len(told) == 1
    release(lease)


def test_a_run_that_goes_on_does_not_wait_for_its_killed_process(
    pool: str, prefect_server: dict[str, str], tmp_path: Path
) -> None:
    """Others do, and are told for whom."""
    ours, others = tmp_path / "ours", tmp_path / "others"

    def begin(folder: Path, gpus: int, log: str) -> Program:
        (folder / "waited").unlink(missing_ok=True)
        command = ("-c", HOLDS, pool, str(gpus), folder.name, str(folder))
        return Program(command, tmp_path, prefect_server, tmp_path / log)

    def has_slots(folder: Path, program: Program) -> float:
        wait_until((folder / "waited").exists, f"its slots ({program.log})", every=0.05)
        return float(wait_until((folder / "waited").read_text, f"its slots ({program.log})", every=0.05))

    def heard(what: str, name: str) -> bool:
        """Does the server know that a flow run did it? It is told behind the run."""
        wanted = {"event": {"name": [f"prefect.concurrency-limit.{what}"]}}
        events = post(f"{prefect_server['PREFECT_API_URL']}/events/filter", {"filter": wanted})["events"]
        return any(related.get("prefect.resource.name") == name for one in events for related in one["related"])

    with running(begin(ours, 2, "killed.log")) as program:
        has_slots(ours, program)
        os.kill(program.pid, signal.SIGKILL)
        program.wait(PATIENCE)
    assert taken(pool) == 2
    assert (ours / RECORD).exists()
    with running(begin(ours, 2, "again.log")) as program:
        assert has_slots(ours, program) == 0
        assert "waits for" not in program.output()
        assert taken(pool) == 2
        wait_until(lambda: heard("acquired", "ours"), "the word of its slots")
        with running(begin(others, 1, "others.log")) as another:
            wait_until(lambda: "waits for" in another.output(), f"its wait ({another.log})", every=0.05)
            assert "waits for GPU slots of two-gpus: needs 1, and 2 of 2 are taken by ours\n" in another.output()
            assert not (others / "waited").exists()
            (ours / "leave").touch()
            assert program.wait(PATIENCE) == 0, program.output()
            assert not (ours / RECORD).exists()
            assert has_slots(others, another) > 0
            (others / "leave").touch()
            assert another.wait(PATIENCE) == 0, another.output()
    assert taken(pool) == 0
    for name in ("ours", "others"):
        wait_until(lambda name=name: heard("released", name), "the word that it has none")
    lease = leased(pool, 2)
    with waiting(prefect_server, pool, 1, None) as told:
        # Of the killed one, which Prefect takes to run still, nothing any more.
        assert told == ["waits for GPU slots of two-gpus: needs 1, and 2 of 2 are taken"]
        release(lease)


def test_only_those_are_named_that_can_have_the_slots(pool: str, prefect_server: dict[str, str]) -> None:
    """A killed flow run says nothing, and Prefect may take it to run for ever: there may be more of them than slots."""
    with get_client(sync_client=True) as client:
        limit = client.read_global_concurrency_limit_by_name(pool).id
        ended = client.create_flow_run(flow(print), name="ended", state=Completed()).id

    def event(number: int, name: str, run: UUID, what: str, slots: int) -> dict[str, Any]:
        flow_run = {"id": f"prefect.flow-run.{run}", "role": "flow-run", "name": name}
        return {
            "occurred": (datetime.now(UTC) + timedelta(seconds=number - 60)).isoformat(),
            "event": f"prefect.concurrency-limit.{what}",
            "resource": {"prefect.resource.id": f"prefect.concurrency-limit.{limit}", "slots-acquired": str(slots)},
            "related": [{f"prefect.resource.{label}": value for label, value in flow_run.items()}],
            "id": str(uuid4()),
        }

    sequence = [("killed", "acquired"), ("now", "acquired"), ("left", "acquired"), ("left", "released")]
    events = [event(number, name, uuid4(), what, 1) for number, (name, what) in enumerate(sequence)]
    events += [event(4, "too", uuid4(), "acquired", 1), event(5, "ended", ended, "acquired", 1)]
    api = prefect_server["PREFECT_API_URL"]
    post(f"{api}/events", events)
    wanted = {"filter": {"id": {"id": [one["id"] for one in events]}}}
    wait_until(lambda: len(post(f"{api}/events/filter", wanted)["events"]) == len(events), "the events")
    lease = leased(pool, 2)
    with waiting(prefect_server, pool, 1, None) as told:
        assert told == ["waits for GPU slots of two-gpus: needs 1, and 2 of 2 are taken by too, now"]
        release(lease)


def test_what_a_killed_process_started_ends_first(pool: str, prefect_server: dict[str, str], tmp_path: Path) -> None:
    """It may have memory of the GPUs; its watchdog, which ends it, is not there yet or has just begun."""
    owner = dead()
    Held(leased(pool, 2), owner).write(tmp_path / RECORD)
    with sleeping(**{MARK: str(owner.process)}) as left, waiting(prefect_server, pool, 2, tmp_path) as told:
        assert taken(pool) == 2
        line = f"waits until what the run's killed process {owner.process.pid} started has ended: pid {left.pid}"
        assert told == [line]
        os.kill(left.pid, signal.SIGKILL)
    assert told == [line]  # nothing of slots: they were there at once then
    assert taken(pool) == 0


@pytest.mark.parametrize("of", ["another machine", "a process that lives"])
def test_slots_of_others_are_left_to_them(pool: str, prefect_server: dict[str, str], tmp_path: Path, of: str) -> None:
    lease = leased(pool, 2)
    owner = Owner.this() if of == "a process that lives" else dead()._replace(host="elsewhere")
    Held(lease, owner).write(tmp_path / RECORD)
    with waiting(prefect_server, pool, 1, tmp_path) as told:
        assert told == ["waits for GPU slots of two-gpus: needs 1, and 2 of 2 are taken"]
        assert taken(pool) == 2
        release(lease)
    assert not (tmp_path / RECORD).exists()


def test_a_lease_that_is_no_more_changes_nothing(pool: str, tmp_path: Path) -> None:
    """It has expired, or is another Prefect server's."""
    Held(uuid4(), dead()).write(tmp_path / RECORD)
    other = leased(pool, 1)
    with gpu_slots(RayConfig(gpu_pool=pool), 1, tmp_path) as waited:
        assert waited == 0
        assert taken(pool) == 2
        held = Held.read(tmp_path / RECORD)
        assert held is not None
        assert held.owner == Owner.this()
    release(other)
    assert taken(pool) == 0


def test_what_a_run_without_a_pool_left_before_is_freed_too(pool: str, tmp_path: Path) -> None:
    Held(leased(pool, 2), dead()).write(tmp_path / RECORD)
    with gpu_slots(RayConfig(), 1, tmp_path):
        assert taken(pool) == 0
        assert not (tmp_path / RECORD).exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"lease": 1, "owner": "x"}', '{"lease": "x"}', "\0\xff"])
def test_a_record_that_says_nothing_is_told_and_not_heeded(
    pool: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / RECORD).write_bytes(text.encode("latin-1"))
    with gpu_slots(RayConfig(gpu_pool=pool), 1, tmp_path):
        assert taken(pool) == 1
    (message,) = (record.message for record in caplog.records if record.name == "tasks.run.gpu_slots")
    assert message.startswith(f"{tmp_path / RECORD} does not say which GPU slots a killed process of the run left")
    assert not (tmp_path / RECORD).exists()


def test_the_wait_is_not_put_down_to_ray(
    pool: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal has its line, and the start's parts have it apart."""
    monkeypatch.chdir(workspace.folder)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nobody listens
    recipe = load_recipe("tiny")
    settings = ["reward.functions={jpeg_incompressibility: {num_gpus: 1}}", f"ray_init.gpu_pool={pool}"]
    config = recipe.with_changes(parse_changes(settings, recipe=recipe))
    lease, start, told = leased(pool, 2), StartTimes(), []

    def let_go() -> None:
        with on(workspace.environment):
            try:
                wait_until(
                    lambda: told.append(capsys.readouterr().err) or "waits for" in "".join(told), "the line", 0.05
                )
            finally:
                release(lease)

    other = threading.Thread(target=let_go, daemon=True)
    other.start()
    with (
        disable_run_logger(),
        pytest.raises(ClusterError, match=r"127\.0\.0\.1:1"),
        open_cluster_and_tracker(config, "measured", trains=True, start=start),
    ):
        pass
    other.join()
    start.mark("Ray and MLflow")
    assert start.parts["the wait for GPU slots"] > 0
    assert [*start.parts][-2:] == ["the wait for GPU slots", "Ray and MLflow"]
    assert f"waits for GPU slots of {pool}: needs 1, and 2 of 2 are taken\n" in "".join(told)
    assert not (config.run_dir / RECORD).exists()
