# SPDX-License-Identifier: Apache-2.0
"""The shift of a schedule that depends on the picture's size."""

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
