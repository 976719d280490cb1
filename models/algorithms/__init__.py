"""Advantages and losses: pure functions behind two registries."""

from models.algorithms.advantages import (
    DiffusionAdvantageEstimator,
    compute_flow_grpo_outcome_advantage,
    compute_gdpo_outcome_advantage,
    get_diffusion_adv_estimator_fn,
    register_diffusion_adv_est,
)
from models.algorithms.losses import (
    DiffusionLossFn,
    DiffusionLossResult,
    KLLoss,
    check_loss_inputs,
    get_diffusion_loss_fn,
    needs_old_means,
    register_diffusion_loss,
)
from models.algorithms.policy_gradient import FlowDPPOLoss, FlowGRPOLoss, GRPOGuardLoss

__all__ = [
    "DiffusionAdvantageEstimator",
    "DiffusionLossFn",
    "DiffusionLossResult",
    "FlowDPPOLoss",
    "FlowGRPOLoss",
    "GRPOGuardLoss",
    "KLLoss",
    "check_loss_inputs",
    "compute_flow_grpo_outcome_advantage",
    "compute_gdpo_outcome_advantage",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "needs_old_means",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
]
