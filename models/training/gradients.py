# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights of which some are sharded and a few whole on every rank."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from models.errors import DoubleflowError
from models.training.shards import local_tensors

SMALLEST_NORM = 1e-6
"""Added to the norm that gradients are divided by, as `torch.nn.utils.clip_grad_norm_` does."""


class GradientNotFinite(DoubleflowError, RuntimeError):
    """More optimiser steps in a row than may be left out have a gradient that is NaN or infinite."""


class NonfiniteSteps:
    """Optimiser steps whose gradient is not finite.

    Args:
        allowed: so many in a row are left out.

    Attributes:
        in_a_row: how many there were since the last step that was made.
    """

    def __init__(self, allowed: int):
        self.allowed, self.in_a_row = allowed, 0

    def leave_out(self, norm: float, step: int) -> None:
        """Count one.

        Args:
            norm: the gradient's.
            step: how many steps were made before it.

        Raises:
            GradientNotFinite: there were `allowed` before it in a row.
        """
        if self.in_a_row < self.allowed:
            self.in_a_row += 1
            return
        before, more = "", ""
        if self.allowed:
            before = f", as it was the {self.allowed} times before that trainer.max_nonfinite_steps allows"
            more = " and a higher trainer.max_nonfinite_steps"
        raise GradientNotFinite(
            f"the gradient norm of optimiser step {step} is {norm}{before}. Look at the samples and rewards of this "
            "iteration: started again, the run meets the same ones. It leaves such steps out with trainer.on_nonfinite "
            f"skip{more}. Another optim.lr makes another run, which model.initial_weights lets start from this one's "
            "weights"
        )


def average_whole(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients of weights that are not sharded those of all ranks, as FSDP does for the others: their mean.

    Every rank makes the call, with gradients for the same weights.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale the gradients down to a norm of at most `largest`; the norm before, over all weights and ranks (scalar).

    `torch.nn.utils.clip_grad_norm_` takes sharded or whole weights, not both at once.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = local_tensors(gradient for gradient in gradients if isinstance(gradient, DTensor))
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = []
    if sharded:
        square = get_total_norm(sharded).square()
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        norms.append(square.sqrt())
    if whole:
        norms.append(get_total_norm(whole))
    if not norms:
        return torch.tensor(0.0)
    total = norms[0] if len(norms) == 1 else torch.stack([norm.to(norms[-1].device) for norm in norms]).norm()
    scale = (largest / (total + SMALLEST_NORM)).clamp(max=1.0)
    for part in (sharded, whole):
        if part:
            torch._foreach_mul_(part, scale.to(part[0].device))
    return total
