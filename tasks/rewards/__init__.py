# SPDX-License-Identifier: Apache-2.0
"""Rewards: one file each, found by name; importing this package registers them all."""

from tasks.rewards import (  # noqa: F401
    brightness,
    by_data_source,
    clip,
    geneval,
    hpsv3,
    image_reward,
    ink_and_paper,
    jpeg,
    judge,
    ocr,
    remote,
    shapes,
    tesseract,
)
from tasks.rewards.base import (
    NOT_FINITE,
    Input,
    Reward,
    RewardResult,
    asks_reward_model,
    check_reward,
    get_reward,
    known_rewards,
    register_reward,
    reward_bounds,
    reward_input,
    weighted_sum,
    with_group_means,
)
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

__all__ = [
    "NOT_FINITE",
    "Input",
    "Reward",
    "RewardError",
    "RewardResult",
    "ScoredPrompt",
    "asks_reward_model",
    "check_reward",
    "get_reward",
    "known_rewards",
    "register_reward",
    "reward_bounds",
    "reward_input",
    "weighted_sum",
    "with_group_means",
]
