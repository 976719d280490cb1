# SPDX-License-Identifier: Apache-2.0
"""AdamW over what a rank has of the weights, and where its moments are: there from the start, on the device or in host
memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models.training.shards import local_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalAdamW(torch.optim.AdamW):
    """AdamW whose step takes this rank's part of each weight as a plain tensor.

    An element's step needs no other element, so the numbers are the same; a sharded tensor's own calls cost the
    processor ten times a small weight's arithmetic. And of weights of which some are sharded and a few whole, torch
    steps over all at once on CUDA, which it refuses to do as they are. `param_groups` and `state` hold the sharded
    tensors, as checkpoints need them.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # weights, gradients, moments, steps
            tensors[:] = local_tensors(tensors)
        return has_complex

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base's, but in one kernel or in several as this was made, not as whoever saved the state."""
        own = [group["fused"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, fused in zip(self.param_groups, own, strict=True):
            group["fused"] = fused


def allocate_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its moments now, as AdamW itself would at the first gradient.

    Some parameters never get one (the last joint block's text output leads nowhere); without this a checkpoint would
    lack their state, and a fresh optimiser, which has it for all, could not be loaded from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def offload_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Move the moments to host memory."""
    _move(optimizer, lambda parameter: torch.device("cpu"))


@contextmanager
def adam_state_on_device(optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Within the block the moments are where their parameters are; outside of it in host memory."""
    _move(optimizer, lambda parameter: parameter.device)
    try:
        yield
    finally:
        offload_adam_state(optimizer)


def _move(optimizer: torch.optim.AdamW, place: Callable[[torch.Tensor], torch.device]) -> None:
    for parameter, state in optimizer.state.items():
        for name in MOMENTS:
            state[name] = state[name].to(place(parameter))
