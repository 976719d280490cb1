# SPDX-License-Identifier: Apache-2.0
"""What a rank has of weights that FSDP shares among the ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.weights.trainable import check_some, trainable


class TrainedShards:
    """This rank's part of each trained weight of a module.

    FSDP puts gathered weights in their place for a pass, and then the same parameters back, which the optimiser has as
    well. So they are looked for once: to walk over all modules of a small model takes as long as a part of its pass.

    Args:
        module: as it is before its first pass, and divided by then.
    """

    def __init__(self, module: nn.Module):
        self._groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._held = trainable(module)

    def held(self) -> dict[str, nn.Parameter]:
        """Name -> part, in the module's order; the module holds them now.

        Without `reshard_after_forward` it may have held gathered weights, in the format of the forward, and the next
        forward would compute with those and not with what is put into the parts.

        Raises:
            WeightSyncError: nothing is trained.
        """
        for group in self._groups:
            group.reshard()
        check_some(self._held)
        return self._held

    def reduce_gradients(self, reduces: bool) -> None:
        """Whether the next backward pass makes the parts' gradients, or adds to what is gathered."""
        for group in self._groups:  # told once for all, FSDP would walk over every module
            group.set_requires_gradient_sync(reduces, recurse=False)


@torch.no_grad()  # with which a sharded tensor hands out its part: to detach it first would be DTensor's work for each
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each, [n, ...] of [N, ...], over the same memory, as plain tensors: a call that takes many
    sharded ones at once asks for each of them anew how it is shared."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [part.detach() for part in parts]
