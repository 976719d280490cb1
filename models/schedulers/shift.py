# SPDX-License-Identifier: Apache-2.0
"""Shifts of a schedule that depend on the picture's size."""

from collections.abc import Mapping
from typing import Any


def image_shift(config: Mapping[str, Any], tokens: int) -> float:
    """mu of the dynamic shift: a line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).

    Args:
        config: the scheduler's.
        tokens: image tokens that the denoiser sees.
    """
    slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
    return tokens * slope + (config["base_shift"] - slope * config["base_image_seq_len"])


def size_and_steps_shift(tokens: int, steps: int) -> float:
    """mu of FLUX.2's schedule, which depends on the number of steps too.

    A line through what was fitted for 10 steps and for 200; large pictures have the latter's whatever the steps
    (`compute_empirical_mu` of black-forest-labs/flux2 and of diffusers, where the fits' numbers are from).

    Args:
        tokens: image tokens that the denoiser sees.
        steps: of the schedule.
    """
    many = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return many
    few = 8.73809524e-05 * tokens + 1.89833333
    slope = (many - few) / (200 - 10)
    return slope * steps + (many - 200 * slope)
