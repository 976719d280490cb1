# SPDX-License-Identifier: Apache-2.0
"""What processes hold of their machine's memory, and the most GPU memory that a stage took.

Actors of every kind import this when they are asked: so nothing large is imported here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

GIB = 2**30
PEAKS = "gpu_peaks"
"""Where an actor keeps them: stage -> GpuPeak."""
RUNNING = "gpu_measured"
"""Where it has those of its measured methods that are running."""


class GpuPeak(NamedTuple):
    """The most of a GPU that one process had, in bytes.

    Attributes:
        taken: by its tensors.
        kept: by its allocator, for tensors that there are and that there were: what no other process gets.
    """

    taken: int
    kept: int


def measures_gpu_memory(stage: str | Callable[..., str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of an actor's method: what its process took and kept of the GPU at most while it ran.

    Where the process has no tensors on a GPU there is nothing to measure, and nothing is done: so with a rollout
    worker whose model lives in processes of its own.

    Args:
        stage: what it counts as, or a function of the method's arguments that says so.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def measured(self: Any, *arguments: Any, **named: Any) -> Any:
            import torch  # here: the workers of a reward have no other use for it

            running = self.__dict__.setdefault(RUNNING, [])
            if torch.cuda.is_initialized() and not running:  # by another thread: its peak is not to be forgotten
                torch.cuda.reset_peak_memory_stats()
            running.append(method)
            try:
                return method(self, *arguments, **named)
            finally:
                running.pop()
                if torch.cuda.is_initialized() and torch.cuda.max_memory_reserved():
                    name = stage if isinstance(stage, str) else stage(*arguments, **named)
                    peaks = self.__dict__.setdefault(PEAKS, {})
                    found = GpuPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
                    peaks[name] = _largest([found, peaks.get(name, found)])

        return measured

    return decorate


def _largest(peaks: Sequence[GpuPeak]) -> GpuPeak:
    """The most that was taken, and the most that was kept, each by whichever it was."""
    return GpuPeak(*map(max, zip(*peaks, strict=True)))


def peaks_since_last_time(actor: Any) -> dict[str, GpuPeak]:
    """What an actor's methods have measured, by stage; it begins anew afterwards."""
    return actor.__dict__.pop(PEAKS, {})


def peak_metrics(group: str, peaks: Sequence[Mapping[str, GpuPeak]]) -> dict[str, float]:
    """memory/<group>/gpu_peak_gib/<stage> of the actor that took the most, and gpu_kept_gib of the one that kept it."""
    metrics = {}
    for stage in dict.fromkeys(stage for of_actor in peaks for stage in of_actor):
        most = _largest([of_actor[stage] for of_actor in peaks if stage in of_actor])
        metrics[f"memory/{group}/gpu_peak_gib/{stage}"] = most.taken / GIB
        metrics[f"memory/{group}/gpu_kept_gib/{stage}"] = most.kept / GIB
    return metrics


def resident_mb() -> float:
    """What this process holds of its machine's memory, in MB."""
    return psutil.Process().memory_info().rss / 1e6


class ActorMemory(NamedTuple):
    """What an actor says of its memory. It is not among the other messages, which import torch.

    Attributes:
        resident_mb: what its process holds of its machine's memory, in MB.
        peaks: see `peaks_since_last_time`.
    """

    resident_mb: float
    peaks: dict[str, GpuPeak]


def memory_of(actor: Any) -> ActorMemory:
    """What there is to say of an actor's memory; its peaks begin anew."""
    return ActorMemory(resident_mb(), peaks_since_last_time(actor))


def memory_metrics(group: str, actors: Sequence[ActorMemory]) -> dict[str, float]:
    """memory/<group>_<number>_mb of every actor: what its process holds of its machine's memory; and what the stages
    since the last call took and kept of its GPU at most, see `peak_metrics`."""
    resident = {f"memory/{group}_{number}_mb": actor.resident_mb for number, actor in enumerate(actors)}
    return resident | peak_metrics(group, [actor.peaks for actor in actors])
