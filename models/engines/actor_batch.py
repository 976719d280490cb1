"""What an optimiser step trains on, and how its metrics are averaged."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.engines.trajectories import Trajectories


@dataclass(frozen=True)
class ActorBatch:
    """What one rank trains on in one optimiser step.

    Attributes:
        parts: this rank's samples as they were sampled, each batch with its advantages [B]. A NaN advantage (a
            missing reward) leaves the sample out, a NaN in the trajectories' `is_weights` that step of it.
        global_count: samples of the mini-batch that count, over all ranks; one of which only some steps count is that
            part of a sample.
    """

    parts: Sequence[tuple[Trajectories, Tensor]]
    global_count: float

    def micro_batches(self, size: int) -> list[tuple[Trajectories, Tensor]]:
        """The parts, cut where they are larger than `size` and never merged: a merged batch is padded and blocked
        differently, and would not replay its log-probs to the last bit."""
        pieces = []
        for trajectories, advantages in self.parts:
            for index in torch.arange(len(trajectories)).split(size):
                pieces.append((trajectories.rows(index), advantages[index]))
        return pieces


def counted_rows(trajectories: Trajectories, advantages: Tensor) -> Tensor:
    """Indices of the samples that count in a window of one step: neither reward nor weight is missing."""
    left_out = torch.isnan(advantages)
    if trajectories.is_weights is not None:
        left_out = left_out | torch.isnan(trajectories.is_weights[:, 0]).cpu()
    return torch.nonzero(~left_out).flatten()


class WeightedMetrics:
    """Averages of metrics over samples; names ending in /max keep the largest value."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Numbers that stand for `weight` samples; with none they say nothing and are left out."""
        if weight:
            for name, value in metrics.items():
                self.entries[name].append((float(value), weight))

    def combined(self) -> dict[str, float]:
        """Name -> average or maximum."""
        return {
            name: max(value for value, _ in entries)
            if name.endswith("/max")
            else sum(value * weight for value, weight in entries) / sum(weight for _, weight in entries)
            for name, entries in self.entries.items()
        }
