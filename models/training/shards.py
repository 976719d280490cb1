# SPDX-License-Identifier: Apache-2.0
"""What a rank has of weights that FSDP shares among the ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def reshard(module: nn.Module) -> None:
    """Let the module hold its shards. Without `reshard_after_forward` it may still hold gathered weights, in the format
    of the forward, and the next forward would compute with those and not with what is put into the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()  # with which a sharded tensor hands out its part: to detach it first would be DTensor's work for each
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each, [n, ...] of [N, ...], over the same memory, as plain tensors: a call that takes many
    sharded ones at once asks for each of them anew how it is shared."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [part.detach() for part in parts]
