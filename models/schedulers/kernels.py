# SPDX-License-Identifier: Apache-2.0
"""Reverse-process kernels of rectified flow: one small pure function each.

Conventions. The noise level s falls from 1 to 0; a step goes from `sigma` = s to `sigma_next` = s', with
D = s' - s < 0. The forward process is x_s = (1-s) x0 + s e, the network predicts the velocity v = e - x0, hence
x0_hat = x - s v and e_hat = x + (1-s) v. Everything here is fp32.

Shapes: `sample` and `velocity` are [B, ...]; `sigma`, `sigma_next` and `sigma_max` are [B, 1, ...] so that they
broadcast. A kernel gives the mean and the full standard deviation of x', and knows its own log-density.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from models.registry import NameRegistry, WrongAnswer, check_call, check_options


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

Kernel = Callable[..., ReverseStep]
"""(sample, velocity, sigma, sigma_next, sigma_max, noise_level), by position; its options follow as keywords."""
KERNEL_ARGUMENTS = ("sample", "velocity", "sigma", "sigma_next", "sigma_max", "noise_level")
LogProb = Callable[[Tensor, ReverseStep], Tensor]
F = TypeVar("F", bound=Kernel)


def _drifted(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> ReverseStep:
    """mu = x + v D + g^2/(2 s) e_hat D and sd = g sqrt(-D), for any diffusion coefficient g."""
    step = sigma_next - sigma
    noise_hat = sample + (1 - sigma) * velocity
    mean = sample + velocity * step + g**2 / (2 * sigma) * noise_hat * step
    return ReverseStep(mean, g * torch.sqrt(-step))


def sde_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """Flow-GRPO's SDE (arXiv 2505.05470): g = a sqrt(s / (1-s)); `sample` [B, ...], the sigmas [B, 1, ...].

    At s = 1 the coefficient would be infinite, so g alone uses `sigma_max`, the schedule's second sigma. Only the first
    step of a schedule can be so near to 1: the second of a thousand steps would need a shift of a thousand.
    """
    finite = torch.where((sigma - 1).abs() < AT_ONE, sigma_max, sigma)
    return _drifted(sample, velocity, sigma, sigma_next, noise_level * torch.sqrt(sigma / (1 - finite)))


def dance_sde_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """DanceGRPO's SDE (arXiv 2505.07818): a constant diffusion coefficient g = eta; shapes as `sde_step` [B, ...]."""
    return _drifted(sample, velocity, sigma, sigma_next, torch.full_like(sigma, noise_level))


def cps_step(
    sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> ReverseStep:
    """Coefficients-preserving sampling: sd = s' sin(a pi/2), the rest of s' stays on the predicted noise.

    mu = (1-s') x0_hat + sqrt(s'^2 - sd^2) e_hat; shapes as `sde_step` [B, ...].
    """
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


class SdeKernel(NamedTuple):
    """How x' is drawn, and the log-density of what was drawn."""

    step: Kernel
    log_prob: LogProb


_FIELD = "actor_rollout_ref.rollout.algo"
_REGISTRY: NameRegistry[SdeKernel] = NameRegistry("kernel", f"{_FIELD}.sde_type")
KERNELS = _REGISTRY.entries
"""The registered kernels by name."""


def register_kernel(name: str, log_prob: LogProb = gaussian_log_prob) -> Callable[[F], F]:
    """Function decorator that makes a kernel selectable as `rollout.algo.sde_type`; rollout and update both use it.

    Args:
        name: of the kernel.
        log_prob: log-density [B] of x' under a step, a mean over the latent.
    """

    def decorate(step: F) -> F:
        _REGISTRY.register(name)(SdeKernel(step, log_prob))
        return step

    return decorate


def get_kernel(name: str) -> SdeKernel:
    """The kernel of that name, or at that import path; one that is not registered has the Gaussian's log-density.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    found: Any = _REGISTRY.get(name)
    if isinstance(found, SdeKernel):
        return found
    return next((known for known in KERNELS.values() if known.step is found), SdeKernel(found, gaussian_log_prob))


def check_kernel(name: str, options: Mapping[str, Any]) -> None:
    """Raise what `get_kernel` raises, and ValueError for what is no kernel and for options that it does not take."""
    step = get_kernel(name).step
    check_call(f"{_FIELD}.sde_type is {name!r}, which", step, KERNEL_ARGUMENTS)
    given = [*inspect.signature(step).parameters][: len(KERNEL_ARGUMENTS)]
    check_options(f"{_FIELD}.sde_options", f"kernel {name!r}", step, options, given)


def check_step(name: str, step: Any, sample: Tensor) -> None:
    """Is what a kernel gave for a sample [B, ...] its distribution?

    Args:
        name: of the kernel, or its import path.
        step: what it gave.
        sample: what it was asked for.

    Raises:
        WrongAnswer: it is no ReverseStep, or one of other shapes.
    """
    what = f"{_FIELD}.sde_type is {name!r}, which returned"
    if not isinstance(step, ReverseStep):
        raise WrongAnswer(f"{what} a {type(step).__name__}: return a ReverseStep(mean, std_dev_t)")
    whole = tuple(sample.shape)
    allowed = {"mean": {whole}, "std_dev_t": {whole, (len(sample), *[1] * (sample.ndim - 1))}}
    for field, shapes in allowed.items():
        value = getattr(step, field)
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found not in shapes:
            right = min(shapes, key=math.prod)
            raise WrongAnswer(f"{what} {field} {found} for a sample {whole}: it should be a tensor of shape {right}")


register_kernel("sde")(sde_step)
register_kernel("dance_sde")(dance_sde_step)
register_kernel("cps", log_prob=cps_log_prob)(cps_step)
