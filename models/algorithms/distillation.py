# SPDX-License-Identifier: Apache-2.0
"""Distillation: the policy's own samples, a teacher's opinion of them. No reward is learnt from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models.algorithms.losses import (
    TEACHER_MEAN,
    TEACHER_VELOCITY,
    DiffusionLossFn,
    DiffusionLossResult,
    mean_drift,
    register_diffusion_loss,
    velocity_distance,
)

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig


@register_diffusion_loss("distill_kl")
class DistillKLLoss(DiffusionLossFn):
    """KL divergence from the policy's reverse step to the teacher's, at the steps that the policy itself sampled."""

    required_model_output_keys = ("prev_sample_mean", "std_dev_t")
    required_data_keys = (TEACHER_MEAN,)

    @classmethod
    def compute_loss(
        cls, *, prev_sample_mean: Tensor, teacher_prev_sample_mean: Tensor, std_dev_t: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """L = mean (mu - mu_teacher)^2 / (2 sd^2).

        Args:
            prev_sample_mean, teacher_prev_sample_mean: [B, ...].
            std_dev_t: [B, 1, ...], the standard deviation they share.
        """
        return mean_drift(prev_sample_mean, teacher_prev_sample_mean, std_dev_t).mean(), {}

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        outputs = {key: model_output[key] for key in self.required_model_output_keys}
        return DiffusionLossResult(*self.compute_loss(teacher_prev_sample_mean=data[TEACHER_MEAN], **outputs))


@register_diffusion_loss("distill_fm_mse")
class DistillFlowMatchingLoss(DiffusionLossFn):
    """Squared difference of the velocities, at noised samples of the policy."""

    process = "forward"
    required_model_output_keys = ("velocity",)
    required_data_keys = (TEACHER_VELOCITY,)

    @classmethod
    def compute_loss(cls, *, velocity: Tensor, teacher_velocity: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """L = mean (v - v_teacher)^2, both [B, ...]."""
        return velocity_distance(velocity, teacher_velocity), {}

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: Mapping[str, Any]
    ) -> DiffusionLossResult:
        loss, metrics = self.compute_loss(velocity=model_output["velocity"], teacher_velocity=data[TEACHER_VELOCITY])
        return DiffusionLossResult(loss, metrics)
