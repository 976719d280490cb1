# SPDX-License-Identifier: Apache-2.0
"""Sharded weights in their whole shape, many in one exchange among the ranks."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import ceil
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from models.training.shards import local_tensors

AT_ONCE = 64 * 2**20
"""Bytes of weights that one exchange brings. An exchange costs a rank about a millisecond of its processor, so that of
hundreds of small weights it is the calls that take the time, not the bytes."""


def whole_weights(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each weight, in the order given, of its whole shape and without gradient, where its shard is;
    every rank must take all. The only shard of a weight is the weight itself, and not copied."""
    for group in _groups(parameters):
        weights = list(group.values())
        shared = _sharing(weights[0]) is not None
        whole = _gathered(cast("list[DTensor]", weights)) if shared else [_whole(weight) for weight in weights]
        yield from zip(group, whole, strict=True)


def _groups(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Weights that follow each other and come in one exchange; one alone where it comes in none, or by itself."""
    group: dict[str, Tensor] = {}
    size, kind = 0, None
    for name, weight in weights.items():
        own = _sharing(weight)
        if group and (own is None or own != kind or size + weight.nbytes > AT_ONCE):
            yield group
            group, size = {}, 0
        group[name] = weight
        size, kind = size + weight.nbytes, own
    if group:
        yield group


def _sharing(weight: Tensor) -> Hashable:
    """What weights have in common that come in one exchange; None of one that is not dealt out by rows alone."""
    if not isinstance(weight, DTensor) or weight.device_mesh.size() == 1 or weight.placements != (Shard(0),):
        return None
    return weight.device_mesh, weight.dtype, local_tensors([weight])[0].device


@torch.no_grad()
def _whole(weight: Tensor) -> Tensor:
    if isinstance(weight, DTensor) and weight.device_mesh.size() > 1:
        return weight.full_tensor()
    return local_tensors([weight])[0]


def _gathered(weights: Sequence[DTensor]) -> list[Tensor]:
    """Weights in their whole shape. Each rank has as many rows of one, and the last ranks fewer, or none."""
    mesh = weights[0].device_mesh
    rows = [ceil(weight.shape[0] / mesh.size()) for weight in weights]
    parts = zip(local_tensors(weights), rows, strict=True)
    own = torch.cat([_filled(part, count).flatten() for part, count in parts])
    of_all = own.new_empty(mesh.size() * own.numel())
    dist.all_gather_into_tensor(of_all, own, group=mesh.get_group())
    sizes = [count * weight.shape[1:].numel() for weight, count in zip(weights, rows, strict=True)]
    of_each = of_all.view(mesh.size(), -1).split(sizes, dim=1)
    whole = [part.reshape(-1, *weight.shape[1:]) for part, weight in zip(of_each, weights, strict=True)]
    # Of one row a rank it is still a view of all.
    return [one[: weight.shape[0]].contiguous() for one, weight in zip(whole, weights, strict=True)]


def _filled(rows: Tensor, count: int) -> Tensor:
    """These rows, and zeros up to so many."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])]) if len(rows) < count else rows
