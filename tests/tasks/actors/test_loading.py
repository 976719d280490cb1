# SPDX-License-Identifier: Apache-2.0
"""Actors that never load, and some that only wait for room, on a real Ray."""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tasks.actors.actor_group import ActorGroup
from tasks.actors.loading import MOST_STARTS, LoadWatch, NotLoaded, _state_of, ended_for_good
from tasks.actors.machines import watched_machines
from tasks.cli.terminal import sentence
from tasks.system.processes import identity
from tests.support.patience import PATIENCE, wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


@pytest.fixture(scope="module", autouse=True)
def cluster(forked_workers: dict[str, Any]) -> Iterator[None]:
    """Of one CPU."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=forked_workers)
    yield
    ray.shutdown()


class HangsOnce:
    """Of the processes with this folder the first one never loads, and leaves its number there."""

    def __init__(self, folder: Path):
        try:
            (folder / "hangs").touch(exist_ok=False)
        except FileExistsError:
            return
        (folder / "process").write_text(str(os.getpid()))
        time.sleep(10 * PATIENCE)

    def ready(self) -> str:
        return "ready"


class HangsAgain:
    """Loads, and does not in a process that is started in the first one's place."""

    def __init__(self, folder: Path):
        try:
            (folder / "loaded").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(10 * PATIENCE)

    def process(self) -> int:
        return os.getpid()


class Raises:
    def ready(self) -> str:
        raise TimeoutError("the actor's own")


class Ready:
    def ready(self) -> str:
        return "ready"


def test_an_actor_that_never_loads_is_named_and_ended_alone(tmp_path: Path) -> None:
    group = ActorGroup(HangsOnce, 2, 0.0, (tmp_path,), max_restarts=2)
    wait_until((tmp_path / "process").exists, "the process that hangs", every=0.1)
    ray.wait([actor.ready.remote() for actor in group.actors], timeout=PATIENCE)  # the other is not to be late
    with pytest.raises(NotLoaded, match=r"^model [01]: not loaded within ray_init\.start_timeout_s 6 s; ") as caught:
        group.wait_loaded("model", 6, "ready")
    hung = int(str(caught.value).split()[1].rstrip(":"))
    assert ray.get(group.actors[1 - hung].ready.remote()) == "ready"
    with pytest.raises(RayActorError):
        ray.get(group.actors[hung].ready.remote())
    process = int((tmp_path / "process").read_text())
    wait_until(lambda: identity(process) is None, "its end", every=0.1)


class Killed:
    """By the kernel, say, for want of memory."""

    def process(self) -> int:
        return os.getpid()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_died_is_told_in_a_sentence() -> None:
    """Ray has two paragraphs, of causes that any death may have."""
    group = ActorGroup(Killed, 1, 0.0)
    (process,) = group.call_all("process")
    with pytest.raises(RayActorError) as ended:
        group.call_all("end")
    told = rf"a worker process died: Killed, process {process} on \S+ \(Worker unexpectedly exits [\w. ]+\): where the "
    assert re.fullmatch(
        told + "kernel killed it for want of memory, `dmesg` there tells so", sentence(ended.value) or ""
    )
    other = ActorGroup(Killed, 1, 0.0)
    ray.kill(other.actors[0])
    with pytest.raises(RayActorError) as ended:
        other.call_all("process")
    assert "killed by `ray.kill`" in (sentence(ended.value) or ""), "all that Ray says where it is something else"


def test_an_actor_that_hangs_when_it_is_started_again_ends_what_waits_for_it(tmp_path: Path) -> None:
    group = ActorGroup(HangsAgain, 1, 0.0, (tmp_path,), max_restarts=3, max_task_retries=-1)
    (first,) = group.call_all("process")

    def killed_while_watched() -> None:
        with watched_machines({"rollout": group}, logging.getLogger("a run"), "go on so", 3):
            os.kill(first, signal.SIGKILL)
            group.call_all("process")

    told = r"^rollout 0, which was started again: not loaded within ray_init\.start_timeout_s 3 s; "
    with pytest.raises(NotLoaded, match=told):
        killed_while_watched()
    assert ended_for_good(group.actors[0])


class DiesAtOnce:
    """Its first processes live as long as it is told, and all others not at all: as one whose memory is too little."""

    def __init__(self, folder: Path, lives: int):
        count = len(list(folder.iterdir()))
        (folder / str(count)).touch()
        if count >= lives:
            os._exit(1)

    def process(self) -> int:
        return os.getpid()


