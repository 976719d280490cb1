# SPDX-License-Identifier: Apache-2.0
"""LoRA's A matrices of one stream's queries, keys and values in one matrix product.

The three are narrow: their products take as long as reading their input does, which is then read once for all three,
and has one gradient from them in place of three that are added. Weights stay where they are, under their names: the
matrices are joined where they are used, which moves a few hundred KB. The frozen ones stay apart. They are wide, and
slices of one wide product are slow to read: of Stable Diffusion 3.5 on an H200 their norms lost twice what the products
saved.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.families.base import DiffusionModelBase

STREAM = ("to_q", "to_k", "to_v")


def fuse_projections(adapter: type[DiffusionModelBase], module: nn.Module) -> None:
    """Have the attention layers of the repeated blocks give LoRA's A matrices of a stream one product, in place.

    The processors stay diffusers' own: they are given an attention layer whose projections are computed already.

    Raises:
        ValueError: the family does not say that it projects each stream from one tensor.
    """
    if not adapter.projects_streams:
        raise ValueError(not_fused(adapter))
    for block in adapter.transformer_blocks(module):
        for layer in list(block.modules()):
            if isinstance(getattr(layer, STREAM[0], None), nn.Module) and hasattr(layer, "processor"):
                processor: Any = layer.processor
                fused = object.__new__(_fused_kind(type(processor)))
                fused.__dict__ |= processor.__dict__
                layer.processor = fused


def not_fused(adapter: type[DiffusionModelBase]) -> str:
    """What is said to whoever asks for it with a family that cannot."""
    return (
        f"model.fuse_projections is true, but {adapter.__name__} does not say that its queries, keys and values are "
        "made of the same tensor (projects_streams): set it to false"
    )


_FUSED: dict[type[Any], type[Any]] = {}


def _fused_kind(kind: type[Any]) -> type[Any]:
    """One class for all layers of a kind: compiled code is chosen by it."""
    if kind not in _FUSED:
        _FUSED[kind] = _new_kind(kind)
    return _FUSED[kind]


def _new_kind(kind: type[Any]) -> type[Any]:
    original = kind.__call__

    @wraps(original)  # diffusers asks for the signature and passes nothing that is not in it
    def call(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        projected = _Projected(attn, hidden_states, encoder_hidden_states)
        return original(self, projected, hidden_states, encoder_hidden_states, *rest, **named)

    return type(f"Fused{kind.__name__}", (kind,), {"__call__": call})


class _Projected:
    """An attention layer as its processor sees it, with the projections of its streams made beforehand."""

    def __init__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None):
        self.attn = attn
        self.own = project([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        if encoder_hidden_states is not None:
            self.added = project([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj], encoder_hidden_states)

    def to_q(self, hidden_states: Tensor) -> Tensor:
        return self.own[0]

    def to_k(self, hidden_states: Tensor) -> Tensor:
        return self.own[1]

    def to_v(self, hidden_states: Tensor) -> Tensor:
        return self.own[2]

    def add_q_proj(self, encoder_hidden_states: Tensor) -> Tensor:
        return self.added[0]

    def add_k_proj(self, encoder_hidden_states: Tensor) -> Tensor:
        return self.added[1]

    def add_v_proj(self, encoder_hidden_states: Tensor) -> Tensor:
        return self.added[2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn, name)


def project(layers: Sequence[Any], tensor: Tensor) -> list[Tensor]:
    """What each of the linear layers, with LoRA or without, makes of the tensor [..., K]."""
    outputs: list[Tensor] = [getattr(layer, "base_layer", layer)(tensor) for layer in layers]
    adapted = [place for place, layer in enumerate(layers) if _adapts(layer)]
    if not adapted:
        return outputs
    down = [layers[place].lora_A[_adapter(layers[place])].weight for place in adapted]
    low = functional.linear(tensor.to(down[0].dtype), torch.cat(down)).split([len(matrix) for matrix in down], -1)
    for place, reduced in zip(adapted, low, strict=True):
        layer = layers[place]
        up, scaling = layer.lora_B[_adapter(layer)].weight, layer.scaling[_adapter(layer)]
        outputs[place] = (outputs[place] + functional.linear(reduced, up) * scaling).to(outputs[place].dtype)
    return outputs


def _adapts(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and not layer.disable_adapters


def _adapter(layer: Any) -> str:
    return layer.active_adapters[0]
