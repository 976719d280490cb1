# SPDX-License-Identifier: Apache-2.0
"""Which samples each trainer rank takes into which optimiser step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.errors import DoubleflowError
from tasks.actors.messages import OldBatch, RankMiniBatch


class NothingToLearn(DoubleflowError, RuntimeError):
    """No sample of an iteration has an advantage to learn from."""


@dataclass(frozen=True)
class OldScores:
    """What the trainer's own weights say of an iteration's samples before its first optimiser step.

    Attributes:
        batches: of each batch.
        metrics: how far the rollout's log-probs are from these, under rollout_corr/.
    """

    batches: Sequence[OldBatch]
    metrics: dict[str, float]

    def kept(self) -> np.ndarray:
        """[N], the share of each sample's steps that is not rejected."""
        shares = [
            torch.ones(len(old.log_probs)) if old.is_weights is None else (~old.is_weights.isnan()).double().mean(1)
            for old in self.batches
        ]
        return torch.cat(shares).numpy()


def over_ranks(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the ranks, maxima of names ending in /max; a rank whose samples all dropped out has no such metric."""
    names = dict.fromkeys(name for of_rank in metrics for name in of_rank)
    values = {name: [of_rank[name] for of_rank in metrics if name in of_rank] for name in names}
    return {name: float((max if name.endswith("/max") else np.mean)(found)) for name, found in values.items()}


def plan_updates(
    batch_sizes: Sequence[int],
    advantages: np.ndarray,
    mini_batch_samples: int,
    world_size: int,
    kept: np.ndarray | None = None,
) -> list[tuple[list[RankMiniBatch], list[int]]]:
    """Deal an iteration's batches to optimiser steps and ranks.

    Mini-batches are runs of whole batches in order, and within one the ranks take equal consecutive shares: a batch
    stays as it was sampled, which keeps its replayed log-probs equal to the last bit.

    Args:
        batch_sizes: samples of each batch.
        advantages: [sum of batch_sizes], NaN where missing.
        mini_batch_samples: samples of an optimiser step, over all ranks.
        world_size: ranks.
        kept: [sum of batch_sizes], the share of each sample's steps that is not rejected; None keeps all.

    Returns:
        For each rank (its mini-batches, the batch numbers that their `positions` count in).
    """
    starts = np.concatenate([[0], np.cumsum(batch_sizes)])
    mini_batch_of = [int(start) // mini_batch_samples for start in starts[:-1]]
    plans: list[list[RankMiniBatch]] = [[] for _ in range(world_size)]
    used: list[list[int]] = [[] for _ in range(world_size)]
    counts = np.where(np.isnan(advantages), 0.0, 1.0 if kept is None else kept)
    for number in sorted(set(mini_batch_of)):
        members = [i for i, owner in enumerate(mini_batch_of) if owner == number]
        share = len(members) // world_size
        rows = [advantages[starts[i] : starts[i + 1]] for i in members]
        counted = float(sum(counts[starts[i] : starts[i + 1]].sum() for i in members))
        if counted == 0:
            continue
        for rank in range(world_size):
            own = slice(rank * share, (rank + 1) * share)
            first = len(used[rank])
            used[rank] += members[own]
            positions = tuple(range(first, len(used[rank])))
            plans[rank].append(RankMiniBatch(positions, tuple(rows[own]), counted))
    return list(zip(plans, used, strict=True))
