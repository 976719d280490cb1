# SPDX-License-Identifier: Apache-2.0
"""How much of the noise of exploring is left in the finished latents: known from the schedule, before anything runs."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig
    from models.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler

DATA_STD = 0.2
"""Standard deviation of the data that the prediction is made for, in a latent of about 1: what is still open where the
prompt and the coarse of the picture are given. Later noise that is larger is taken for detail."""


class Step(NamedTuple):
    """x' = slope x + std z."""

    slope: float
    std: float

    def variance(self, before: float) -> float:
        """The variance of x', where that of x is `before`."""
        return self.slope**2 * before + self.std**2


def leftover_noise(scheduler: "FlowMatchSDEDiscreteScheduler", algo: "DiffusionRolloutAlgoConfig") -> float:
    """Standard deviation that exploring adds to the finished latents, at the worst place that the window may have.

    sqrt(max(V - V_ode, 0)), V and V_ode the variance of the finished latents with the window and without it, for data
    N(0, DATA_STD^2). Their exact velocity is linear, E[e - x0 | x] = (s - (1-s) c^2) / ((1-s)^2 c^2 + s^2) x, so each
    step is a Gaussian's and the variance a recursion of one number.

    Args:
        scheduler: with its timesteps set.
        algo: kernel and window.
    """
    steps = len(scheduler.timesteps)
    ode = [_exact_step(scheduler, step, algo, 0.0) for step in range(steps)]
    explored = [_exact_step(scheduler, step, algo, algo.noise_level) for step in range(steps)]
    start = _variance_of_data(float(scheduler.sigmas[0]))
    low, high = algo.window_bounds(steps)
    size = algo.window_length(steps)
    if algo.sde_contiguous:
        stride = 1 if algo.sde_window_mode == "random" else size
        windows = [range(first, first + size) for first in range(low, high - size + 1, stride)]
        paths = [[explored[i] if i in window else ode[i] for i in range(steps)] for window in windows]
        largest = max(_variance_after(path, start) for path in paths)
    else:
        largest = _largest_variance(ode, explored, start, range(low, high), size)
    return math.sqrt(max(largest - _variance_after(ode, start), 0.0))


def step_without_log_prob(
    scheduler: "FlowMatchSDEDiscreteScheduler", algo: "DiffusionRolloutAlgoConfig"
) -> tuple[int, float, float] | None:
    """The first step that the window may cover at which the kernel has no log-prob that is a number: (the step, its
    noise level, the standard deviation there). None where each has one.

    Args:
        scheduler: with its timesteps set.
        algo: kernel and window.
    """
    for step in range(*algo.window_bounds(len(scheduler.timesteps))):
        _, log_prob, _, std = _asked(scheduler, step, algo, algo.noise_level)
        if not torch.isfinite(log_prob).all():
            return step, float(scheduler.sigmas[step]), std.item()
    return None


def _exact_step(
    scheduler: "FlowMatchSDEDiscreteScheduler", step: int, algo: "DiffusionRolloutAlgoConfig", noise_level: float
) -> Step:
    """The scheduler's own step, as a Gaussian's."""
    _, _, mean, std = _asked(scheduler, step, algo, noise_level)
    return Step(mean.item(), std.item())


def _asked(
    scheduler: "FlowMatchSDEDiscreteScheduler", step: int, algo: "DiffusionRolloutAlgoConfig", noise_level: float
) -> tuple[torch.Tensor, ...]:
    """(x', log-prob, mean, standard deviation), [1, 1] or [1], of the scheduler's own step from x = 1 to x' = 1."""
    s = float(scheduler.sigmas[step])
    velocity = (s - (1 - s) * DATA_STD**2) / _variance_of_data(s)
    one = torch.ones(1, 1)
    return scheduler.sample_previous_step(
        one,
        one * velocity,
        timestep=scheduler.timesteps[step : step + 1],
        noise_level=noise_level,
        prev_sample=one,
        sde_type=algo.sde_type,
        sde_options=algo.sde_options,
    )


def _variance_of_data(s: float) -> float:
    """Of (1-s) x0 + s e."""
    return (1 - s) ** 2 * DATA_STD**2 + s**2


def _variance_after(path: Sequence[Step], start: float) -> float:
    variance = start
    for step in path:
        variance = step.variance(variance)
    return variance


def _largest_variance(ode: Sequence[Step], explored: Sequence[Step], start: float, allowed: range, size: int) -> float:
    """Over all choices of `size` steps of `allowed`.

    A step's variance grows with the one before, so the largest after each number of explored steps is all that counts.
    """
    largest = {0: start}
    for index, (plain, noisy) in enumerate(zip(ode, explored, strict=True)):
        after = {count: plain.variance(variance) for count, variance in largest.items()}
        if index in allowed:
            for count, variance in largest.items():
                if count < size:
                    after[count + 1] = max(after.get(count + 1, 0.0), noisy.variance(variance))
        largest = after
    return largest[size]
