# SPDX-License-Identifier: Apache-2.0
"""Advantages: how much better a sample is than the others of its prompt."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from models.registry import NameRegistry, check_call, check_options


class DiffusionAdvantageEstimator(StrEnum):
    """The estimators that ship with the project."""

    FLOW_GRPO = "flow_grpo"
    DANCE_GRPO = "dance_grpo"
    MIX_GRPO = "mix_grpo"
    GDPO = "gdpo"


class AdvantageFn(Protocol):
    """(rewards, prompt uid of each sample [B], ...) -> (advantages, returns), all three of one shape.

    The shape is [B] in this project's own runs. The estimators here take [B, 1] and [B, T] as well.

    `kwargs` hold `reward_scores`, reward name -> scores [B], and `reward_weights`, reward name -> weight, of which the
    rewards are the weighted sum, and besides what the config gives as `algorithm.adv_options`.
    """

    def __call__(
        self,
        sample_level_rewards: Tensor,
        index: np.ndarray,
        norm_adv_by_std_in_grpo: bool = True,
        global_std: bool = True,
        config: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(advantages, returns) of a batch: rewards, and what is given back, [B] or [B, T]."""


Estimator = TypeVar("Estimator", bound=Callable[..., tuple[Tensor, Tensor]])

_ADVANTAGES: NameRegistry[AdvantageFn] = NameRegistry("advantage estimator", "algorithm.adv_estimator")
_GIVEN = (
    "sample_level_rewards",
    "index",
    "norm_adv_by_std_in_grpo",
    "global_std",
    "config",
    "reward_scores",
    "reward_weights",
)


def register_diffusion_adv_est(
    name_or_enum: str | DiffusionAdvantageEstimator,
) -> Callable[[Estimator], Estimator]:
    """Function decorator that makes an estimator selectable as `algorithm.adv_estimator`."""
    return cast(Any, _ADVANTAGES.register(_name(name_or_enum)))  # an estimator need not name what it does not read


def get_diffusion_adv_estimator_fn(name_or_enum: str | DiffusionAdvantageEstimator) -> AdvantageFn:
    """The estimator of that name, or at that import path.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    return _ADVANTAGES.get(_name(name_or_enum))


def check_advantage(name: str, options: Mapping[str, Any]) -> None:
    """Raise what `get_diffusion_adv_estimator_fn` raises, and ValueError for what is no estimator and for options that
    it does not take."""
    found = get_diffusion_adv_estimator_fn(name)
    check_call(f"algorithm.adv_estimator is {name!r}, which", found, _GIVEN[:2], _GIVEN[2:])
    check_options("algorithm.adv_options", f"advantage {name!r}", found, options, given=_GIVEN)


def _name(name_or_enum: str | DiffusionAdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, DiffusionAdvantageEstimator) else name_or_enum


@register_diffusion_adv_est(DiffusionAdvantageEstimator.MIX_GRPO)
@register_diffusion_adv_est(DiffusionAdvantageEstimator.DANCE_GRPO)
@register_diffusion_adv_est(DiffusionAdvantageEstimator.FLOW_GRPO)
def compute_flow_grpo_outcome_advantage(
    sample_level_rewards: Tensor,
    index: np.ndarray,
    epsilon: Annotated[float, Gt(0)] = 1e-4,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Group-normalised outcome advantage of Flow-GRPO (arXiv 2505.05470).

    A = (r - mean_group) / (std + epsilon), standard deviations with ddof 1; std is the whole batch's
    (`global_std`) or the group's. Without `norm_adv_by_std_in_grpo` A = r - mean_group (Dr.GRPO, arXiv 2503.20783).

    Args:
        sample_level_rewards: [B] or [B, 1]; or [B, T] with a reward for each of T denoising steps, where means and
            deviations are over all steps of all samples, as in the reference system. What is not finite marks a missing
            reward. Its sample is left out of every statistic, never scored 0.
        index: [B], each sample's prompt uid: the group.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by a standard deviation at all.
        global_std: which one.
        config, kwargs: part of the estimators' common signature; not read here.

    Returns:
        (advantages, returns) of the rewards' shape; a missing reward gives NaN, a sample alone in its group 0.

    Raises:
        ValueError: the rewards have another shape, or there is not one uid a sample.
    """
    present = has_reward(sample_level_rewards, index)
    rewards = sample_level_rewards.double()
    advantages = torch.full_like(rewards, float("nan"))
    batch_std = _std(rewards[present])
    for group in _groups(index, present):
        values = rewards[group]
        if len(values) < 2:
            advantages[group] = 0.0
            continue
        centred = values - values.mean()
        scale = (batch_std if global_std else _std(values)) + epsilon if norm_adv_by_std_in_grpo else 1.0
        advantages[group] = centred / scale
    advantages = advantages.to(sample_level_rewards.dtype)
    return advantages, advantages


