# SPDX-License-Identifier: Apache-2.0
"""How strongly a step's log-prob pulls at the velocity, and the weights that make all steps alike."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig
    from models.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler


def gradient_scales(scheduler: "FlowMatchSDEDiscreteScheduler", algo: "DiffusionRolloutAlgoConfig") -> Tensor:
    """c of each step of the schedule, [T] fp32: |d log p(x') / d v| for an x' one standard deviation from the mean.

    Flash-GRPO (arXiv 2605.15980): with `sde`, c = sqrt(-D)/g + g sqrt(-D) (1-s)/(2s). A Gaussian's is |d mu / d v| /
    sd, and x' - mu = z sd with z ~ N(0, 1), so the gradient of a sampled step is c |z| long. Taken by autograd of the
    kernel's own log-prob, so that it holds for any: the means of those here are linear in x and v, and c does not
    depend on where it is taken (x = v = 0). A step without noise has no log-prob to learn from: 0.

    Args:
        scheduler: with its timesteps set.
        algo: the kernel.
    """
    steps = len(scheduler.timesteps)
    latents = torch.zeros(steps, 1)
    settings = {
        "timestep": scheduler.timesteps.cpu(),
        "noise_level": algo.noise_level,
        "sde_type": algo.sde_type,
        "sde_options": algo.sde_options,
    }
    with torch.enable_grad():
        velocity = torch.zeros(steps, 1, requires_grad=True)
        _, _, mean, std, *_ = scheduler.sample_previous_step(latents, velocity, prev_sample=latents, **settings)
        drawn = (mean + std).detach()
        _, log_prob, *_ = scheduler.sample_previous_step(latents, velocity, prev_sample=drawn, **settings)
        assert log_prob is not None, "the ODE has no log-probs"
        (slopes,) = torch.autograd.grad(log_prob.sum(), velocity)
    return torch.where(std.detach().flatten() > 0, slopes.abs().flatten(), 0.0)


def rectifying_weights(scheduler: "FlowMatchSDEDiscreteScheduler", algo: "DiffusionRolloutAlgoConfig") -> Tensor:
    """Weight of each step's loss that makes the gradients of all steps scale alike, [T] fp32; in the range's mean 1.

    w = (1/c) / mean over the window's range of 1/c, c of `gradient_scales`; 0 for the steps outside it. Flash-GRPO's
    code divides by the mean of an optimiser step's samples. The range's is a number of the schedule alone: with one
    step an iteration theirs would be 1 whatever the step, and it would depend on what ranks and micro-batches hold.

    Raises:
        ValueError: a step of the range has no noise.
    """
    low, high = algo.window_bounds(len(scheduler.timesteps))
    scales = gradient_scales(scheduler, algo)
    if not bool((scales[low:high] > 0).all()):
        raise ValueError(
            f"temporal_gradient_rectification divides by how the gradient scales, but a step of rollout.algo."
            f"sde_window_range [{low}, {high}) has no noise and no gradient with {algo.sde_type}: let it end earlier"
        )
    weights = torch.zeros_like(scales)
    weights[low:high] = 1 / scales[low:high]
    return weights / weights[low:high].mean()
