# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and rollout correction: pure functions, the first two behind registries."""

from models.algorithms.advantages import (
    DiffusionAdvantageEstimator,
    check_advantage,
    compute_flow_grpo_outcome_advantage,
    compute_gdpo_outcome_advantage,
    get_diffusion_adv_estimator_fn,
    register_diffusion_adv_est,
)
from models.algorithms.distillation import DistillFlowMatchingLoss, DistillKLLoss
from models.algorithms.forward_process import AdvantageWeightedMatchingLoss, DiffusionNFTLoss
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
from models.algorithms.preference import DPOLoss
from models.algorithms.rollout_correction import Correction, correct_rollout

__all__ = [
    "AdvantageWeightedMatchingLoss",
    "Correction",
    "DPOLoss",
    "DiffusionAdvantageEstimator",
    "DiffusionLossFn",
    "DiffusionLossResult",
    "DiffusionNFTLoss",
    "DistillFlowMatchingLoss",
    "DistillKLLoss",
    "FlowDPPOLoss",
    "FlowGRPOLoss",
    "GRPOGuardLoss",
    "KLLoss",
    "check_advantage",
    "check_loss_inputs",
    "compute_flow_grpo_outcome_advantage",
    "compute_gdpo_outcome_advantage",
    "correct_rollout",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "needs_old_means",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
]