@register_diffusion_adv_est(DiffusionAdvantageEstimator.GDPO)
def compute_gdpo_outcome_advantage(
    sample_level_rewards: Tensor,
    index: np.ndarray,
    epsilon: Annotated[float, Gt(0)] = 1e-6,
    config: Any = None,
    *,
    reward_scores: Mapping[str, Tensor],
    reward_weights: Mapping[str, float],
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Each reward normalised in its group before the rewards are added, so that none drowns another (GDPO).

    z_k = (r_k - mean_group,k) / max(std_group,k, epsilon);  c = sum_k w_k z_k;  A = (c - mean_batch c) / std_batch c,
    standard deviations with ddof 1, the last one also at least epsilon. Every z_k sums to 0 in its group, so
    mean_batch c is 0; what rounding leaves of it is not subtracted: it would be a sign for the samples of equal groups.

    Args:
        sample_level_rewards: the weighted sum, [B], [B, 1] or [B, T] as for `compute_flow_grpo_outcome_advantage`; what
            is not finite leaves the sample out of every statistic.
        index: [B], each sample's prompt uid: the group.
        epsilon: least standard deviation.
        config: part of the estimators' common signature; not read here.
        reward_scores: reward name -> [B] or the rewards' shape. What is not finite of a sample that is present marks an
            optional reward that is missing: it leaves that reward's statistics, and z_k = 0 there.
        reward_weights: reward name -> weight; a reward of weight 0 is only watched.
        kwargs: the settings that choose a standard deviation; not read here, GDPO always takes both.

    Returns:
        (advantages, returns) of the rewards' shape; a missing reward gives NaN, a sample alone in its group 0.

    Raises:
        ValueError: the rewards have another shape, or there is not one uid a sample.
    """
    present = has_reward(sample_level_rewards, index)
    advantages = torch.full_like(sample_level_rewards, float("nan"), dtype=torch.float64)
    combined = torch.zeros_like(advantages)
    compared = torch.zeros_like(present)
    for group in _groups(index, present):
        advantages[group] = 0.0
        if int(group.sum()) < 2:
            continue
        compared |= group
        for name, weight in reward_weights.items():
            if weight != 0:
                values = _like(reward_scores[name].double(), advantages)[group]
                known = values.isfinite()
                if known.any():
                    scored = (values - values[known].mean()) / _std(values[known]).clamp_min(epsilon)
                    combined[group] += weight * scored.where(known, 0.0)
    values = combined[compared]
    if len(values):
        advantages[compared] = values / _std(values).clamp_min(epsilon)
    advantages = advantages.to(sample_level_rewards.dtype)
    return advantages, advantages


def has_reward(rewards: Tensor, index: np.ndarray) -> Tensor:
    """Mask [B] of the samples whose reward is finite, in each of its steps where it has several.

    Raises:
        ValueError: the rewards are not [B], [B, 1] or [B, T], or there is not one uid a sample.
    """
    if rewards.ndim not in (1, 2) or len(rewards) != len(index):
        raise ValueError(
            f"sample_level_rewards have the shape {list(rewards.shape)} and there are {len(index)} uids: give rewards "
            "[B], [B, 1] or [B, T] and one uid a sample"
        )
    return rewards.isfinite().reshape(len(rewards), -1).all(1)


def _like(scores: Tensor, rewards: Tensor) -> Tensor:
    """Scores [B] at each step of rewards [B, T]; others as they are."""
    return scores[:, None].expand_as(rewards) if scores.ndim < rewards.ndim else scores.expand_as(rewards)


def _groups(index: np.ndarray, present: Tensor) -> list[Tensor]:
    """For each prompt uid a mask [B] of its samples that are present."""
    return [torch.from_numpy(np.asarray(index == uid)) & present for uid in np.unique(index)]


def _std(values: Tensor) -> Tensor:
    """Standard deviation with ddof 1; 1 for a single value, which has none."""
    return values.std() if len(values) > 1 else torch.ones((), dtype=values.dtype)
