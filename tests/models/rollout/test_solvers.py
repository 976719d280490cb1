# SPDX-License-Identifier: Apache-2.0
"""The solver of second order: diffusers' own, a flow whose paths are known, and its place in the sampling loop."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from models.families.qwen_image import QwenImage
from models.families.velocity import velocity_field
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.sampling import Denoising
from models.samples.trajectories import FinishedLatents
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.solvers import DpmSolver
from tests.support.helpers import model_config, rollout_request

MEAN, SPREAD = 0.7, 0.2


def velocity_of_a_gaussian(x: Tensor, sigma: float) -> Tensor:
    """E[noise - clean | x] where clean values are normal with `MEAN` and `SPREAD`."""
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    noise = sigma * (x - (1 - sigma) * MEAN) / variance
    clean = MEAN + (1 - sigma) * SPREAD**2 * (x - (1 - sigma) * MEAN) / variance
    return noise - clean


def shifted(steps: int, shift: float) -> list[float]:
    """The levels of a schedule of so many steps, 1 first and 0 last."""
    return [shift * s / (1 + (shift - 1) * s) for s in (1 - step / steps for step in range(steps + 1))]


def solve(start: Tensor, levels: list[float]) -> Tensor:
    solver, x = DpmSolver(), start
    for sigma, sigma_next in pairwise(levels):
        x = solver.step(x, velocity_of_a_gaussian(x, sigma), sigma, sigma_next)
    return x


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_its_steps_are_diffusers(shift: float) -> None:
    levels, start = shifted(7, shift), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    theirs = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero"
    )
    theirs.set_timesteps(7)
    theirs.sigmas, theirs.timesteps = torch.tensor(levels), 1000 * torch.tensor(levels[:-1])
    x, solver, y = start, DpmSolver(), start
    for timestep, (sigma, sigma_next) in zip(theirs.timesteps, pairwise(levels), strict=True):
        x = theirs.step(velocity_of_a_gaussian(x, sigma), timestep, x).prev_sample
        y = solver.step(y, velocity_of_a_gaussian(y, sigma), sigma, sigma_next)
        assert torch.allclose(y, x, rtol=0, atol=2e-6)


def path_of_a_gaussian(deviations: Tensor, sigma: float) -> Tensor:
    """x of the flow's paths, which keep their number of standard deviations from the mean."""
    return (1 - sigma) * MEAN + math.hypot((1 - sigma) * SPREAD, sigma) * deviations


def test_twice_the_steps_leave_a_quarter_of_the_error() -> None:
    """Between two levels at both of which there is noise: the first and last step of a whole schedule are Euler's."""
    deviations = torch.linspace(-2, 2, 9, dtype=torch.float64)
    start, exact = (path_of_a_gaussian(deviations, sigma) for sigma in (0.9, 0.1))
    schedules = [[0.9 - 0.8 * step / steps for step in range(steps + 1)] for steps in (64, 128, 256)]
    errors = [(solve(start, levels).double() - exact).abs().max().item() for levels in schedules]
    assert all(3.2 < coarse / fine < 5 for coarse, fine in pairwise(errors)), errors


@pytest.mark.parametrize("shift", [1.0, 1.18, 1.43, 1.58, 1.82])
def test_a_schedule_may_begin_at_one_up_to_rounding(shift: float) -> None:
    """Some shifts give 1 + 1.2e-7 or 1 - 6e-8 in fp32: the steps are those from 1."""
    scheduler = FlowMatchSDEDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(7)
    levels = [float(sigma) for sigma in scheduler.sigmas]
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(solve(start, levels), solve(start, [1.0, *levels[1:]]), rtol=0, atol=1e-5)


def test_a_first_step_from_pure_noise_and_the_last_one_are_eulers() -> None:
    x, v = torch.tensor([0.3]), torch.tensor([-0.8])
    solver = DpmSolver()
    for sigma, sigma_next, euler in ((1.0, 0.8, True), (0.8, 0.5, True), (0.5, 0.2, False), (0.2, 0.0, True)):
        stepped = solver.step(x, v * (1 + sigma), sigma, sigma_next)
        assert torch.allclose(stepped, x + (sigma_next - sigma) * v * (1 + sigma), atol=1e-7) == euler
        x = stepped


def test_a_rollout_takes_its_steps(tiny_model: Path) -> None:
    """The finished latents of an engine are those of the steps by hand, and neither Euler's nor another request's."""
    config = model_config(tiny_model, num_inference_steps=6, solver="dpm2")
    engine = DiffusersRolloutEngine(config)
    request = rollout_request(window=(), record_finished=True)
    _, found = engine.generate(request)
    _, euler = DiffusersRolloutEngine(model_config(tiny_model, num_inference_steps=6)).generate(request)
    assert isinstance(found, FinishedLatents)
    assert isinstance(euler, FinishedLatents)
    scheduler, solver, seen = QwenImage.build_scheduler(config), DpmSolver(), []
    denoising = engine.begin(request, config.pipeline, config.algo)
    x = denoising.latents
    velocity = velocity_field(QwenImage, engine.transformer, config, request.prompts, request.prompt_index)
    for timestep, (sigma, sigma_next) in zip(scheduler.timesteps, pairwise(scheduler.sigmas.tolist()), strict=True):
        with torch.no_grad():
            x = solver.step(x, velocity(x, timestep)[0], sigma, sigma_next)
        seen.append(x)
    assert torch.equal(found.latents, seen[-1])
    assert not torch.allclose(found.latents, euler.latents, atol=1e-4)
    assert torch.equal(engine.generate(request)[1].latents, found.latents)


def test_steps_with_noise_are_the_kernels_and_end_what_it_knows(tiny_model: Path) -> None:
    """Steps 2 and 3 of 6 explore: they are as with Euler's solver, and step 4 begins anew, step 5 does not."""
    request = rollout_request(window=(2, 3))
    paths = {}
    for solver in ("euler", "dpm2"):
        config = model_config(tiny_model, num_inference_steps=7, solver=solver)
        scheduler = QwenImage.build_scheduler(config)
        start = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(0))
        denoising = Denoising(scheduler, config, request, start)
        paths[solver] = []
        for step in range(6):
            denoising.latents = start  # the same before every step: what differs is the step alone
            denoising.advance(math.cos(step) * start.flip(1), None)
            paths[solver].append(denoising.latents)
    same = [torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(paths["euler"], paths["dpm2"], strict=True)]
    assert same == [True, True, True, True, True, False]
