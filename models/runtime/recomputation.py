# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing: a block computed anew in the backward pass, in place of keeping what its backward needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Block = Callable[..., Any]
TENSOR = object()
"""In the place of a tensor among what a block is given."""


def recomputed(block: Block, *arguments: Any, **named: Any) -> Any:
    """What the block gives; of tensors only those that it is given are kept for the backward pass.

    For diffusers' `enable_gradient_checkpointing`, where only LoRA is trained and FSDP is not called around each block.
    By torch's own checkpointing without reentry every tensor that the block would have kept passes through Python, on
    its way there and back, some eighty of a compiled one: a fifth of what the host does in an update, for which a small
    model's GPU waits. Here a block is one node of the graph, whose backward calls it again and goes through what that
    made (Chen et al. 2016, arXiv 1604.06174, section 3). The gradients are the same to the bit but where sums have
    another order: of what several blocks are given, whose shares each sums up first, and in fp32 of weights that a pass
    calls twice, as with guidance: torch adds both parts to each other first, and this each to what is there. Random
    numbers are not drawn again as they were: no family's block draws any.

    Args:
        block: whose own weights get their gradients as always.
        arguments, named: tensors, and trees of tensors and anything else.
    """
    leaves, given = tree_flatten((arguments, named))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    call = _Call(block, given, [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    # A first block of frozen weights with LoRA is given nothing that needs a gradient, and yet has some to learn.
    learns = torch.empty(0, requires_grad=torch.is_grad_enabled())
    return call.tree_of(_Recomputed.apply(call, learns, *tensors))


@dataclass
class _Call:
    """A block's call without its tensors, which autograd keeps and frees."""

    block: Block
    given: TreeSpec
    leaves: Sequence[Any]
    made: TreeSpec | None = None

    def outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The leaves of what the block gives for these tensors, with the graph that made them."""
        following = iter(tensors)
        filled = [next(following) if leaf is TENSOR else leaf for leaf in self.leaves]
        arguments, named = tree_unflatten(filled, self.given)
        with torch.enable_grad():
            leaves, self.made = tree_flatten(self.block(*arguments, **named))
        return leaves

    def tree_of(self, leaves: Sequence[Any]) -> Any:
        """What the block gives, of its leaves."""
        assert self.made is not None
        return tree_unflatten([*leaves], self.made)


class _Recomputed(torch.autograd.Function):
    """A block's call as one node."""

    @staticmethod
    def forward(ctx: Any, call: _Call, learns: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        found = call.outputs(_leaves(ctx, tensors))
        alone = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found]
        pairs = zip(alone, found, strict=True)
        ctx.mark_non_differentiable(
            *[one for one, leaf in pairs if isinstance(leaf, Tensor) and not leaf.requires_grad]
        )
        return tuple(alone)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = _leaves(ctx, ctx.saved_tensors)
        pairs = zip(ctx.call.outputs(tensors), gradients, strict=True)
        reached = [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
        torch.autograd.backward([leaf for leaf, _ in reached], [gradient for _, gradient in reached])
        return None, None, *(tensor.grad for tensor in tensors)


def _leaves(ctx: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers as leaves of a graph of their own, which need a gradient where they do outside."""
    needed = ctx.needs_input_grad[2:]
    return [tensor.detach().requires_grad_(needs) for tensor, needs in zip(tensors, needed, strict=True)]
