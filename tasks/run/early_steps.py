# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps that are taken as soon as their own samples are scored, while the iteration's last ones still are.

A group is compared with itself alone, and a mini-batch is of whole groups, so its step needs no other's scores. The
last mini-batch is left to the update, and so is all that comes after a score that could not be got.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ray.exceptions import RayError

from models.algorithms import get_diffusion_adv_estimator_fn, get_diffusion_loss_fn
from models.algorithms.advantages import compute_flow_grpo_outcome_advantage
from models.errors import DoubleflowError
from tasks.actors.reward_group import PendingScores
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import PendingOldLogProbs
from tasks.actors.update_plan import NothingToLearn, OldScores
from tasks.actors.waiting import come_first
from tasks.config.reward import RewardConfig
from tasks.config.tree import TrainConfig
from tasks.data.pairs import PairBatch
from tasks.run.training import TrainingRun
from tasks.stages.advantage import compute_advantage

BY_SIGN = ("binary", "one_only")
"""Modes that ask which advantages are rounding, by the largest of the iteration."""


class EarlyStepMismatch(DoubleflowError, RuntimeError):
    """An early step was taken with other advantages than the iteration has: a defect of this module."""


@dataclass
class EarlySteps:
    """What of an iteration's update has begun before all of it was scored.

    Attributes:
        batches: the first so many are trained on.
        advantages: of their samples, NaN where one is left out.
        steps: that were begun; none of a mini-batch without a sample to learn from.
    """

    batches: int = 0
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    steps: int = 0

    def check(self, advantages: np.ndarray) -> None:
        """Raise EarlyStepMismatch where an iteration's advantages [N] do not begin with those that were trained on."""
        if not np.array_equal(advantages[: len(self.advantages)], self.advantages, equal_nan=True):
            raise EarlyStepMismatch(
                "early optimiser steps were taken with other advantages than the iteration has: set "
                "trainer.early_steps to false, and the same command continues"
            )

    def rest(
        self, batches: Sequence[PendingBatch | PairBatch], advantages: np.ndarray, old: OldScores | None
    ) -> tuple[Sequence[PendingBatch | PairBatch], np.ndarray, OldScores | None]:
        """What is left to train on of an iteration's batches, advantages [N] and old scores."""
        left = None if old is None else OldScores(old.batches[self.batches :], old.metrics)
        return batches[self.batches :], advantages[len(self.advantages) :], left


def can_step_early(config: TrainConfig) -> bool:
    """Does each optimiser step of an iteration need the scores of its own samples alone, and has room beside them?"""
    actor, rollout, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm
    correction, chosen = algorithm.rollout_correction, actor.diffusion_loss
    loss = get_diffusion_loss_fn(chosen.loss_mode, chosen.options)
    several = config.is_online and actor.ppo_epochs == 1 and actor.ppo_mini_batch_size < config.data.train_batch_size
    replays = loss.process == "reverse" and loss.learns_from_rewards()
    corrects = not correction.bypass_mode and (correction.rollout_is is not None or correction.rollout_rs is not None)
    has_room = not (config.trainer.one_step_off_policy or rollout.sleeps)
    alone = _compares_groups_alone(config) and _is_scored_apart(config.reward)
    return config.trainer.early_steps and several and replays and not corrects and has_room and alone


def _compares_groups_alone(config: TrainConfig) -> bool:
    """Are a group's advantages the same whatever the other groups' rewards are?"""
    algorithm = config.algorithm
    estimator = get_diffusion_adv_estimator_fn(algorithm.adv_estimator)
    over_all = algorithm.norm_adv_by_std_in_grpo and algorithm.global_std
    return estimator is compute_flow_grpo_outcome_advantage and not over_all and algorithm.adv_mode not in BY_SIGN


def _is_scored_apart(reward: RewardConfig) -> bool:
    """Do the rewards compute on other GPUs than the update, as far as the config says so?"""
    model = reward.reward_model
    return not reward.is_colocated and (model is None or not (model.sleep or 0 < model.num_gpus < 1))


def early_steps(
    run: TrainingRun, number: int, batches: Sequence[PendingBatch], replayed: PendingOldLogProbs | None
) -> EarlySteps | None:
    """A place for what `step_early` does of an iteration; None where it is to do nothing.

    Args:
        run, number: the iteration of the run; one whose update is profiled is left as it is.
        batches: its samples.
        replayed: the trainer's own log-probs, where the update is to have them.
    """
    settings, trainer = run.config.trainer, run.trainer
    if not can_step_early(run.config) or number in settings.profile.iterations:
        return None
    if replayed is None and not run.config.algorithm.rollout_correction.bypass_mode:
        return None
    mini_batches = _joined(batches, trainer.mini_batch_samples)
    uids = [{prompt.uid for batch in members for prompt in batch.prompts} for members in mini_batches]
    apart = sum(map(len, uids)) == len(set().union(*uids))  # else a group would be in two mini-batches
    return EarlySteps() if apart else None


def step_early(
    run: TrainingRun,
    steps: EarlySteps,
    batches: Sequence[PendingBatch],
    pending: PendingScores,
    replayed: PendingOldLogProbs | None,
) -> None:
    """Begin the optimiser step of each mini-batch but the last, in order, once its samples are scored.

    Not where all is scored before the old log-probs are there: then the time is theirs, and nothing is gained.
    """
    old, algorithm = None, run.config.algorithm
    if replayed is not None and not come_first(replayed.log_probs, pending.answers):
        return
    try:
        old = None if replayed is None else run.trainer.old_log_probs(replayed)[0]
        if not run.trainer.steps_early:  # asked of a rank, which answers once it has replayed
            return
    except RayError:  # it is raised anew by what is asked of the ranks next, once the scores are there and kept
        return
    for mini_batch in _joined(batches, run.trainer.mini_batch_samples)[:-1]:
        found = run.online.reward.early_rewards(mini_batch, pending, len(steps.advantages))
        if found is None:
            return
        data = {"sample_level_rewards": found[0], "uid": found[1]}
        normed = algorithm.norm_adv_by_std_in_grpo
        try:
            scaled = compute_advantage(data, algorithm.adv_estimator, normed, algorithm.global_std, algorithm)
        except NothingToLearn:  # in this mini-batch; if there is nothing in the others either, the iteration says so
            return
        advantages = scaled["advantages"]
        own = None if old is None else OldScores(old[steps.batches : steps.batches + len(mini_batch)], {})
        steps.steps += run.trainer.step_early(mini_batch, advantages, own)
        steps.batches += len(mini_batch)
        steps.advantages = np.concatenate([steps.advantages, advantages])


def _joined(batches: Sequence[PendingBatch], mini_batch_samples: int) -> list[list[PendingBatch]]:
    """The batches of each mini-batch, as `plan_updates` deals them."""
    joined: dict[int, list[PendingBatch]] = {}
    start = 0
    for batch in batches:
        joined.setdefault(start // mini_batch_samples, []).append(batch)
        start += len(batch.keys)
    return list(joined.values())
