"""Advantages and losses: pure functions behind two registries."""

from models.algorithms.advantages import (
    DiffusionAdvantageEstimator,
    compute_flow_grpo_outcome_advantage,
    get_diffusion_adv_estimator_fn,
    register_diffusion_adv_est,
)
from models.algorithms.losses import (
    DiffusionLossFn,
    DiffusionLossResult,
    FlowGRPOLoss,
    KLLoss,
    get_diffusion_loss_fn,
    register_diffusion_loss,
)

__all__ = [
    "DiffusionAdvantageEstimator",
    "DiffusionLossFn",
    "DiffusionLossResult",
    "FlowGRPOLoss",
    "KLLoss",
    "compute_flow_grpo_outcome_advantage",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
]
