# SPDX-License-Identifier: Apache-2.0
"""Copies of the trained weights: a moving average for evaluation, and the old policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.training.shards import TrainedShards, local_tensors

if TYPE_CHECKING:
    from models.config.actor import EmaConfig


class WeightCopy:
    """A second set of a module's trained parameters (local shards of them, where they are sharded)."""

    def __init__(self, trained: TrainedShards):
        self._trained = trained
        self.shadow: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in trained.held().items()}

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """copy <- decay copy + (1 - decay) weights."""
        copies, weights = local_tensors(self.shadow.values()), local_tensors(self._trained.held().values())
        if decay == 0:
            torch._foreach_copy_(copies, weights)
        else:
            torch._foreach_lerp_(copies, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the module holds the copy instead of its weights."""
        kept = [weight.clone() for weight in local_tensors(self._trained.held().values())]
        self._put(local_tensors(self.shadow.values()))
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, parts: list[Tensor]) -> None:
        torch._foreach_copy_(local_tensors(self._trained.held().values()), parts)


class WeightAverage(WeightCopy):
    """Exponential moving average: decay_s = min((1 + s) / (10 + s), decay) after s optimiser steps.

    The ramp is that of `EMAModuleWrapper` in github.com/yifan123/flow_grpo, flow_grpo/ema.py: it counts the optimiser
    steps, also those between two moves of the average.
    """

    def __init__(self, trained: TrainedShards, config: "EmaConfig"):
        super().__init__(trained)
        self.config = config

    def update(self, optimizer_step: int) -> None:
        """Move the average towards the weights; acts at every `update_interval`-th optimiser step.

        Args:
            optimizer_step: how many have been made, the last one included.
        """
        if optimizer_step % self.config.update_interval == 0:
            self.follow(min((1 + optimizer_step) / (10 + optimizer_step), self.config.decay))
