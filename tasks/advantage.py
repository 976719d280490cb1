"""Advantage: rewards become what the update weighs each sample with."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.algorithms import get_diffusion_adv_estimator_fn
from models.errors import DoubleflowError
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


class NothingToLearn(DoubleflowError, RuntimeError):
    """No sample of an iteration has an advantage to learn from."""


def compute_advantage(
    data: Mapping[str, Any],
    adv_estimator: str,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: DiffusionAlgoConfig | None = None,
) -> dict[str, Any]:
    """The batch with its advantages.

    A group of which fewer than two samples have their reward is dropped: there is nothing to compare.

    Args:
        data: `sample_level_rewards` [B], the weighted sum of the scores, NaN where missing; `uid` [B], equal for the
            samples of a group; where the estimator asks for them `reward_scores`, reward name -> [B], and
            `reward_weights`, reward name -> weight.
        adv_estimator: registered name of the estimator, or package.module:function.
        norm_adv_by_std_in_grpo, global_std: see `compute_flow_grpo_outcome_advantage`.
        config: `adv_mode` and `drop_equal_groups` are read; None is their defaults. The estimator gets it too.

    Returns:
        `data` with `advantages` and `returns` [B]; NaN is left out of the update.

    Raises:
        NothingToLearn: every reward is missing, or no group has two.
    """
    config = config or DiffusionAlgoConfig()
    rewards, uids = np.asarray(data["sample_level_rewards"], np.float32), np.asarray(data["uid"])
    if np.isnan(rewards).all():
        raise NothingToLearn("every reward of the iteration is missing, so there is nothing to learn from")
    alone = too_small(rewards, uids)
    if alone.all():
        raise NothingToLearn("no prompt has two samples with a reward, so there is nothing to compare and learn from")
    estimates = get_diffusion_adv_estimator_fn(adv_estimator)(
        torch.tensor(rewards),
        uids,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        global_std=global_std,
        config=config,
        reward_scores={name: torch.tensor(scores) for name, scores in data.get("reward_scores", {}).items()},
        reward_weights=data.get("reward_weights", {}),
    )
    advantages, returns = (np.where(alone, np.float32(np.nan), found.numpy()) for found in estimates)
    advantages = ADV_MODES[config.adv_mode](advantages)
    if config.drop_equal_groups:
        advantages = without_equal_groups(advantages, rewards, uids)
    return {**data, "advantages": advantages, "returns": returns}


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
    """Advantages [B] of an iteration's scores; see `compute_advantage`."""
    data = {
        "sample_level_rewards": scores.rewards,
        "uid": scores.uids,
        "reward_scores": scores.by_reward,
        "reward_weights": scores.weights,
    }
    with clock.stage("adv"):
        found = compute_advantage(data, config.adv_estimator, config.norm_adv_by_std_in_grpo, config.global_std, config)
    return found["advantages"]
