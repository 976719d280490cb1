# SPDX-License-Identifier: Apache-2.0
"""Policy-gradient losses of the reverse process: what they share stands at the end, once."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.algorithms.losses import (
    IS_WEIGHTS,
    OLD_MEAN,
    DiffusionLossFn,
    DiffusionLossResult,
    mean_drift,
    register_diffusion_loss,
)
from models.registry import WrongAnswer

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig


@register_diffusion_loss("mix_grpo")
@register_diffusion_loss("dance_grpo")
@register_diffusion_loss("flow_grpo")
class FlowGRPOLoss(DiffusionLossFn):
    """Clipped policy objective of Flow-GRPO (arXiv 2505.05470); DanceGRPO and MixGRPO use it unchanged."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("old_log_probs", "advantages")
    optional_data_keys = (IS_WEIGHTS,)

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        config: "DiffusionActorConfig",
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = mean max(-A ratio, -A clip(ratio, 1-eps, 1+eps)), ratio = exp(log_prob - old_log_prob).

        Args:
            old_log_prob: [B], of the policy that sampled.
            log_prob: [B], of the policy being updated.
            advantages: [B], clamped here to plus or minus `adv_clip_max`.
            config: the actor's settings; `diffusion_loss` is read.
            rollout_is_weights: [B], detached multiplier of each sample's loss.
        """
        settings = config.diffusion_loss
        log_ratio = log_prob - old_log_prob
        ratio = torch.exp(log_ratio)
        per_sample = clipped_objective(ratio, advantages, config)
        return weighted_mean(per_sample, rollout_is_weights), ratio_metrics(ratio, log_ratio, settings.clip_ratio)

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            **ratio_inputs(model_output, data),
            config=config,
        )
        return DiffusionLossResult(loss, metrics)


@register_diffusion_loss("grpo_guard")
class GRPOGuardLoss(DiffusionLossFn):
    """GRPO-Guard (arXiv 2510.22319): a ratio whose mean and scale do not depend on the timestep."""

    required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t", "sqrt_dt")
    required_data_keys = ("old_log_probs", "advantages", OLD_MEAN)
    optional_data_keys = (IS_WEIGHTS,)

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        config: "DiffusionActorConfig",
        old_prev_sample_mean: Tensor,
        prev_sample_mean: Tensor,
        std_dev_t: Tensor,
        sqrt_dt: Tensor,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = mean max(-A ratio, -A clip(ratio, 1-eps, 1+eps)) / (-D), ratio = exp((log_prob - old_log_prob + b) sd).

        b = mean_dims (mu - mu_old)^2 / (2 sd^2) lifts the log-ratio's negative mean; all of it is per sample. Both hold
        for a Gaussian's log-probs, not for those of `cps_step`, which leave the variance out.

        Args:
            old_log_prob, log_prob, advantages, config, rollout_is_weights: as for `FlowGRPOLoss`.
            old_prev_sample_mean: [B, ...], mean of the step under the policy that sampled.
            prev_sample_mean: [B, ...], under the policy being updated.
            std_dev_t: [B, 1, ...] or scalar, the full standard deviation of the step.
            sqrt_dt: [B] or scalar, sqrt(-D).
        """
        bias = mean_drift(prev_sample_mean, old_prev_sample_mean, std_dev_t)
        log_ratio = (log_prob - old_log_prob + bias) * _of_each_sample(std_dev_t, like=log_prob)
        ratio = torch.exp(log_ratio)
        step_length = _of_each_sample(sqrt_dt, like=log_prob) ** 2
        loss = weighted_mean(clipped_objective(ratio, advantages, config) / step_length, rollout_is_weights)
        metrics = ratio_metrics(ratio, log_ratio, config.diffusion_loss.clip_ratio)
        return loss, metrics | {"mean_drift": bias.detach().mean()}

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            **ratio_inputs(model_output, data),
            config=config,
            old_prev_sample_mean=data[OLD_MEAN],
            prev_sample_mean=model_output["prev_sample_mean"],
            std_dev_t=model_output["std_dev_t"],
            sqrt_dt=model_output["sqrt_dt"],
        )
        return DiffusionLossResult(loss, metrics)


