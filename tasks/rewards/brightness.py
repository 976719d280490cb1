# SPDX-License-Identifier: Apache-2.0
"""Brightness as a reward: the smallest there is, and one that a policy learns in a few iterations."""

from collections.abc import Sequence

import numpy as np

from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.scored_prompt import ScoredPrompt
from tasks.rewards.statistics import luma


@register_reward("brightness")
class Brightness(Reward):
    """Mean luma (ITU-R BT.601) of the picture: 0 is black, 1 is white."""

    version = "1"
    bounds = (0.0, 1.0)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """The prompts do not matter."""
        return RewardResult(np.array([luma(image).mean() for image in images], dtype=np.float32))
