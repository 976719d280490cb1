# SPDX-License-Identifier: Apache-2.0
"""Advantage: rewards become what the update weighs each sample with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from models.algorithms import compute_gdpo_outcome_advantage, get_diffusion_adv_estimator_fn
from models.algorithms.advantages import has_reward
from models.registry import WrongAnswer
from tasks.actors.reward_group import Scores
from tasks.actors.update_plan import NothingToLearn
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.stages.stage import stage

ROUNDING = np.float32(1e-6)
"""Of the largest advantage: less of one is what float32 leaves of a sample that has its group's mean, where rewards are
not many times as large as they differ (22.2 and 22.4 leave more)."""


def _sign(advantages: np.ndarray) -> np.ndarray:
    """-1, 0 or 1; 0 also of what rounding alone has made of 0, and NaN of NaN."""
    least = ROUNDING * np.nanmax(np.abs(advantages))
    return np.sign(np.where(np.abs(advantages) <= least, np.zeros_like(advantages), advantages))


ADV_MODES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "continuous": lambda a: a,
    "positive_only": lambda a: np.maximum(a, 0),
    "negative_only": lambda a: np.minimum(a, 0),
    "one_only": lambda a: np.maximum(_sign(a), 0),
    "binary": _sign,
}
"""What DiffusionNFT may keep of an advantage (arXiv 2509.16117); NaN stays NaN."""


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
        data: `sample_level_rewards`, the weighted sum of the scores, [B], [B, 1] or [B, T], not finite where missing;
            `uid` [B], equal for the samples of a group; where the estimator asks for them `reward_scores`, reward name
            -> [B], and `reward_weights`, reward name -> weight.
        adv_estimator: registered name of the estimator, or package.module:function.
        norm_adv_by_std_in_grpo, global_std: see `compute_flow_grpo_outcome_advantage`.
        config: `adv_options`, `adv_mode`, `drop_equal_groups` and `best_worst_k` are read; None is their
            defaults. The estimator gets it too.

    Returns:
        `data` with `advantages` and `returns` of the rewards' shape; NaN is left out of the update. All are NaN only
        where `drop_equal_groups` dropped every group: such an iteration has no update.

    Raises:
        NothingToLearn: every reward is missing, no group has two, or the estimator gives no finite advantage; the
            message names the rewards.
        WrongAnswer: the estimator gave no two tensors of the rewards' shape.
    """
    config = config or DiffusionAlgoConfig()
    rewards, uids, present = _counted(data, config.best_worst_k)
    alone = too_small(present, uids)
    if alone.all():
        raise NothingToLearn(
            f"no prompt has two samples with a reward{_missing(data)}, so there is nothing to compare and learn from"
        )
    estimator, scores = get_diffusion_adv_estimator_fn(adv_estimator), data.get("reward_scores", {})
    estimates = estimator(
        torch.tensor(rewards),
        uids,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        global_std=global_std,
        config=config,
        reward_scores={name: torch.tensor(values) for name, values in scores.items()},
        reward_weights=data.get("reward_weights", {}),
        **config.adv_options,
    )
    advantages, returns = (_finite(found, ~alone) for found in _of_rewards(estimates, rewards, adv_estimator))
    if np.isnan(advantages).all():
        raise NothingToLearn(
            f"algorithm.adv_estimator {adv_estimator} gives no sample of the iteration a finite advantage"
            f"{_missing(data)}, so there is nothing to learn from"
        )
    advantages = ADV_MODES[config.adv_mode](advantages)
    if config.drop_equal_groups:
        compared = [rewards]
        if estimator is compute_gdpo_outcome_advantage:  # it compares each reward by itself, and never their sum
            weights = data["reward_weights"]
            compared = [np.asarray(values) for name, values in scores.items() if weights[name] != 0]
        advantages = without_equal_groups(advantages, compared, present, uids)
    return {**data, "advantages": advantages, "returns": returns}


