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
"""Where an actor keeps them: stage -> bytes."""


def measures_gpu_memory(stage: str | Callable[..., str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of an actor's method: what the tensors of its process took at most while it ran.

    Where the process has no tensors on a GPU there is nothing to measure, and nothing is done: so with a rollout
    worker whose model lives in processes of its own.

    Args:
        stage: what it counts as, or a function of the method's arguments that says so.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def measured(self: Any, *arguments: Any, **named: Any) -> Any:
            import torch  # here: the workers of a reward have no other use for it

            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            try:
                return method(self, *arguments, **named)
            finally:
                if torch.cuda.is_initialized() and torch.cuda.max_memory_allocated():
                    name = stage if isinstance(stage, str) else stage(*arguments, **named)
                    peaks = self.__dict__.setdefault(PEAKS, {})
                    peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())

        return measured

    return decorate


def peaks_since_last_time(actor: Any) -> dict[str, int]:
    """What an actor's methods have measured, by stage; it begins anew afterwards."""
    return actor.__dict__.pop(PEAKS, {})


def peak_metrics(group: str, peaks: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """memory/<group>/gpu_peak_gib/<stage>: of the actor that took the most."""
    stages = dict.fromkeys(stage for of_actor in peaks for stage in of_actor)
    return {
        f"memory/{group}/gpu_peak_gib/{stage}": max(of_actor.get(stage, 0) for of_actor in peaks) / GIB
        for stage in stages
    }


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
    peaks: dict[str, int]


def memory_of(actor: Any) -> ActorMemory:
    """What there is to say of an actor's memory; its peaks begin anew."""
    return ActorMemory(resident_mb(), peaks_since_last_time(actor))
