# SPDX-License-Identifier: Apache-2.0
"""Traces of torch's profiler out of the actors, for chosen iterations; without them no actor hears of it."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from tasks.actors.waiting import get
from tasks.config.trainer import ProfileConfig

if TYPE_CHECKING:  # the actors import this module, and have no use for Prefect
    from tasks.actors.actor_group import ActorGroup

PROFILER = "profiler"
"""Where an actor keeps the one that is running."""


def start_traces(group: "ActorGroup", numbers: Sequence[int], settings: ProfileConfig) -> dict[int, Any]:
    """Have the profiler begin in the actors of these numbers; number -> actor, for `collect_traces`."""
    actors = {number: group.actors[number] for number in numbers}
    group.get([actor.__ray_call__.remote(_start, settings) for actor in actors.values()])
    return actors


def collect_traces(actors: Mapping[int, Any]) -> dict[int, bytes]:
    """End it: a gzipped Chrome trace of each actor by its number. One that died meanwhile leaves none."""
    found = get([actor.__ray_call__.remote(_stop) for actor in actors.values()])
    return {number: trace for number, trace in zip(actors, found, strict=True) if trace is not None}


def _start(actor: Any, settings: ProfileConfig) -> None:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *cuda],
        record_shapes=settings.record_shapes,
        with_stack=settings.with_stack,
        profile_memory=settings.profile_memory,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # a rollout worker samples in others
    )
    profiler.start()
    actor.__dict__[PROFILER] = profiler


def _stop(actor: Any) -> bytes | None:
    profiler = actor.__dict__.pop(PROFILER, None)
    if profiler is None:
        return None
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        return trace.read_bytes()
