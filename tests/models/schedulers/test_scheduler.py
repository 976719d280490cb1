# SPDX-License-Identifier: Apache-2.0
"""The SDE scheduler as a diffusers scheduler: the same schedule, the same Euler step, and what its steps return."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from models.schedulers import FlowMatchSDEDiscreteScheduler, FlowMatchSDEDiscreteSchedulerOutput

QWEN_IMAGE = {  # scheduler_config.json of Qwen/Qwen-Image
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def linear_sigmas(steps: int) -> list[float]:
    return np.linspace(1.0, 1 / steps, steps).tolist()


def sde_scheduler(steps: int = 5, shift: float = 3.0) -> FlowMatchSDEDiscreteScheduler:
    scheduler = FlowMatchSDEDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=linear_sigmas(steps))
    return scheduler


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the schedule


@pytest.mark.parametrize(
    ("config", "mu"),
    [({"shift": 1.0}, None), ({"shift": 3.0}, None), ({"use_dynamic_shifting": True}, 0.8), (QWEN_IMAGE, 0.61)],
)
def test_schedule_is_diffusers_own(config: dict[str, Any], mu: float | None) -> None:
    ours, theirs = FlowMatchSDEDiscreteScheduler(**config), FlowMatchEulerDiscreteScheduler(**config)
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(sigmas=linear_sigmas(10), mu=mu)
    assert torch.equal(ours.sigmas, theirs.sigmas)
    assert torch.equal(ours.timesteps, theirs.timesteps)


def test_golden_schedule_of_shift_3() -> None:
    golden = [1, 0.9643, 0.9231, 0.875, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0]
    assert sde_scheduler(10).sigmas.tolist() == pytest.approx(golden, abs=5e-5)


def test_dynamic_shift_is_the_logistic_one() -> None:
    """s <- exp(mu) / (exp(mu) + 1/s - 1), from the formula."""
    scheduler = FlowMatchSDEDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=linear_sigmas(8), mu=0.8)
    expected = [math.exp(0.8) / (math.exp(0.8) + 1 / s - 1) for s in linear_sigmas(8)] + [0.0]
    assert scheduler.sigmas.tolist() == pytest.approx(expected, abs=1e-6)


def test_noise_free_steps_are_diffusers_euler_steps() -> None:
    ours, theirs = sde_scheduler(), FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=linear_sigmas(5))
    x = y = normal(2, 6, 4)
    for step, timestep in enumerate(ours.timesteps):
        velocity = normal(2, 6, 4, seed=step + 1)
        x = ours.step(velocity, timestep, x, noise_level=0.0).prev_sample
        y = theirs.step(velocity, timestep, y).prev_sample
        assert torch.equal(x, y)


# ---- what a step returns


def test_step_returns_fields_or_their_tuple() -> None:
    velocity, x = normal(2, 6, 4), normal(2, 6, 4, seed=1)
    fields = sde_scheduler().step(velocity, 1000.0, x, generator=torch.Generator().manual_seed(2))
    assert isinstance(fields, FlowMatchSDEDiscreteSchedulerOutput)
    values = sde_scheduler().step(velocity, 1000.0, x, generator=torch.Generator().manual_seed(2), return_dict=False)
    names = ("prev_sample", "log_prob", "prev_sample_mean", "std_dev_t")
    for name, value in zip(names, values, strict=True):
        assert torch.equal(getattr(fields, name), value)
    assert [tuple(value.shape) for value in values] == [(2, 6, 4), (2,), (2, 6, 4), (2, 1, 1)]


def test_fields_belong_together() -> None:
    """prev_sample = mean + std z with the generator's z, and log_prob is its density."""
    step = sde_scheduler().step(normal(2, 6, 4), 1000.0, normal(2, 6, 4, seed=1), generator=generator_of(2))
    noise = torch.randn(2, 6, 4, generator=generator_of(2))
    assert torch.equal(step.prev_sample, step.prev_sample_mean + step.std_dev_t * noise)
    density = torch.distributions.Normal(step.prev_sample_mean.double(), step.std_dev_t.double())
    expected = density.log_prob(step.prev_sample.double()).mean((1, 2))
    assert torch.allclose(step.log_prob.double(), expected, rtol=0, atol=1e-5)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sqrt_dt_is_the_fifth_value_when_asked_for() -> None:
    scheduler = sde_scheduler()
    x, velocity, prev_sample = normal(2, 6, 4), normal(2, 6, 4, seed=1), normal(2, 6, 4, seed=2)
    options = {"timestep": scheduler.timesteps[[3, 1]], "prev_sample": prev_sample}
    four = scheduler.sample_previous_step(x, velocity, **options)
    five = scheduler.sample_previous_step(x, velocity, **options, return_sqrt_dt=True)
    assert len(four) == 4
    assert all(torch.equal(a, b) for a, b in zip(four, five[:4], strict=True))
    sigmas = [1 / (1 + (1 / s - 1) / 3) for s in (0.4, 0.2, 0.8, 0.6)]  # shift 3 of the four levels
    expected = [math.sqrt(sigmas[0] - sigmas[1]), math.sqrt(sigmas[2] - sigmas[3])]
    assert five[4].tolist() == pytest.approx(expected, rel=1e-5)


