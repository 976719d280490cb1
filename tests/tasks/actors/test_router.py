# SPDX-License-Identifier: Apache-2.0
"""Where batches go: to the least busy worker, and not before one has a free place; who shares a GPU; ended waits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray
from prefect.exceptions import TerminationSignal

from models.weights.trainable import WeightSyncError
from tasks.actors.actor_group import ActorGroup
from tasks.actors.rank_places import RankPlaces
from tasks.actors.router import Router
from tasks.actors.waiting import get
from tasks.actors.weight_transport import Routes


@pytest.fixture(scope="module", autouse=True)
def cluster(forked_workers: dict[str, Any]) -> Iterator[None]:
    """Two GPUs that only Ray counts."""
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, runtime_env=forked_workers)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Gate:
    """Holds its callers until it is opened."""

    def __init__(self) -> None:
        self.open = set()

    def release(self, name: str) -> None:
        self.open.add(name)

    def is_open(self, name: str) -> bool:
        return name in self.open


@ray.remote(num_cpus=0)
def held_by(gate: ray.actor.ActorHandle, name: str, fails: bool = False) -> str:
    while not ray.get(gate.is_open.remote(name)):
        time.sleep(0.02)
    if fails:
        raise RuntimeError("this batch failed")
    return name


def test_the_least_busy_worker_is_next() -> None:
    gate, router = Gate.remote(), Router(workers=2, max_queued=3)
    batches = {}
    for name, worker in (("a", 0), ("b", 1), ("c", 0)):
        assert router.next_free() == worker
        batches[name] = held_by.remote(gate, name)
        router.assign(worker, batches[name])
    assert router.next_free() == 1
    ray.get([gate.release.remote("a"), gate.release.remote("c")])
    ray.get([batches["a"], batches["c"]])
    assert router.next_free() == 0
    gate.release.remote("b")


def test_a_full_queue_waits_for_a_place_and_a_failed_batch_leaves_one() -> None:
    gate, router = Gate.remote(), Router(workers=1, max_queued=2)
    first, second = held_by.remote(gate, "a", fails=True), held_by.remote(gate, "b")
    router.assign(router.next_free(), first)
    router.assign(router.next_free(), second)
    gate.release.remote("a")
    assert router.next_free() == 0
    assert ray.wait([first], timeout=0)[0], "a place was given while both batches were still running"
    assert not ray.wait([second], timeout=0)[0]
    ray.get(gate.release.remote("b"))


@ray.remote(num_cpus=0)
class Standing:
    """An actor whose memory is at a place."""

    def __init__(self, place: str):
        self.courier = SimpleNamespace(place=lambda: place)


def test_weights_go_by_memory_from_a_rank_at_the_workers_own_place_to_as_few_workers_as_can_be() -> None:
    first, second, third = (Standing.remote(place) for place in ("a", "a", "b"))
    workers = {f"{place}{i}": Standing.remote(place) for i in range(3) for place in "ab"}
    names = {worker: name for name, worker in workers.items()}
    routes = Routes([first, second, third]).to([*workers.values()], "ipc")
    assert [route.transport for route in routes] == ["ipc"] * 3
    assert [[names[worker] for worker in route.receivers] for route in routes] == [
        ["a0", "a2"],
        ["a1"],
        ["b0", "b1", "b2"],
    ]
    with pytest.raises(WeightSyncError, match=r"where rollout worker 1 is \(b; the ranks are at a\): use object_store"):
        Routes([first, second]).to([workers["a0"], workers["b0"]], "ipc")


def test_groups_on_shared_gpus_have_one_actor_of_each_on_every_gpu() -> None:
    class WhichGpu:
        def gpu(self) -> list[int]:
            return ray.get_gpu_ids()

    places = RankPlaces(1, 2, "cuda", actors=2)
    groups = [ActorGroup(WhichGpu, 2, places.num_gpus, places=places) for _ in range(2)]
    (first, second) = [group.call_all("gpu") for group in groups]
    assert first == second
    assert sorted(gpu for one in first for gpu in one) == [0, 1]


def next_of_full(batch: ray.ObjectRef) -> int:
    """The driver waits for a free place."""
    router = Router(workers=1, max_queued=1)
    router.assign(0, batch)
    return router.next_free()


@pytest.mark.parametrize("waiting", [get, next_of_full])
def test_sigterm_ends_a_wait_before_what_is_waited_for(waiting: Callable[[ray.ObjectRef], object]) -> None:
    """By Prefect's handler, whose error Ray itself would keep until then, and make a SystemError of it."""

    def as_prefect_does(number: int, frame: FrameType | None) -> NoReturn:
        raise TerminationSignal(number)

    gate = Gate.remote()
    batch, sooner = held_by.remote(gate, "a"), Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
    later = Timer(60, gate.release.remote, ("a",))  # else a wait that is not ended would last for ever
    earlier = signal.signal(signal.SIGTERM, as_prefect_does)
    try:
        sooner.start()
        later.start()
        with pytest.raises(TerminationSignal):
            waiting(batch)
        assert not ray.get(gate.is_open.remote("a"))
    finally:
        signal.signal(signal.SIGTERM, earlier)
        later.cancel()
        gate.release.remote("a")


IN_WORKERS = {"trainer_rank.py", "rollout_worker.py", "reward_worker.py", "weight_transport.py"}
BRIEF = {"waiting.py", "machines.py"}
"""They wait for seconds at most, or in a thread."""


def test_the_driver_waits_in_no_other_way() -> None:
    """With `ray.get` or `ray.wait` SIGTERM would be heeded once the awaited call is done."""
    files = [file for floor in ("flows", "tasks") for file in (Path(__file__).parents[3] / floor).rglob("*.py")]
    waiting = {file.name for file in files if "ray.get(" in file.read_text() or "ray.wait(" in file.read_text()}
    assert waiting == IN_WORKERS | BRIEF