def _counted(data: Mapping[str, Any], best_worst_k: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards [B], [B, 1] or [B, T], NaN where none is there or the sample is not chosen; uids [B]; mask [B] of the
    samples that count). Raises NothingToLearn where every reward is missing."""
    rewards, uids = np.asarray(data["sample_level_rewards"], np.float32), np.asarray(data["uid"])
    rewards = np.where(np.isfinite(rewards), rewards, np.float32(np.nan))
    present = has_reward(torch.tensor(rewards), uids).numpy()
    if not present.any():
        raise NothingToLearn(
            f"every reward of the iteration is missing{_missing(data)}, so there is nothing to learn from"
        )
    if best_worst_k is not None:
        present = best_and_worst(rewards, present, uids, best_worst_k)
        rewards[~present] = np.nan
    return rewards, uids, present


def _of_rewards(estimates: Any, rewards: np.ndarray, adv_estimator: str) -> list[np.ndarray]:
    """(advantages, returns), as an estimator gave them, each of the rewards' shape [B], [B, 1] or [B, T]."""
    what = f"algorithm.adv_estimator is {adv_estimator!r}, which returned"
    if not isinstance(estimates, tuple | list) or len(estimates) != 2:
        given = f"{len(estimates)} values" if isinstance(estimates, tuple | list) else f"a {type(estimates).__name__}"
        raise WrongAnswer(f"{what} {given}: return two tensors, advantages and returns")
    for name, found in zip(("advantages", "returns"), estimates, strict=True):
        if not isinstance(found, torch.Tensor) or found.shape != rewards.shape:
            wrong = str(tuple(found.shape)) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise WrongAnswer(f"{what} {name} {wrong}: return a tensor of the rewards' shape {rewards.shape}")
    return [found.numpy() for found in estimates]


def _finite(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Values [B] or [B, T] with NaN for what is not finite and for the samples that are not kept, a mask [B]."""
    rows = kept.reshape(-1, *[1] * (values.ndim - 1))
    return np.where(rows & np.isfinite(values), values, np.float32(np.nan))


def _missing(data: Mapping[str, Any]) -> str:
    """What an error says of each reward with a weight, as in " (ocr: 3 of 16 missing, taste: 0 of 16 missing)"."""
    weights = data.get("reward_weights", {})
    scores = {name: np.asarray(values) for name, values in data.get("reward_scores", {}).items() if weights.get(name)}
    counts = [f"{name}: {(~np.isfinite(values)).sum()} of {len(values)} missing" for name, values in scores.items()]
    return f" ({', '.join(counts)})" if counts else ""


def too_small(present: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Mask [B] of the samples whose group has fewer than two samples that are present, a mask [B]."""
    counts: dict[str, int] = {}
    for uid, there in zip(uids, present, strict=True):
        counts[uid] = counts.get(uid, 0) + int(there)
    return np.array([counts[uid] < 2 for uid in uids])


def best_and_worst(rewards: np.ndarray, present: np.ndarray, uids: np.ndarray, k: int) -> np.ndarray:
    """Mask [B] of the k best and the k worst present samples of each group; all of a group that has no more than 2k.

    The selection of Sol-RL (arXiv 2604.06916), whose other half, exploring in four bits, is not here. As in its public
    code it comes before the advantages, so that their mean and deviation are those of the selected. Among equal rewards
    the earlier sample is the worse one, so that the choice does not depend on anything but the samples.

    Args:
        rewards: [B] or [B, T], of which the mean over the steps counts.
        present: [B], which have a reward.
        uids: [B], the groups.
    """
    kept, whole = present.copy(), rewards.reshape(len(rewards), -1).mean(1)
    for uid in np.unique(uids):
        group = np.flatnonzero((uids == uid) & present)
        if len(group) > 2 * k:
            kept[group[np.argsort(whole[group], kind="stable")[k:-k]]] = False
    return kept


def without_equal_groups(
    advantages: np.ndarray, compared: Sequence[np.ndarray], present: np.ndarray, uids: np.ndarray
) -> np.ndarray:
    """Advantages [B] with NaN for the samples of groups whose present samples tie in each of the compared rewards."""
    kept = advantages.copy()
    for uid in np.unique(uids):
        group = uids == uid
        own = [values[group & present] for values in compared]
        if all(np.unique(values[np.isfinite(values)]).size <= 1 for values in own):
            kept[group] = np.nan
    return kept


@stage("adv", "advantage")
def advantage(scores: Scores, config: DiffusionAlgoConfig) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of an iteration's scores, [B] each; see `compute_advantage`."""
    data = {
        "sample_level_rewards": scores.rewards,
        "uid": scores.uids,
        "reward_scores": scores.by_reward,
        "reward_weights": scores.weights,
    }
    found = compute_advantage(data, config.adv_estimator, config.norm_adv_by_std_in_grpo, config.global_std, config)
    return found["advantages"], found["returns"]


def alike(scores: Scores) -> np.ndarray:
    """Advantages [B] for a loss that no reward teaches: 0, whatever a sample is worth, and NaN where it is not finite.

    Raises:
        NothingToLearn: none is.
    """
    if not scores.finite.any():
        raise NothingToLearn("no sample of the iteration is finite, so there is nothing to learn from")
    return np.where(scores.finite, np.float32(0), np.float32(np.nan))
