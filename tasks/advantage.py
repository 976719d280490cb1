"""Advantage: rewards become what the update weighs each sample with."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.algorithms import get_diffusion_adv_estimator_fn
from tasks.clock import Stopwatch
from tasks.config import DiffusionAlgoConfig
from tasks.reward import Scores

ADV_MODES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "continuous": lambda a: a,
    "positive_only": lambda a: np.maximum(a, 0),
    "negative_only": lambda a: np.minimum(a, 0),
    "one_only": lambda a: np.where(np.isnan(a), a, a > 0).astype(a.dtype),
    "binary": np.sign,
}
"""What DiffusionNFT may keep of an advantage (arXiv 2509.16117); NaN stays NaN."""


class NothingToLearn(RuntimeError):
    """No sample of an iteration has an advantage to learn from."""


def compute_advantage(
    rewards: np.ndarray,
    uids: np.ndarray,
    config: DiffusionAlgoConfig,
    reward_scores: Mapping[str, np.ndarray],
    reward_weights: Mapping[str, float],
) -> np.ndarray:
    """Advantages [B]; NaN is left out of the update.

    Args:
        rewards: [B], the weighted sum of the scores.
        uids: [B]; the samples of equal uids are a group.
        config: estimator and its settings.
        reward_scores: reward name -> [B].
        reward_weights: reward name -> weight.

    A group of which fewer than two samples have their reward is dropped: there is nothing to compare.

    Raises:
        NothingToLearn: every reward is missing, or no group has two.
    """
    if np.isnan(rewards).all():
        raise NothingToLearn("every reward of the iteration is missing, so there is nothing to learn from")
    alone = too_small(rewards, uids)
    if alone.all():
        raise NothingToLearn("no prompt has two samples with a reward, so there is nothing to compare and learn from")
    estimator = get_diffusion_adv_estimator_fn(config.adv_estimator)
    advantages, _ = estimator(
        torch.tensor(rewards),
        uids,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        global_std=config.global_std,
        config=config,
        reward_scores={name: torch.tensor(scores) for name, scores in reward_scores.items()},
        reward_weights=reward_weights,
    )
    result = ADV_MODES[config.adv_mode](np.where(alone, np.float32(np.nan), advantages.numpy()))
    return without_equal_groups(result, rewards, uids) if config.drop_equal_groups else result


def too_small(rewards: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Mask [B] of the samples whose group has fewer than two rewards that are not missing."""
    present: dict[str, int] = {}
    for uid, missing in zip(uids, np.isnan(rewards), strict=True):
        present[uid] = present.get(uid, 0) + int(not missing)
    return np.array([present[uid] < 2 for uid in uids])


def without_equal_groups(advantages: np.ndarray, rewards: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Advantages [B] with NaN for the samples of groups whose present rewards are all equal."""
    kept = advantages.copy()
    for uid in np.unique(uids):
        group = uids == uid
        if np.unique(rewards[group & ~np.isnan(rewards)]).size <= 1:
            kept[group] = np.nan
    return kept


@task(name="advantage", cache_policy=NO_CACHE, persist_result=False)
def advantage(clock: Stopwatch, scores: Scores, config: DiffusionAlgoConfig) -> np.ndarray:
    """See `compute_advantage`."""
    with clock.stage("adv"):
        return compute_advantage(scores.rewards, scores.uids, config, scores.by_reward, scores.weights)
