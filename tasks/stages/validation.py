# SPDX-License-Identifier: Apache-2.0
"""Validation: the same held-out prompts and the same noise for every checkpoint, so that differences are paired."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from PIL import Image

from models.config.pipeline import DiffusionPipelineConfig
from tasks.actors.reward_group import RewardGroup, not_finite
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.waiting import get
from tasks.data.prompts import Prompt
from tasks.records.pictures import grid
from tasks.stages.stage import stage

GRID_PICTURES = 48
VALIDATION_ITERATION, VALIDATION_SEED = -1, 0
"""Validation's noise keys, the same for every run: two sets of weights can be compared picture by picture."""


@dataclass(frozen=True)
class Validation:
    """What one set of weights achieves on the held-out prompts.

    Attributes:
        samples: one row a picture, see `Scores`.
        pictures: uint8 [N, H, W, 3], or [N, F, H, W, 3] of video, in the rows' order.
        rewards: the rewards' names.
    """

    samples: pd.DataFrame
    pictures: np.ndarray
    rewards: tuple[str, ...]

    @property
    def reward(self) -> float:
        """Mean trained reward; missing ones left out."""
        return float(self.samples["reward"].mean())

    def metrics(self) -> dict[str, float]:
        """val/<column>/mean of the reward and of every numeric detail, how many rewards are missing, and of how many
        samples because they are not finite."""
        numbers = self.samples.drop(columns="sample_index").select_dtypes("number")
        means = {f"val/{name}/mean": float(value) for name, value in numbers.mean().dropna().items()}
        columns = ("reward", *(f"reward/{name}" for name in self.rewards))
        missing = {f"val/{name}/missing": float(self.samples[name].isna().sum()) for name in columns}
        return means | missing | {"val/rollout/not_finite": not_finite(self.samples)}

    @cached_property
    def sheet(self) -> Image.Image:
        """Picture 0 of the first `GRID_PICTURES` prompts, side by side."""
        first = np.flatnonzero(self.samples["sample_index"].to_numpy() == 0)[:GRID_PICTURES]
        return grid(self.pictures[first])


@stage("testing", "validate")
def draw_and_score(
    rollout: RolloutGroup,
    reward: RewardGroup,
    prompts: Sequence[Prompt],
    n: int,
    pipeline: DiffusionPipelineConfig,
    seed: int = VALIDATION_SEED,
) -> Validation:
    """Sample every prompt `n` times by the ODE and score the pictures, which are drawn for the record in any case.

    Args:
        seed: names the noise.
    """
    batches = rollout.submit(prompts, n, VALIDATION_ITERATION, window=(), pipeline=pipeline, seed=seed, draw=True)
    pending = reward.submit(batches, training=False)
    get([batch.seconds for batch in batches])  # a sampling error is raised here, and is no reward's
    scores = reward.table(batches, pending)
    pictures = np.concatenate(get([batch.pictures for batch in batches if batch.pictures is not None]))
    return Validation(scores.samples, pictures, tuple(scores.weights))
