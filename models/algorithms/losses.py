"""Losses: what an update minimises, computed where the gradients are.

A loss is split in two. `compute_loss` is the formula on plain tensors. `__call__` takes what it needs from the
model's output and the micro-batch, and says beforehand which keys those are, so that a missing input is an error
with a name and not a KeyError in the middle of a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from models.algorithms.registry import NameRegistry
from models.schedulers.kernels import mean_dims

if TYPE_CHECKING:
    from models.config import DiffusionActorConfig


@dataclass
class DiffusionLossResult:
    """What a loss gives back.

    Attributes:
        loss: scalar, with gradient.
        metrics: name -> number, without the `actor/` prefix.
        add_loss_metric: also log the loss itself.
    """

    loss: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    add_loss_metric: bool = False


class DiffusionLossFn(ABC):
    """Base of the worker-side losses."""

    required_model_output_keys: ClassVar[tuple[str, ...]] = ()
    required_data_keys: ClassVar[tuple[str, ...]] = ()

    compute_loss: ClassVar[Callable[..., tuple[Tensor, dict[str, Any]]]]
    """The formula, a classmethod: tensors in by name, (scalar loss, metrics) out."""

    @abstractmethod
    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        """The formula applied to one micro-batch at one timestep."""

    @staticmethod
    def prepare_actor_batch(batch: Any, reward_tensor: Tensor, config: Any) -> Any:
        """Hook before the update. Reverse-process losses need nothing: advantages and old log-probs are there."""
        return batch

    def validate_inputs(self, *, loss_name: str, model_output: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Check the keys this loss declared.

        Raises:
            ValueError: names the loss and every missing key.
        """
        missing = [f"model output {key!r}" for key in self.required_model_output_keys if key not in model_output]
        missing += [f"data {key!r}" for key in self.required_data_keys if key not in data]
        if missing:
            raise ValueError(f"loss {loss_name!r} needs {', '.join(missing)}, which the update was not given")


_LOSSES: NameRegistry[type[DiffusionLossFn]] = NameRegistry("loss", "actor_rollout_ref.actor.diffusion_loss.loss_mode")


def register_diffusion_loss(name: str):
    """Class decorator that makes a loss selectable as `diffusion_loss.loss_mode`."""
    return _LOSSES.register(name)


def get_diffusion_loss_fn(name: str) -> DiffusionLossFn:
    """An instance of the loss of that name, or at that import path.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    return _LOSSES.get(name)()


@register_diffusion_loss("flow_grpo")
class FlowGRPOLoss(DiffusionLossFn):
    """Clipped policy objective of Flow-GRPO (arXiv 2505.05470); DanceGRPO and MixGRPO use it unchanged."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("old_log_probs", "advantages")

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
        advantages = advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)
        log_ratio = log_prob - old_log_prob
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
        per_sample = torch.maximum(-advantages * ratio, -advantages * clipped)
        if rollout_is_weights is not None:
            per_sample = per_sample * rollout_is_weights.detach()
        return per_sample.mean(), ratio_metrics(ratio, log_ratio, settings.clip_ratio)

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(
            old_log_prob=data["old_log_probs"],
            log_prob=model_output["log_probs"],
            advantages=data["advantages"],
            config=config,
            rollout_is_weights=data.get("rollout_is_weights"),
        )
        return DiffusionLossResult(loss, metrics)


class KLLoss:
    """KL divergence from the policy to the reference, of one reverse step's Gaussians."""

    @classmethod
    def compute_loss(
        cls, *, prev_sample_mean: Tensor, ref_prev_sample_mean: Tensor, std_dev_t: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """mean over batch and latent of (mu - mu_ref)^2 / (2 sd^2): the true Gaussian KL, per latent element.

        Args:
            prev_sample_mean: [B, ...], the policy's.
            ref_prev_sample_mean: [B, ...], the reference's, without gradient.
            std_dev_t: [B, 1, ...], the standard deviation they share.
        """
        kl = mean_dims((prev_sample_mean - ref_prev_sample_mean) ** 2 / (2 * std_dev_t**2)).mean()
        return kl, {"kl_loss": kl.detach()}


def ratio_metrics(ratio: Tensor, log_ratio: Tensor, clip_ratio: float) -> dict[str, Tensor]:
    """What tells a healthy update: the ratio's spread, how often it is clipped, and the approximate KL."""
    deviation = (ratio.detach() - 1).abs()
    return {
        "ppo_kl": -log_ratio.detach().mean(),
        "pg_clipfrac": (deviation > clip_ratio).float().mean(),
        "ratio_deviation/mean": deviation.mean(),
        "ratio_deviation/max": deviation.max(),
    }
