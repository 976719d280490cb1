# SPDX-License-Identifier: Apache-2.0
"""A block that the backward pass computes anew: torch's own checkpointing is the oracle."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.runtime.recomputation import recomputed


class Graph:
    """It lives as long as the graph that it is kept in."""


class Noted(torch.autograd.Function):
    """The same numbers, by a node whose graph is noted."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, graphs: "list[weakref.ref[Graph]]") -> Tensor:
        ctx.graph = Graph()
        graphs.append(weakref.ref(ctx.graph))
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """As a denoiser's: it is given a tree, gives a tuple, and only its adapter learns."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.graphs: list[weakref.ref[Graph]] = []

    def forward(
        self, hidden: Tensor, text: Tensor | None, angles: dict[str, tuple[Tensor, ...]], times: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Text, hidden states, and something that needs no gradient."""
        cosine, positions = angles["rotary"]
        hidden = torch.tanh(self.frozen(hidden) + self.adapter(hidden)) * cosine[positions] * times
        hidden = Noted.apply(hidden, self.graphs)
        return (None if text is None else text + hidden), hidden, cosine + 1

    def graphs_alive(self) -> int:
        return sum(graph() is not None for graph in self.graphs)


def given(text: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden, words, cosine = torch.randn(3, 2, 4, generator=generator).unbind()
    return hidden, words if text else None, {"rotary": (cosine, torch.tensor([1, 0]))}, 2


def torchs(block: Block, *inputs: Any) -> Any:
    return checkpoint(block, *inputs, use_reentrant=False)


@pytest.mark.parametrize("learns", [False, True])
def test_loss_and_gradients_are_torchs_to_the_bit(learns: bool) -> None:
    """Of a first block's weights, also where nothing that it is given needs a gradient, of a last one's, and of what
    they are given."""
    torch.manual_seed(0)
    found, blocks = [], [Block(), Block()]
    weights = [parameter for block in blocks for parameter in block.adapter.parameters()]
    for way in (torchs, recomputed):
        hidden, text, angles, times = given()
        leaves = [tensor.requires_grad_(learns) for tensor in (hidden, text)]
        text, hidden, constant = way(blocks[0], hidden, text, angles, times)
        nothing, hidden, _ = way(blocks[1], hidden, None, angles, times)
        assert nothing is None
        assert not constant.requires_grad
        loss = hidden.square().sum() + text.sum()
        loss.backward()
        found.append([loss, *(leaf.grad for leaf in (*weights, *leaves) if leaf.grad is not None)])
        for weight in weights:
            weight.grad = None
    theirs, ours = found
    assert len(theirs) == len(ours) == 1 + len(weights) + 2 * learns
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in ours)


def test_what_a_block_would_keep_is_not_there_between_the_passes() -> None:
    blocks = [Block(), Block()]
    hidden, text, *rest = given()
    for block in blocks:
        _, hidden, _ = recomputed(block, hidden, text, *rest)
    assert [len(block.graphs) for block in blocks] == [1, 1]
    assert [block.graphs_alive() for block in blocks] == [0, 0]
    hidden.sum().backward()
    assert [len(block.graphs) for block in blocks] == [2, 2], "each was computed twice"
    kept = Block()
    _, plain, _ = kept(*given())
    assert kept.graphs_alive() == 1
    assert plain.requires_grad


@pytest.mark.parametrize("grad", [True, False])
def test_what_needs_no_gradient_has_none(grad: bool) -> None:
    block, inputs = Block().requires_grad_(False), given(text=False)
    with torch.set_grad_enabled(grad):
        _, hidden, _ = recomputed(block, *inputs)
    assert not hidden.requires_grad
    assert torch.equal(hidden, block(*inputs)[1])


def test_an_error_of_the_second_call_is_its_own() -> None:
    class Failing(Block):
        def forward(self, *inputs: Any) -> Any:
            if self.graphs:
                raise RuntimeError("the second call")
            return super().forward(*inputs)

    _, hidden, _ = recomputed(Failing(), *given())
    with pytest.raises(RuntimeError, match="the second call"):
        hidden.sum().backward()
