"""Reverse-process kernels of rectified flow: one small pure function each.

Conventions. The noise level s falls from 1 to 0; a step goes from `sigma` = s to `sigma_next` = s', with
D = s' - s < 0. The forward process is x_s = (1-s) x0 + s e, the network predicts the velocity v = e - x0, hence
x0_hat = x - s v and e_hat = x + (1-s) v. Everything here is fp32.

Shapes: `sample` and `velocity` are [B, ...]; `sigma`, `sigma_next` and `sigma_max` are [B, 1, ...] so that they
broadcast. A kernel gives the mean and the full standard deviation of x', and knows its own log-density.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReverseStep:
    """The distribution of x' given x: a Gaussian with mean `mean` and standard deviation `std_dev_t`.

    Attributes:
        mean: [B, ...].
        std_dev_t: [B, 1, ...], always the full standard deviation that multiplies the unit noise.
    """

    mean: Tensor
    std_dev_t: Tensor


AT_ONE = 1e-6
"""A schedule that starts at 1 does so up to rounding: some static shifts give 1 + 1.2e-7 or 1 - 6e-8 in fp32."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], ReverseStep]
LogProb = Callable[[Tensor, ReverseStep], Tensor]


def _drifted(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> ReverseStep:
    """mu = x + v D + g^2/(2 s) e_hat D and sd = g sqrt(-D), for any diffusion coefficient g."""
    step = sigma_next - sigma
    noise_hat = sample + (1 - sigma) * velocity
    mean = sample + velocity * step + g**2 / (2 * sigma) * noise_hat * step
    return ReverseStep(mean, g * torch.sqrt(-step))


def sde_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """Flow-GRPO's SDE (arXiv 2505.05470): g = a sqrt(s / (1-s)).

    At s = 1 the coefficient would be infinite, so g alone uses `sigma_max`, the schedule's second sigma. Only the first
    step of a schedule can be so near to 1: the second of a thousand steps would need a shift of a thousand.
    """
    finite = torch.where((sigma - 1).abs() < AT_ONE, sigma_max, sigma)
    return _drifted(sample, velocity, sigma, sigma_next, noise_level * torch.sqrt(sigma / (1 - finite)))


def dance_sde_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """DanceGRPO's SDE (arXiv 2505.07818): a constant diffusion coefficient g = eta."""
    return _drifted(sample, velocity, sigma, sigma_next, torch.full_like(sigma, noise_level))


def cps_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """Coefficients-preserving sampling: sd = s' sin(a pi/2), the rest of s' stays on the predicted noise."""
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean_hat = sample - sigma * velocity
    noise_hat = sample + (1 - sigma) * velocity
    mean = (1 - sigma_next) * clean_hat + torch.sqrt(sigma_next**2 - std**2) * noise_hat
    return ReverseStep(mean, std)


def gaussian_log_prob(prev_sample: Tensor, step: ReverseStep) -> Tensor:
    """log N(x'; mean, sd^2), averaged over every dimension but the batch: [B].

    A mean, not a sum, as in all public code of the field: that is why clip ranges are so small.
    """
    variance = step.std_dev_t**2
    log_density = (
        -((prev_sample - step.mean) ** 2) / (2 * variance) - torch.log(step.std_dev_t) - 0.5 * math.log(2 * math.pi)
    )
    return mean_dims(log_density)


def cps_log_prob(prev_sample: Tensor, step: ReverseStep) -> Tensor:
    """-(x' - mean)^2, averaged likewise: cps leaves out the variance and the constants. [B]"""
    return mean_dims(-((prev_sample - step.mean) ** 2))


def mean_dims(values: Tensor) -> Tensor:
    """Mean over every dimension but the batch: [B, ...] -> [B]."""
    return values.flatten(1).mean(1)


KERNELS: dict[str, tuple[Kernel, LogProb]] = {
    "sde": (sde_step, gaussian_log_prob),
    "dance_sde": (dance_sde_step, gaussian_log_prob),
    "cps": (cps_step, cps_log_prob),
}