DIES = r"5 processes died one after the other as they began; the logs of Ray's workers say why\."


def test_an_actor_whose_processes_die_as_they_begin_is_given_up(tmp_path: Path) -> None:
    """Ray would start one after the other for ever, and so long as none is there no time counts."""
    group = ActorGroup(DiesAtOnce, 1, 0.0, (tmp_path, 0), max_restarts=-1, max_task_retries=-1)
    with pytest.raises(NotLoaded, match=rf"^model 0: {DIES}"):
        group.wait_loaded("model", 10 * PATIENCE, "process")
    assert ended_for_good(group.actors[0])
    assert len(list(tmp_path.iterdir())) < 20


def test_so_is_one_that_was_started_again(tmp_path: Path) -> None:
    group = ActorGroup(DiesAtOnce, 1, 0.0, (tmp_path, 1), max_restarts=-1, max_task_retries=-1)
    (first,) = group.call_all("process")
    watch, named = LoadWatch(10 * PATIENCE), {"rollout 0": group.actors[0]}
    watch.look(named)
    os.kill(first, signal.SIGKILL)

    def given_up() -> bool:
        watch.look(named)
        return watch.error is not None

    wait_until(given_up, "the end of its starts", every=0.2)
    assert re.match(rf"rollout 0: {DIES}", str(watch.error))
    assert ended_for_good(group.actors[0])


class LivesAFewTimes:
    """One process more than may die as they begin waits, as it begins, until it is told to go on."""

    def __init__(self, folder: Path):
        count = len(list(folder.glob("process*")))
        (folder / f"process{count}").touch()
        while count >= MOST_STARTS and not (folder / "go_on").exists():
            time.sleep(0.05)

    def process(self) -> int:
        return os.getpid()


def test_processes_that_lived_between_two_looks_did_not_die_as_they_began(tmp_path: Path) -> None:
    group = ActorGroup(LivesAFewTimes, 1, 0.0, (tmp_path,), max_restarts=-1, max_task_retries=-1)
    group.call_all("process")
    watch, named = LoadWatch(10 * PATIENCE), {"reward 0": group.actors[0]}
    watch.look(named)
    for _ in range(MOST_STARTS):
        (process,) = group.call_all("process")
        os.kill(process, signal.SIGKILL)
        wait_until(lambda ended=process: identity(ended) is None, "its end", every=0.05)
    wait_until((tmp_path / f"process{MOST_STARTS}").exists, "the last one", every=0.05)
    watch.look(named)
    assert watch.error is None
    (tmp_path / "go_on").touch()
    group.call_all("process")
    assert not ended_for_good(group.actors[0])


def test_an_actor_that_waits_for_room_to_be_started_again_is_left_to_it() -> None:
    group = ActorGroup(Ready, 1, 0.0, num_cpus=1, max_restarts=-1, max_task_retries=-1)
    group.call_all("ready")
    watch, named = LoadWatch(0.1), {"rollout 0": group.actors[0]}
    other = ActorGroup(Ready, 1, 0.0, num_cpus=1)  # is to get the room
    asked = other.actors[0].ready.remote()

    def has_room() -> bool:
        """It has, or the first one has it again, of which Ray's head may tell first, and loses it once more."""
        if ray.wait([asked], timeout=1)[0]:
            return True
        found = _state_of(group.actors[0])
        if found.get("State") == "ALIVE":
            with suppress(ProcessLookupError):  # what is told is of before
                os.kill(found["Pid"], signal.SIGKILL)
        return False

    wait_until(has_room, "the room for the other", every=0.1)
    for _ in range(20):
        watch.look(named)
        time.sleep(0.1)
    ray.kill(other.actors[0])
    assert group.call_all("ready") == ["ready"]


def test_waiting_for_room_is_no_loading() -> None:
    other = ActorGroup(Ready, 1, 0.0, num_cpus=1)
    other.call_all("ready")
    group = ActorGroup(Ready, 1, 0.0, num_cpus=1)
    free = Timer(10, ray.kill, (other.actors[0],))
    free.start()
    assert group.wait_loaded("model", 8, "ready") == ["ready"]
    free.join()


def test_what_an_actor_raises_is_not_taken_for_a_wait_that_is_over() -> None:
    with pytest.raises(TimeoutError, match="the actor's own"):
        ActorGroup(Raises, 1, 0.0).wait_loaded("model", PATIENCE, "ready")