@register_diffusion_loss("flow_dppo")
class FlowDPPOLoss(DiffusionLossFn):
    """Flow-DPPO (arXiv 2606.11025): a trust region in the exact divergence of the step instead of a clipped ratio."""

    required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", OLD_MEAN)
    optional_data_keys = (IS_WEIGHTS,)

    @classmethod
    def compute_loss(
        cls,
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        config: "DiffusionActorConfig",
        old_prev_sample_mean: Tensor,
        prev_sample_mean: Tensor,
        std_dev_t: Tensor,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = mean (0 where dropped, else -A ratio), ratio = exp(log_prob - old_log_prob).

        Dropped: D_kl >= kl_mask_threshold and the step goes further out (ratio > 1 and A > 0, or ratio < 1 and A < 0),
        D_kl = mean_dims (mu - mu_old)^2 / (2 sd^2). Dropped samples stay in the mean; A is not clamped.

        Args:
            old_log_prob, log_prob, config, rollout_is_weights: as for `FlowGRPOLoss`.
            advantages: [B].
            old_prev_sample_mean, prev_sample_mean, std_dev_t: as for `GRPOGuardLoss`.
        """
        log_ratio = log_prob - old_log_prob
        ratio = torch.exp(log_ratio)
        divergence = mean_drift(prev_sample_mean, old_prev_sample_mean, std_dev_t).detach()
        outwards = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        dropped = (divergence >= config.diffusion_loss.kl_mask_threshold) & outwards
        per_sample = torch.where(dropped, 0.0, -advantages * ratio)
        metrics = ratio_spread(ratio, log_ratio) | {
            "mean_drift": divergence.mean(),
            "mean_drift/max": divergence.max(),
            "pg_dropfrac": dropped.float().mean(),
        }
        return weighted_mean(per_sample, rollout_is_weights), metrics

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            **ratio_inputs(model_output, data),
            config=config,
            old_prev_sample_mean=data[OLD_MEAN],
            prev_sample_mean=model_output["prev_sample_mean"],
            std_dev_t=model_output["std_dev_t"],
        )
        return DiffusionLossResult(loss, metrics)


def ratio_inputs(model_output: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What every loss on a ratio takes from the model's output and the micro-batch."""
    return {
        "old_log_prob": data["old_log_probs"],
        "log_prob": model_output["log_probs"],
        "advantages": data["advantages"],
        "rollout_is_weights": data.get(IS_WEIGHTS),
    }


def clipped_objective(ratio: Tensor, advantages: Tensor, config: "DiffusionActorConfig") -> Tensor:
    """max(-A ratio, -A clip(ratio, 1-eps, 1+eps)) of each sample, A clamped to plus or minus `adv_clip_max`. [B]"""
    settings = config.diffusion_loss
    advantages = advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)
    clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def weighted_mean(per_sample: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    """Mean of the samples [B], each multiplied by its detached weight [B] where there are any."""
    return (per_sample if rollout_is_weights is None else per_sample * rollout_is_weights.detach()).mean()


def _of_each_sample(value: Tensor, like: Tensor) -> Tensor:
    """A number of each step, given as a scalar, [B] or [B, 1, ...], as [B]. Raises WrongAnswer for more numbers."""
    numbers = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if numbers.numel() not in (1, len(like)):
        raise WrongAnswer(
            f"grpo_guard scales a ratio by one deviation a sample, and the kernel gives {tuple(numbers.shape)} for "
            f"{len(like)} of them: choose another loss_mode, or a kernel whose noise does not vary in space"
        )
    return numbers.flatten().expand_as(like)


def ratio_metrics(ratio: Tensor, log_ratio: Tensor, clip_ratio: float) -> dict[str, Tensor]:
    """`ratio_spread` and how often the clip range is left, scalars by name; `ratio` and `log_ratio` are [B]."""
    outside = (ratio.detach() - 1).abs() > clip_ratio
    return ratio_spread(ratio, log_ratio) | {"pg_clipfrac": outside.float().mean()}


def ratio_spread(ratio: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """What tells a healthy update: the ratio's distance from 1, and the approximate KL mean(-log ratio).

    Args:
        ratio: [B], exp(log_ratio).
        log_ratio: [B], log-prob of the policy minus the old one's.

    Returns:
        scalars by name, without gradient.
    """
    deviation = (ratio.detach() - 1).abs()
    return {
        "ppo_kl": -log_ratio.detach().mean(),
        "ratio_deviation/mean": deviation.mean(),
        "ratio_deviation/max": deviation.max(),
    }
