# SPDX-License-Identifier: Apache-2.0
"""Multiplications of what denoisers are made of; an adapter's `multiplications` adds them up."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
TIME_CHANNELS = 256
"""Sines and cosines of a timestep, in most architectures."""


def model_width(config: Config) -> int:
    """The width of the residual stream."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def attention(queries: int, keys: int, width: int) -> int:
    """Scores and their weighted sum."""
    return 2 * queries * keys * width


def embedded(inputs: int, width: int) -> int:
    """One vector through two layers, to the model's width."""
    return inputs * width + width**2


def double_block(width: int, image: int, text: int) -> int:
    """Two streams with weights of their own (projections, MLP, modulation) that attend to each other."""
    return (4 + 8) * width**2 * (image + text) + 12 * width**2 + attention(image + text, image + text, width)
