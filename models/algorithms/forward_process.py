# SPDX-License-Identifier: Apache-2.0
"""Losses of the forward process: finished samples are noised again, x_t = (1-t) x0 + t e, and velocities compared.

No SDE and no log-probs of the sampler are needed, so the rollout may use any ODE solver.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.algorithms.losses import (
    EMA_VELOCITY,
    OLD_VELOCITY,
    DiffusionLossFn,
    DiffusionLossResult,
    register_diffusion_loss,
    velocity_distance,
)
from models.algorithms.policy_gradient import clipped_objective, ratio_metrics
from models.schedulers.kernels import mean_dims

if TYPE_CHECKING:
    from models.config.actor import AwmWeighting, DiffusionActorConfig

LEAST_ERROR = 1e-5
"""Where an x0 prediction is exact, DiffusionNFT's normaliser would be 0."""
GHUBER_POWER = 0.25


@register_diffusion_loss("diffusion_nft")
class DiffusionNFTLoss(DiffusionLossFn):
    """DiffusionNFT (arXiv 2509.16117): the velocity moves towards good samples and away from bad ones.

    Where the policy still is the old policy, the loss's value does not depend on the reward while its gradient does:
    never read progress off it.
    """

    process = "forward"
    samples_from_old_policy = True
    required_model_output_keys = ("velocity",)
    required_data_keys = ("advantages", "clean_latents", "noisy_latents", "sigmas", OLD_VELOCITY)

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: Tensor,
        old_velocity: Tensor,
        clean_latents: Tensor,
        noisy_latents: Tensor,
        sigmas: Tensor,
        advantages: Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = c mean[r mean_dims((x+ - x0)^2 / w+) / b + (1-r) mean_dims((x- - x0)^2 / w-) / b].

        v+ = b v + (1-b) v_old;  v- = (1+b) v_old - b v;  x+- = x_t - t v+-;  w+- = max(mean_dims |x+- - x0|, 1e-5),
        detached and in fp64;  r = clip(A, -c, c) / (2c) + 1/2;  c = `adv_clip_max`, b = `nft_beta`.

        Args:
            velocity, old_velocity: [B, ...], of the policy and of the old policy, which sampled.
            clean_latents, noisy_latents: [B, ...], x0 and x_t.
            sigmas: [B], t.
            advantages: [B].
            config: the actor's settings; `diffusion_loss` is read.
        """
        b, c = config.diffusion_loss.nft_beta, config.diffusion_loss.adv_clip_max
        share = advantages.clamp(-c, c) / (2 * c) + 0.5
        positive = b * velocity + (1 - b) * old_velocity
        negative = (1 + b) * old_velocity - b * velocity
        towards = cls._error(positive, clean_latents, noisy_latents, sigmas)
        away = cls._error(negative, clean_latents, noisy_latents, sigmas)
        loss = c * ((share * towards + (1 - share) * away) / b).mean()
        metrics = {
            "nft_positive_error": towards.detach().mean(),
            "nft_negative_error": away.detach().mean(),
            "nft_share": share.mean(),
            "old_deviation": velocity_distance(velocity.detach(), old_velocity),
        }
        return loss, metrics

    @staticmethod
    def _error(velocity: Tensor, clean: Tensor, noisy: Tensor, sigmas: Tensor) -> Tensor:
        """mean_dims((x - x0)^2 / w) of the x0 that this velocity predicts. [B]"""
        off = noisy - _like(sigmas, noisy) * velocity - clean
        weight = mean_dims(off.detach().double().abs()).clamp_min(LEAST_ERROR)
        return mean_dims(off**2 / _like(weight, off))

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        given = {key: data[key] for key in self.required_data_keys}
        return DiffusionLossResult(*self.compute_loss(velocity=model_output["velocity"], config=config, **given))


@register_diffusion_loss("awm")
class AdvantageWeightedMatchingLoss(DiffusionLossFn):
    """Advantage-weighted matching (arXiv 2509.25050): the flow-matching error takes the place of a log-prob."""

    process = "forward"
    required_model_output_keys = ("velocity",)
    required_data_keys = ("advantages", "clean_latents", "noise", "sigmas", OLD_VELOCITY, EMA_VELOCITY)

    @classmethod
    def compute_loss(
        cls,
        *,
        velocity: Tensor,
        old_velocity: Tensor,
        ema_velocity: Tensor,
        clean_latents: Tensor,
        noise: Tensor,
        sigmas: Tensor,
        advantages: Tensor,
        config: "DiffusionActorConfig",
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = mean max(-A ratio, -A clip(ratio, 1-eps, 1+eps)) / c + beta_ema mean (v - v_ema)^2.

        ratio = exp(lp - lp_old) with `matching_log_prob`, the same e and t in both; A is clamped to plus or minus c =
        `adv_clip_max` and then divided by it; eps = `clip_ratio`, beta_ema = `awm_ema_coef`.

        Args:
            velocity, old_velocity, ema_velocity: [B, ...], of the policy, of the policy that sampled, and of its copy.
            clean_latents, noise: [B, ...], x0 and e.
            sigmas: [B], t.
            advantages: [B].
            config: the actor's settings; `diffusion_loss` is read.
        """
        settings, target = config.diffusion_loss, noise - clean_latents
        log_prob = matching_log_prob(velocity, target, sigmas, settings.awm_weighting)
        old_log_prob = matching_log_prob(old_velocity, target, sigmas, settings.awm_weighting)
        log_ratio = log_prob - old_log_prob
        ratio = torch.exp(log_ratio)
        clipped = clipped_objective(ratio, advantages.double(), config).mean() / settings.adv_clip_max
        ema_distance = velocity_distance(velocity, ema_velocity)
        metrics = ratio_metrics(ratio, log_ratio, settings.clip_ratio) | {"ema_distance": ema_distance.detach()}
        return clipped.float() + settings.awm_ema_coef * ema_distance, metrics

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        given = {key: data[key] for key in self.required_data_keys}
        return DiffusionLossResult(*self.compute_loss(velocity=model_output["velocity"], config=config, **given))


def matching_log_prob(velocity: Tensor, target: Tensor, sigmas: Tensor, weighting: "AwmWeighting") -> Tensor:
    """lp = -w(t) m, m = mean_dims (v - (e - x0))^2, in fp64; huber and ghuber bend m as well. [B]

    adaptive is V-GRPO's self-normalised error of the predicted x0 (arXiv 2604.23380), DiffusionNFT's too: lp =
    -mean_dims (x - x0)^2 / max(mean_dims |x - x0|, 1e-5), the denominator detached. x = x_t - t v is off by
    x - x0 = t (e - x0 - v), so lp = -t m / mean_dims |v - (e - x0)| away from the bound.
    """
    if weighting == "adaptive":
        off = _like(sigmas, velocity).double() * (target - velocity).double()
        return -mean_dims(off**2) / mean_dims(off.detach().abs()).clamp_min(LEAST_ERROR)
    error, t = mean_dims((velocity - target).double() ** 2), sigmas.double()
    if weighting == "huber":
        return -((error + 1e-10).sqrt() - 1e-5) * t
    if weighting == "ghuber":
        return -((error + 1e-10) ** GHUBER_POWER - 1e-10**GHUBER_POWER) * t / GHUBER_POWER
    return -{"uniform": torch.ones_like(t), "t": t, "t2": t**2}[weighting] * error


def _like(per_sample: Tensor, tensor: Tensor) -> Tensor:
    """[B] as [B, 1, ...]."""
    return per_sample.view(-1, *[1] * (tensor.ndim - 1))
