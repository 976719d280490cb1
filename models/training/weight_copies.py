# SPDX-License-Identifier: Apache-2.0
"""Copies of the trained weights: a moving average for evaluation, and the old policy."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.weights.trainable import named, trainable

if TYPE_CHECKING:
    from models.config.actor import EmaConfig


def reshard(module: nn.Module) -> None:
    """Let the module hold its shards. Without `reshard_after_forward` it may still hold gathered weights, in the format
    of the forward, and the next forward would compute with those and not with what is put into the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of weights, as plain tensors: for calls that take many at once."""
    plain = [tensor.detach() for tensor in tensors]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in plain]


class WeightCopy:
    """A second set of a module's trained parameters (local shards of them, where they are sharded)."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.shadow: dict[str, Tensor] = {n: p.detach().clone() for n, p in trainable(module).items()}

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """copy <- decay copy + (1 - decay) weights."""
        copies, weights = _local(self.shadow.values()), _local(self._parameters().values())
        if decay == 0:
            torch._foreach_copy_(copies, weights)
        else:
            torch._foreach_lerp_(copies, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the module holds the copy instead of its weights."""
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters().items()}
        self._put(self.shadow)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        parameters = self._parameters()
        torch._foreach_copy_(_local(parameters.values()), _local(values[name] for name in parameters))

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The trained shards."""
        reshard(self.module)
        return named(self.module, self.shadow)


class WeightAverage(WeightCopy):
    """Exponential moving average: decay_s = min((1 + s) / (10 + s), decay) after s optimiser steps.

    The ramp is that of `EMAModuleWrapper` in github.com/yifan123/flow_grpo, flow_grpo/ema.py: it counts the optimiser
    steps, also those between two moves of the average.
    """

    def __init__(self, module: nn.Module, config: "EmaConfig"):
        super().__init__(module)
        self.config = config

    def update(self, optimizer_step: int) -> None:
        """Move the average towards the weights; acts at every `update_interval`-th optimiser step.

        Args:
            optimizer_step: how many have been made, the last one included.
        """
        if optimizer_step % self.config.update_interval == 0:
            self.follow(min((1 + optimizer_step) / (10 + optimizer_step), self.config.decay))