def test_log_prob_can_be_left_out() -> None:
    output = sde_scheduler().step(
        normal(2, 4), 1000.0, normal(2, 4, seed=1), generator=generator_of(0), return_logprobs=False
    )
    assert output.log_prob is None
    assert output.std_dev_t.min() > 0


def test_noise_free_step_has_no_log_prob() -> None:
    output = sde_scheduler().step(normal(2, 4), 1000.0, normal(2, 4, seed=1), noise_level=0.0)
    assert output.log_prob is None
    assert torch.equal(output.prev_sample, output.prev_sample_mean)
    assert output.std_dev_t.tolist() == [[0.0], [0.0]]


def test_steps_advance_and_begin_where_told() -> None:
    scheduler = sde_scheduler()
    x = normal(1, 4)
    scheduler.set_begin_index(2)
    for index in (2, 3):
        output = scheduler.step(normal(1, 4, seed=1), scheduler.timesteps[index], x, noise_level=0.0)
        delta = (scheduler.sigmas[index + 1] - scheduler.sigmas[index]).item()
        assert torch.allclose(output.prev_sample - x, delta * normal(1, 4, seed=1), atol=1e-6)
        assert scheduler.step_index == index + 1


@pytest.mark.parametrize("timestep", [0, torch.tensor(1)])
def test_the_number_of_a_step_is_not_its_timestep(timestep: int | torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"timestep is .*, an integer: give an element of scheduler.timesteps"):
        sde_scheduler().step(normal(1, 4, seed=1), timestep, normal(1, 4))


# ---- batches


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
def test_rows_may_have_their_own_timesteps(sde_type: str) -> None:
    scheduler = sde_scheduler()
    x, velocity, prev_sample = normal(3, 6, 4), normal(3, 6, 4, seed=1), normal(3, 6, 4, seed=2)
    timesteps = scheduler.timesteps[[2, 0, 3]]
    options = {"sde_type": sde_type, "return_sqrt_dt": True}
    batch = scheduler.sample_previous_step(x, velocity, timesteps, prev_sample=prev_sample, **options)
    for row in range(3):
        one = slice(row, row + 1)
        single = scheduler.sample_previous_step(
            x[one], velocity[one], timesteps[row], prev_sample=prev_sample[one], **options
        )
        for whole, part in zip(batch, single, strict=True):
            assert torch.equal(whole[one], part)


