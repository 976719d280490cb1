# SPDX-License-Identifier: Apache-2.0
"""AdamW's moments: there from the start, and on the device or in host memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def allocate_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its moments now, as AdamW itself would at the first gradient.

    Some parameters never get one (the last joint block's text output leads nowhere); without this a checkpoint would
    lack their state, and a fresh optimiser, which has it for all, could not be loaded from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
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
