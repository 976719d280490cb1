# SPDX-License-Identifier: Apache-2.0
"""What each iteration of a run draws from and where it explores: functions of the config, the seed and its number."""

import random
from collections.abc import Sequence
from typing import TypeVar

from models.schedulers.windows import window_steps
from tasks.config.tree import TrainConfig

T = TypeVar("T")


def part_of(items: Sequence[T], size: int, seed: int, iteration: int) -> list[T]:
    """The `size` prompts or pairs of an iteration (from 1): consecutive parts of one permutation an epoch, the
    remainder left out.

    A function of (seed, iteration) alone, so there is no cursor to lose.
    """
    epoch, part = divmod(iteration - 1, len(items) // size)
    order = list(items)
    random.Random(f"data/{seed}/{epoch}").shuffle(order)
    return order[part * size : (part + 1) * size]


def windows_of(config: TrainConfig, iteration: int, uids: Sequence[str]) -> dict[str, list[int]]:
    """Each prompt's stochastic steps in an iteration, by uid; none where finished samples are trained on."""
    if config.algorithm.trainer_type == "direct_preference":
        return {}
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    given = rollout.algo, rollout.pipeline.num_inference_steps, trainer.seed, iteration, trainer.total_training_steps
    own = rollout.algo.sde_window_per == "prompt"
    return {uid: window_steps(*given, prompt_uid=uid if own else None) for uid in uids}
