"""Exponential moving average of the trained weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.engines.weights import trainable

if TYPE_CHECKING:
    from models.config import EmaConfig


class WeightAverage:
    """The average of a module's trained parameters (local shards of them, where they are sharded).

    decay_s = min((1 + s) / (10 + s), decay) after s updates, as in Flow-GRPO's evaluation copies.
    """

    def __init__(self, module: nn.Module, config: "EmaConfig"):
        self.module, self.config = module, config
        self.updates = 0
        self.shadow: dict[str, Tensor] = {n: p.detach().clone() for n, p in trainable(module).items()}

    @torch.no_grad()
    def update(self, optimizer_step: int) -> None:
        """Move the average towards the weights; acts at every `update_interval`-th optimiser step."""
        if optimizer_step % self.config.update_interval:
            return
        decay = min((1 + self.updates) / (10 + self.updates), self.config.decay)
        for name, parameter in trainable(self.module).items():
            self.shadow[name].lerp_(parameter.detach(), 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the module holds the average instead of its weights."""
        parameters = trainable(self.module)
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, parameter in trainable(self.module).items():
            parameter.copy_(values[name])
