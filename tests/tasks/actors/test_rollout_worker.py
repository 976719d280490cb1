# SPDX-License-Identifier: Apache-2.0
"""What a rollout worker says of its batches and of its GPU's memory, called by two threads. Without Ray and a GPU."""

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.samples.trajectories import Generated
from tasks.actors.memory import GpuPeak, measures_gpu_memory, peaks_since_last_time
from tasks.actors.profiling import _start, _stop
from tasks.actors.rollout_worker import RolloutWorker
from tasks.config.trainer import ProfileConfig
from tests.support.helpers import rollout_request
from tests.support.patience import PATIENCE

SAMPLING_S = 0.05
IDLE_S = 2.0


class Engine:
    """Samples nothing, for a while; one request after the other."""

    def __init__(self) -> None:
        self.turn = threading.Lock()

    def produce(self, request: Any, pipeline: Any) -> Generated:
        with self.turn:
            time.sleep(SAMPLING_S)
        return Generated(None, None, None, torch.ones(len(request.keys), dtype=torch.bool))


def test_the_seconds_of_batches_that_are_in_hand_together_are_counted_once() -> None:
    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._engine, worker._making, worker._loading = Engine(), threading.Lock(), threading.Lock()
    worker._sampled_until = 0.0
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(worker.generate, rollout_request(), None, None) for _ in range(6)]
        seconds = [call.result(PATIENCE).seconds for call in calls]
    assert 6 * SAMPLING_S <= sum(seconds) <= time.perf_counter() - start
    time.sleep(IDLE_S)  # when nothing was asked of it
    assert worker.generate(rollout_request(), None, None).seconds < IDLE_S


def test_a_trace_has_what_all_threads_of_an_actor_do() -> None:
    actor, operations = SimpleNamespace(), ("aten::mm", "aten::cumsum")
    with ThreadPoolExecutor(1) as own, ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        own.submit(_start, actor, ProfileConfig()).result()
        first.submit(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).result()
        second.submit(torch.cumsum, torch.ones(2), 0).result()
        trace = own.submit(_stop, actor).result()
    assert trace is not None
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    assert {event.get("name") for event in events} >= {*operations}


class Gpu:
    """What torch says of a GPU's memory."""

    def __init__(self) -> None:
        self.taken = self.peak = 0

    def take(self, size: int) -> None:
        self.taken += size
        self.peak = max(self.peak, self.taken)

    def forget(self) -> None:
        self.peak = self.taken


class Actor:
    """What a group's actor is to the decorator."""

    @measures_gpu_memory("work")
    def work(self, gpu: Gpu, size: int, meeting: threading.Barrier | None = None) -> None:
        gpu.take(size)
        gpu.take(-size)
        if meeting is not None:
            meeting.wait(PATIENCE)  # the other thread's call begins now
            meeting.wait(PATIENCE)

    @measures_gpu_memory("other")
    def other(self, meeting: threading.Barrier) -> None:
        meeting.wait(PATIENCE)


def test_a_peak_is_not_forgotten_by_a_call_that_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, actor, meeting = Gpu(), Actor(), threading.Barrier(2)
    known = {
        "is_initialized": lambda: True,
        "reset_peak_memory_stats": gpu.forget,
        "max_memory_allocated": lambda: gpu.peak,
        "max_memory_reserved": lambda: 1000,
    }
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**known))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(actor.work, gpu, 500, meeting)
        meeting.wait(PATIENCE)
        actor.other(meeting)
        call.result(PATIENCE)
    assert peaks_since_last_time(actor)["work"] == GpuPeak(500, 1000)
    actor.work(gpu, 20)  # and of one that begins alone none before it counts
    assert peaks_since_last_time(actor)["work"].taken == 20
