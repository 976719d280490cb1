# SPDX-License-Identifier: Apache-2.0
"""How fast the old policy follows the policy: old <- d old + (1 - d) policy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config.actor import DecaySchedule, ForwardProcessConfig

SCHEDULES: dict["DecaySchedule", tuple[int, float, float]] = {
    "copy": (0, 0.0, 0.0),
    "linear_to_0_3": (0, 0.001, 0.3),
    "linear_to_0_5": (0, 0.001, 0.5),
    "delayed_linear_to_0_999": (75, 0.0075, 0.999),
}
"""(flat, rate, hold): d is 0 for `flat` steps and then rises by `rate` a step up to `hold`. The first, third and fourth
are DiffusionNFT's (arXiv 2509.16117), the second is the average that advantage-weighted matching (2509.25050) holds
on to."""


def old_policy_decay(optimizer_steps: int, config: "ForwardProcessConfig") -> float:
    """d after so many optimiser steps."""
    if config.old_policy_decay is not None:
        return config.old_policy_decay
    flat, rate, hold = SCHEDULES[config.old_policy_decay_schedule]
    return 0.0 if optimizer_steps < flat else min((optimizer_steps - flat) * rate, hold)


def is_copied(config: "ForwardProcessConfig") -> bool:
    """Is the old policy the policy itself, to the bit, whenever an iteration is done?"""
    constant = config.old_policy_decay
    most = SCHEDULES[config.old_policy_decay_schedule][2] if constant is None else constant
    return most == 0 and config.old_policy_update_interval == 1
