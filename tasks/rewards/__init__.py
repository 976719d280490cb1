"""Rewards: one file each, found by name; importing this package registers them all."""

from tasks.rewards import jpeg, ocr  # noqa: F401
from tasks.rewards.base import (
    Reward,
    RewardError,
    RewardResult,
    ScoredPrompt,
    check_reward,
    get_reward,
    known_rewards,
    register_reward,
    weighted_sum,
)

__all__ = [
    "Reward",
    "RewardError",
    "RewardResult",
    "ScoredPrompt",
    "check_reward",
    "get_reward",
    "known_rewards",
    "register_reward",
    "weighted_sum",
]
