# SPDX-License-Identifier: Apache-2.0
"""Sharded weights in their whole shape, many in one exchange among the ranks."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import ceil
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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


@torch.no_grad()
def _sharing(weight: Tensor) -> Hashable:
    """What weights have in common that come in one exchange; None of one that is not dealt out by rows alone."""
    if not isinstance(weight, DTensor) or weight.device_mesh.size() == 1 or weight.placements != (Shard(0),):
        return None
    return weight.device_mesh, weight.dtype, weight.to_local().device


@torch.no_grad()  # with which a shard is handed out as it is: to detach it first is a call of DTensor's dispatch
def _whole(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight.detach()
    return (weight.to_local() if weight.device_mesh.size() == 1 else weight.full_tensor()).detach()


@torch.no_grad()
def _gathered(weights: Sequence[DTensor]) -> list[Tensor]:
    """Weights in their whole shape. Each rank has as many rows of one, and the last ranks fewer, or none."""
    mesh = weights[0].device_mesh
    rows = [ceil(weight.shape[0] / mesh.size()) for weight in weights]
    own = torch.cat([_filled(weight.to_local(), count).flatten() for weight, count in zip(weights, rows, strict=True)])
    of_all = own.new_empty(mesh.size() * own.numel())
    dist.all_gather_into_tensor(of_all, own, group=mesh.get_group())
    sizes = [count * weight.shape[1:].numel() for weight, count in zip(weights, rows, strict=True)]
    parts = of_all.view(mesh.size(), -1).split(sizes, dim=1)
    whole = [part.reshape(-1, *weight.shape[1:]) for part, weight in zip(parts, weights, strict=True)]
    # Of one row a rank it is still a view of all.
    return [one[: weight.shape[0]].contiguous() for one, weight in zip(whole, weights, strict=True)]


def _filled(rows: Tensor, count: int) -> Tensor:
    """These rows, and zeros up to so many."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])]) if len(rows) < count else rows