def test_a_generator_a_sample_gives_each_row_its_own_noise() -> None:
    scheduler = sde_scheduler()
    x, velocity = normal(3, 6, 4), normal(3, 6, 4, seed=1)
    options = {"timestep": scheduler.timesteps[1]}
    listed, *_ = scheduler.sample_previous_step(x, velocity, generator=[generator_of(s) for s in (5, 6, 7)], **options)
    for row, seed in enumerate((5, 6, 7)):
        one = slice(row, row + 1)
        alone, *_ = scheduler.sample_previous_step(x[one], velocity[one], generator=generator_of(seed), **options)
        assert torch.equal(listed[one], alone)
    shared, _, mean, std_dev_t = scheduler.sample_previous_step(x, velocity, generator=generator_of(5), **options)
    assert torch.equal(shared, mean + std_dev_t * normal(3, 6, 4, seed=5))


# ---- gradients


def test_no_gradient_flows_through_the_drawn_sample() -> None:
    scheduler = sde_scheduler()
    velocity = normal(2, 6, 4).requires_grad_()
    x = normal(2, 6, 4, seed=1)
    drawn, log_prob, mean, _ = scheduler.sample_previous_step(
        x, velocity, scheduler.timesteps[1], generator=generator_of(0)
    )
    assert not drawn.requires_grad
    assert mean.requires_grad
    # If x' moved with the mean, the log-density of x' would not depend on the velocity at all.
    (gradient,) = torch.autograd.grad(log_prob.sum(), velocity)
    _, scored, _, _ = scheduler.sample_previous_step(x, velocity, scheduler.timesteps[1], prev_sample=drawn)
    (expected,) = torch.autograd.grad(scored.sum(), velocity)
    assert gradient.abs().max() > 1e-3
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("noise_level", [0.7, 0.0])
def test_no_gradient_flows_through_a_given_sample(noise_level: float) -> None:
    scheduler = sde_scheduler()
    given = normal(2, 6, 4, seed=2).bfloat16().requires_grad_()
    velocity = normal(2, 6, 4).requires_grad_()
    prev_sample, log_prob, mean, _ = scheduler.sample_previous_step(
        normal(2, 6, 4, seed=1), velocity, scheduler.timesteps[1], prev_sample=given, noise_level=noise_level
    )
    assert torch.equal(prev_sample, given.detach().float())
    assert prev_sample.dtype == torch.float32
    assert not prev_sample.requires_grad
    scored = mean if log_prob is None else log_prob
    assert torch.autograd.grad(scored.sum(), given, allow_unused=True) == (None,)


def test_a_timestep_of_another_schedule_is_refused() -> None:
    scheduler, sample = sde_scheduler(), normal(2, 3, 4)
    foreign = torch.stack([scheduler.timesteps[0], torch.tensor(123.5)])
    for refuse in (
        lambda: scheduler.sample_previous_step(sample, sample, foreign, prev_sample=sample),
        lambda: scheduler.sqrt_dt(foreign),
        lambda: scheduler.check_timesteps(foreign[None]),
    ):
        with pytest.raises(ValueError, match=r"timestep 123.5 is not in this scheduler's schedule \[1000.0, "):
            refuse()
    scheduler.check_timesteps(scheduler.timesteps.expand(3, -1))


def test_where_it_is_not_looked_for_it_makes_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose numbers are not read at each step."""
    scheduler, sample = sde_scheduler(), normal(2, 3, 4)
    monkeypatch.setattr(scheduler, "_refuse_missing", lambda timesteps, is_there: None)
    foreign = torch.stack([scheduler.timesteps[1], torch.tensor(123.5)])
    _, log_prob, mean, std_dev_t = scheduler.sample_previous_step(sample, sample, foreign, prev_sample=sample)
    for of_rows in (log_prob, mean, std_dev_t, scheduler.sqrt_dt(foreign)):
        assert of_rows[0].isfinite().all()
        assert of_rows[1].isnan().all()


def test_another_schedule_has_other_sigmas() -> None:
    """They are copied once for each."""
    scheduler = sde_scheduler(5)
    before = scheduler.sqrt_dt(scheduler.timesteps)
    scheduler.set_timesteps(sigmas=linear_sigmas(8))
    assert len(scheduler.sqrt_dt(scheduler.timesteps)) == 8
    assert not torch.equal(scheduler.sqrt_dt(scheduler.timesteps)[:5], before)
