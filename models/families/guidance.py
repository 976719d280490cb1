# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance: how a network's output with the prompt and the one without it are computed and joined."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_one_pass(
    forward: Callable[[dict[str, Any]], Tensor],
    model_inputs: dict[str, Any],
    negative_model_inputs: dict[str, Any],
    negative_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """(conditional, unconditional), each [B, ...], from one forward of both halves as one batch.

    Tensors and lists among the inputs are joined; other values must be the same for both. The order is the pipeline's:
    on some machines it decides the last bit.
    """
    first, second = negative_model_inputs, model_inputs
    if not negative_first:
        first, second = second, first
    halves = forward({name: _joined(value, second[name]) for name, value in first.items()}).chunk(2)
    return (halves[1], halves[0]) if negative_first else (halves[0], halves[1])


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    return first + second if isinstance(first, list) else first


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """u + scale (c - u), all [B, ...], in the network's number format as the pipelines do it (arXiv 2207.12598)."""
    return unconditional + scale * (conditional - unconditional)
