"""Classifier-free guidance: how a velocity with the prompt and one without it are computed and joined."""

from typing import Any

import torch
from torch import Tensor, nn


def in_one_pass(
    module: nn.Module, model_inputs: dict[str, Any], negative_model_inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(conditional, unconditional), each [B, ...], from one forward of the batch [negative, positive].

    Every tensor among the inputs is joined along its first dimension; other values must be the same for both.
    """
    joined = {
        name: torch.cat([negative_model_inputs[name], value]) if isinstance(value, Tensor) else value
        for name, value in model_inputs.items()
    }
    unconditional, conditional = module(**joined)[0].chunk(2)
    return conditional, unconditional


def in_two_passes(
    module: nn.Module, model_inputs: dict[str, Any], negative_model_inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(conditional, unconditional), each [B, ...], from a forward of each."""
    return module(**model_inputs)[0], module(**negative_model_inputs)[0]


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Ho & Salimans (arXiv 2207.12598): u + scale (c - u), in the network's number format as the pipelines do it."""
    return unconditional + scale * (conditional - unconditional)
