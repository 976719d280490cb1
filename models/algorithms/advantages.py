"""Advantages: how much better a sample is than the others of its prompt."""

from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from models.algorithms.registry import NameRegistry


class DiffusionAdvantageEstimator(StrEnum):
    """The estimators that ship with the project."""

    FLOW_GRPO = "flow_grpo"


class AdvantageFn(Protocol):
    """(rewards [B], prompt uid of each sample [B], ...) -> (advantages [B], returns [B])."""

    def __call__(
        self,
        sample_level_rewards: Tensor,
        index: np.ndarray,
        norm_adv_by_std_in_grpo: bool = True,
        global_std: bool = True,
        config: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]: ...


_ADVANTAGES: NameRegistry[AdvantageFn] = NameRegistry("advantage estimator", "algorithm.adv_estimator")


def register_diffusion_adv_est(name_or_enum: str | DiffusionAdvantageEstimator):
    """Function decorator that makes an estimator selectable as `algorithm.adv_estimator`."""
    return _ADVANTAGES.register(_name(name_or_enum))


def get_diffusion_adv_estimator_fn(name_or_enum: str | DiffusionAdvantageEstimator) -> AdvantageFn:
    """The estimator of that name, or at that import path.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    return _ADVANTAGES.get(_name(name_or_enum))


def _name(name_or_enum: str | DiffusionAdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, DiffusionAdvantageEstimator) else name_or_enum


@register_diffusion_adv_est(DiffusionAdvantageEstimator.FLOW_GRPO)
def compute_flow_grpo_outcome_advantage(
    sample_level_rewards: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-4,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Group-normalised outcome advantage of Flow-GRPO (arXiv 2505.05470).

    A = (r - mean_group) / (std + epsilon), standard deviations with ddof 1; std is the whole batch's
    (`global_std`) or the group's. Without `norm_adv_by_std_in_grpo` A = r - mean_group (Dr.GRPO, arXiv 2503.20783).

    Args:
        sample_level_rewards: [B]; NaN marks a missing reward. It is left out of every statistic, never scored 0.
        index: [B], each sample's prompt uid: the group.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by a standard deviation at all.
        global_std: which one.
        config, kwargs: part of the estimators' common signature; not read here.

    Returns:
        (advantages [B], returns [B]); a missing reward gives NaN, a sample alone in its group 0.
    """
    rewards = sample_level_rewards.double()
    present = ~torch.isnan(rewards)
    advantages = torch.full_like(rewards, float("nan"))
    batch_std = _std(rewards[present])
    for uid in np.unique(index):
        group = torch.from_numpy(np.asarray(index == uid)) & present
        values = rewards[group]
        if len(values) < 2:
            advantages[group] = 0.0
            continue
        centred = values - values.mean()
        scale = (batch_std if global_std else _std(values)) + epsilon if norm_adv_by_std_in_grpo else 1.0
        advantages[group] = centred / scale
    advantages = advantages.to(sample_level_rewards.dtype)
    return advantages, advantages


def _std(values: Tensor) -> Tensor:
    """Standard deviation with ddof 1; 1 for a single value, which has none."""
    return values.std() if len(values) > 1 else torch.ones((), dtype=values.dtype)
