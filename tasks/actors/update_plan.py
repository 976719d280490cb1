# SPDX-License-Identifier: Apache-2.0
"""Which samples each trainer rank takes into which optimiser step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.errors import DoubleflowError
from models.training.engine import LOG_PROB_DISTANCES
from tasks.actors.messages import BUSY_SECONDS, OldBatch, RankBatch, RankMiniBatch
from tasks.actors.rollout_group import PendingBatch
from tasks.data.pairs import PairBatch


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


SAMPLE_STEPS, FIRST_SAMPLE_STEPS, LEFT_OUT = "sample_steps", "first_sample_steps", "nonfinite_sample_steps"
COUNTS = (SAMPLE_STEPS, FIRST_SAMPLE_STEPS, LEFT_OUT, "recorded_steps", "optimizer_steps", "nonfinite_steps")
OF_RANKS = frozenset({"lr", "grad_norm", BUSY_SECONDS, *COUNTS})
"""Metrics of an update that are a rank's and no means over its samples."""


def over_ranks(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An update's metrics over the ranks: what are means over a rank's samples become means over those of all ranks,
    names ending in /max maxima, and those of `OF_RANKS` plain means.

    A rank whose samples all dropped out has no metrics of them. What is of the first optimiser step alone
    (`LOG_PROB_DISTANCES`) is weighed by that step's samples times timesteps, the others by those of all steps but the
    ones that were left out, which are in no rank's means. An engine that does not say how many it has counted has its
    ranks count alike.
    """
    names = dict.fromkeys(name for of_rank in metrics for name in of_rank)
    return {name: _over_ranks(name, [of_rank for of_rank in metrics if name in of_rank]) for name in names}


def _over_ranks(name: str, metrics: Sequence[Mapping[str, float]]) -> float:
    values = [of_rank[name] for of_rank in metrics]
    if name.endswith("/max"):
        return float(max(values))
    weights = [1.0 if name in OF_RANKS else _measured_on(name, of_rank) for of_rank in metrics]
    alike = len({*weights}) == 1  # the plain mean then: of one rank it is the value to the last bit
    return float(np.average(values, weights=None if alike else weights))


def _measured_on(name: str, of_rank: Mapping[str, float]) -> float:
    """The samples times timesteps that a rank's mean is over."""
    if name in LOG_PROB_DISTANCES:
        return of_rank.get(FIRST_SAMPLE_STEPS, 1.0)
    return of_rank.get(SAMPLE_STEPS, 1.0) - of_rank.get(LEFT_OUT, 0.0)


def plan_updates(
    batches: Sequence[PendingBatch | PairBatch],
    advantages: np.ndarray,
    mini_batch_samples: int,
    world_size: int,
    old: OldScores | None = None,
) -> list[list[RankMiniBatch]]:
    """Deal an iteration's batches to optimiser steps and ranks.

    Mini-batches are runs of whole batches in order, and within one the ranks take equal consecutive shares: a batch
    stays as it was sampled, which keeps its replayed log-probs equal to the last bit.

    Args:
        batches: the iteration's.
        advantages: [N], of the samples of all batches, NaN where missing.
        mini_batch_samples: samples of an optimiser step, over all ranks.
        world_size: ranks.
        old: the trainer's own scores; of a sample of which they reject steps the share that is left counts.

    Returns:
        For each rank its mini-batches, in order.
    """
    starts = np.concatenate([[0], np.cumsum([len(batch.keys) for batch in batches])])
    mini_batch_of = [int(start) // mini_batch_samples for start in starts[:-1]]
    plans: list[list[RankMiniBatch]] = [[] for _ in range(world_size)]
    scored: Sequence[OldBatch | None] = [None] * len(batches) if old is None else old.batches
    parts = [
        RankBatch(batch.trajectories, batch.keys, row, own)
        for batch, row, own in zip(batches, np.split(advantages, starts[1:-1]), scored, strict=True)
    ]
    counts = np.where(np.isnan(advantages), 0.0, 1.0 if old is None else old.kept())
    for number in sorted(set(mini_batch_of)):
        members = [i for i, owner in enumerate(mini_batch_of) if owner == number]
        share = len(members) // world_size
        counted = float(sum(counts[starts[i] : starts[i + 1]].sum() for i in members))
        if counted == 0:
            continue
        for rank, plan in enumerate(plans):
            own = members[rank * share : (rank + 1) * share]
            plan.append(RankMiniBatch(tuple(parts[i] for i in own), counted))
    return plans
