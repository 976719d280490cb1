# SPDX-License-Identifier: Apache-2.0
"""What each iteration draws from, where it explores and what follows it: functions of the config, seed and number."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from models.schedulers.windows import window_steps
from tasks.config.tree import TrainConfig

T = TypeVar("T")
MOST_PARTS = 20
"""As many as have their names side by side on Prefect's page."""
FEWEST_ITERATIONS = 20
"""Of a part, at whose end Prefect waits a second for the thread of its heartbeats; a run of so few has no parts."""


def parts(first: int, total: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each part of the iterations `first` to `total`; a resumed run's end where they would have."""
    size = max(-(-total // MOST_PARTS), FEWEST_ITERATIONS)
    while first <= total:
        last = min(((first - 1) // size + 1) * size, total)
        yield first, last
        first = last + 1


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


def is_saved(config: TrainConfig, iteration: int) -> bool:
    """Is a checkpoint to be written after it?"""
    return _is_last(config, iteration) or _is_nth(iteration, config.trainer.save_freq)


def is_validated(config: TrainConfig, iteration: int) -> bool:
    """Are its weights to be validated?"""
    return _is_last(config, iteration) or _is_nth(iteration, config.trainer.test_freq)


def is_exported(config: TrainConfig, iteration: int) -> bool:
    """Are weights to be registered after it, besides those of the end?"""
    return _is_nth(iteration, config.trainer.export_freq)


def is_measured(config: TrainConfig, iteration: int) -> bool:
    """Is it validated or exported, so that all of it is to be on the disk before the next one goes on?"""
    return is_exported(config, iteration) or is_validated(config, iteration)


def _is_last(config: TrainConfig, iteration: int) -> bool:
    return iteration == config.trainer.total_training_steps


def _is_nth(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0
