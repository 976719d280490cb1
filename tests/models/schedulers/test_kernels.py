# SPDX-License-Identifier: Apache-2.0
"""Reverse-process kernels against golden values, the papers' formulas in plain Python floats, and theory."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.registry import WrongAnswer
from models.schedulers import KERNELS, FlowMatchSDEDiscreteScheduler
from models.schedulers.kernels import ReverseStep, cps_step, dance_sde_step, sde_step

GOLDEN = [  # kernel, a, s, s', sigmas[1], mu, sd, log p at x' = 0.7
    ("sde", 0.7, 0.8, 0.6, 0.9, 0.4522, 0.626099034, -0.529014314),
    ("dance_sde", 0.3, 0.8, 0.6, 0.9, 0.55505, 0.134164079, 0.506128158),
    ("cps", 0.8, 0.8, 0.6, 0.9, 0.377580487, 0.570633910, -0.103954343),
    ("sde", 0.7, 1.0, 0.9, 0.9, 0.4075, 0.7, None),
]
LEVELS = {"sde": 0.7, "dance_sde": 0.3, "cps": 0.8}


def test_every_shipped_kernel_is_tested() -> None:
    """A kernel of a user's own may be registered beside them."""
    assert {name for name, kernel in KERNELS.items() if kernel.step.__module__ == sde_step.__module__} == set(LEVELS)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("name", "level", "s", "s_next", "s_one", "mean", "std", "log_prob"), GOLDEN)
def test_golden_scalars(
    name: str, level: float, s: float, s_next: float, s_one: float, mean: float, std: float, log_prob: float | None
) -> None:
    kernel, log_density = KERNELS[name]
    step = kernel(column(0.5), column(-0.3), column(s), column(s_next), column(s_one), level)
    assert step.mean.item() == pytest.approx(mean, abs=1e-9)
    assert step.std_dev_t.item() == pytest.approx(std, abs=1e-9)
    if log_prob is not None:
        assert log_density(column(0.7), step).item() == pytest.approx(log_prob, abs=1e-9)


# ---- the formulas, element by element


def reference_step(
    name: str, x: float, v: float, s: float, s_next: float, s_one: float, a: float
) -> tuple[float, float]:
    """(mean, standard deviation) of one element."""
    noise_hat = x + (1 - s) * v
    if name == "cps":
        std = s_next * math.sin(a * math.pi / 2)
        return (1 - s_next) * (x - s * v) + math.sqrt(s_next**2 - std**2) * noise_hat, std
    g = a if name == "dance_sde" else a * math.sqrt(s / (1 - (s_one if s == 1 else s)))
    delta = s_next - s
    return x + v * delta + g**2 / (2 * s) * noise_hat * delta, g * math.sqrt(-delta)


def reference_log_density(name: str, x_next: float, mean: float, std: float) -> float:
    """log p of one element."""
    if name == "cps":
        return -((x_next - mean) ** 2)
    return -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("name", LEVELS)
def test_kernels_equal_the_formulas_on_random_tensors(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sample, velocity, prev_sample = torch.randn(3, 4, 3, 5, generator=generator, dtype=torch.float64)
    sigma, sigma_next, s_one = [1.0, 0.9, 0.5, 0.02], [0.9, 0.75, 0.2, 0.01], 0.9
    sigmas = [torch.tensor(row, dtype=torch.float64).view(4, 1, 1) for row in (sigma, sigma_next, [s_one] * 4)]
    kernel, log_density = KERNELS[name]
    step = kernel(sample, velocity, *sigmas, LEVELS[name])
    log_prob = log_density(prev_sample, step)
    assert step.std_dev_t.shape == (4, 1, 1)
    for b in range(4):
        densities = []
        for i in range(3):
            for j in range(5):
                x, v = sample[b, i, j].item(), velocity[b, i, j].item()
                mean, std = reference_step(name, x, v, sigma[b], sigma_next[b], s_one, LEVELS[name])
                assert step.mean[b, i, j].item() == pytest.approx(mean, rel=1e-12, abs=1e-12)
                assert step.std_dev_t[b].item() == pytest.approx(std, rel=1e-12)
                densities.append(reference_log_density(name, prev_sample[b, i, j].item(), mean, std))
        assert log_prob[b].item() == pytest.approx(sum(densities) / 15, rel=1e-12)


def starts_near_one() -> list[float]:
    """Static shifts of two decimals whose first sigma is not 1 but 1 up to rounding."""
    shifts = [round(1 + i / 100, 2) for i in range(1201)]
    firsts = {shift: FlowMatchSDEDiscreteScheduler(shift=shift) for shift in shifts}
    for scheduler in firsts.values():
        scheduler.set_timesteps(10)
    return [shift for shift, scheduler in firsts.items() if scheduler.sigmas[0] != 1]


def test_a_schedule_that_starts_at_one_up_to_rounding_starts_at_one() -> None:
    shifts = starts_near_one()
    assert len(shifts) == 24
    assert {1.18, 1.43, 1.92, 2.36} < {*shifts}
    for shift in shifts:
        scheduler = FlowMatchSDEDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(10)
        x, v = torch.tensor([[0.5, -0.4]]), torch.tensor([[-0.3, 0.9]])
        _, log_prob, mean, std = scheduler.sample_previous_step(x, v, scheduler.timesteps[:1], prev_sample=x)
        s_next = scheduler.sigmas[1].item()
        expected = [
            reference_step("sde", *pair, 1.0, s_next, s_next, 0.7)
            for pair in zip((0.5, -0.4), (-0.3, 0.9), strict=True)
        ]
        assert std.item() == pytest.approx(expected[0][1], rel=1e-5)
        assert mean[0].tolist() == pytest.approx([m for m, _ in expected], rel=1e-5)
        assert log_prob.isfinite().all()


@pytest.mark.parametrize("shift", [1.0, 1.15, 3.0, 5.0, 12.0])
def test_published_shifts_start_at_one_exactly(shift: float) -> None:
    scheduler = FlowMatchSDEDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(10)
    assert scheduler.sigmas[0] == 1


def test_dance_sde_equals_its_score_form() -> None:
    """DanceGRPO's public code adds -eta^2/2 * score * D with score = -(x - (1-s) x0_hat) / s^2."""
    generator = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    sigma = torch.linspace(0.95, 0.2, 6, dtype=torch.float64)[:, None]
    sigma_next = sigma - 0.1
    eta = 0.3
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    delta = sigma_next - sigma
    expected = x + v * delta - 0.5 * eta**2 * score * delta
    step = dance_sde_step(x, v, sigma, sigma_next, sigma, eta)
    assert torch.allclose(step.mean, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [sde_step, dance_sde_step, cps_step])
def test_noise_level_zero_is_euler(kernel) -> None:
    generator = torch.Generator().manual_seed(2)
    x, v = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    sigma, sigma_next = column(1.0, 0.7, 0.3), column(0.9, 0.5, 0.1)
    step = kernel(x, v, sigma, sigma_next, column(0.9, 0.9, 0.9), 0.0)
    assert torch.allclose(step.mean, x + v * (sigma_next - sigma), rtol=0, atol=1e-12)
    assert not step.std_dev_t.any()


@pytest.mark.parametrize("name", LEVELS)
def test_log_prob_gradient_against_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    sample, velocity, prev_sample = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    kernel, log_density = KERNELS[name]
    sigmas = column(1.0, 0.6, 0.2), column(0.8, 0.5, 0.1), column(0.8, 0.8, 0.8)

    def log_prob(v: Tensor) -> Tensor:
        return log_density(prev_sample, kernel(sample, v, *sigmas, LEVELS[name]))

    velocity.requires_grad_()
    (gradient,) = torch.autograd.grad(log_prob(velocity).sum(), velocity)
    assert gradient.abs().min() > 0
    for position in [(b, i) for b in range(3) for i in range(4)]:
        shift = torch.zeros_like(velocity)
        shift[position] = 1e-5
        with torch.no_grad():
            difference = (log_prob(velocity + shift) - log_prob(velocity - shift)).sum() / 2e-5
        assert gradient[position].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-9)


# ---- the noise that a step adds


def scheduler_with(sigmas: list[float]) -> FlowMatchSDEDiscreteScheduler:
    scheduler = FlowMatchSDEDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=sigmas)
    return scheduler


@pytest.mark.parametrize("name", LEVELS)
def test_std_dev_t_is_the_std_of_the_noise(name: str) -> None:
    """Measured over 300 000 draws a row; rows differ in their timestep, so a wrong broadcast shows."""
    scheduler = scheduler_with([1.0, 0.8, 0.5, 0.2])
    rows, draws = 3, 300_000
    x, v = torch.tensor([0.5, -0.4, 0.2])[:, None].expand(rows, draws), torch.full((rows, draws), -0.3)
    prev_sample, _, _, std_dev_t = scheduler.sample_previous_step(
        x,
        v,
        timestep=scheduler.timesteps[:rows],
        generator=torch.Generator().manual_seed(4),
        noise_level=LEVELS[name],
        sde_type=name,
    )
    for row, (s, s_next) in enumerate([(1.0, 0.8), (0.8, 0.5), (0.5, 0.2)]):
        mean, std = reference_step(name, x[row, 0].item(), -0.3, s, s_next, 0.8, LEVELS[name])
        assert std_dev_t[row].item() == pytest.approx(std, rel=1e-6)
        assert prev_sample[row].std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * draws))
        assert prev_sample[row].mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(draws))


# ---- marginals of a Gaussian, for which the true velocity is known

DATA_MEAN, DATA_STD = 0.6, 0.5


def true_velocity(x: Tensor, s: float | Tensor, data_std: float = DATA_STD) -> Tensor:
    """E[e - x0 | x_s = x] for x0 ~ N(DATA_MEAN, data_std^2): both conditional means are linear in x."""
    deviation = (x - (1 - s) * DATA_MEAN) / ((1 - s) ** 2 * data_std**2 + s**2)
    return s * deviation - (DATA_MEAN + (1 - s) * data_std**2 * deviation)


def true_variance(s: float, data_std: float = DATA_STD) -> float:
    return (1 - s) ** 2 * data_std**2 + s**2


def exact_moments(name: str, sigmas: list[float], level: float, data_std: float = DATA_STD) -> list[tuple]:
    """(s, mean, variance) after every step, without sampling.

    With a velocity that is linear in x a step is x' = slope x + offset + sd z, so its moments follow from two probes.
    """
    kernel, _ = KERNELS[name]
    mean, variance = (1 - sigmas[0]) * DATA_MEAN, true_variance(sigmas[0], data_std)
    moments = []
    for s, s_next in pairwise(sigmas):
        probes, sigma = column(0.0, 1.0), column(s, s)
        step = kernel(
            probes, true_velocity(probes, sigma, data_std), sigma, column(s_next, s_next), column(0.9, 0.9), level
        )
        offset = step.mean[0].item()
        slope = step.mean[1].item() - offset
        mean, variance = offset + slope * mean, slope**2 * variance + step.std_dev_t[0].item() ** 2
        moments.append((s_next, mean, variance))
    return moments


def variance_error(name: str, steps: int) -> float:
    """Largest relative error of the variance on the way from s = 0.95 to 0.05."""
    sigmas = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64).tolist()
    moments = exact_moments(name, sigmas, LEVELS[name])
    return max(abs(variance / true_variance(s) - 1) for s, _, variance in moments)


@pytest.mark.parametrize("name", ["sde", "dance_sde"])
def test_sde_keeps_the_marginals_in_the_limit(name: str) -> None:
    """A drift that belongs to the diffusion leaves only a discretisation error, which halves with the step."""
    error, error_of_half_steps = variance_error(name, 200), variance_error(name, 400)
    assert error < 0.02
    assert error / error_of_half_steps == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("name", LEVELS)
def test_mean_is_kept_by_any_schedule(name: str) -> None:
    """At x = E[x] both e_hat and the noise vanish, and what is left of every kernel is exact."""
    for s, mean, _ in exact_moments(name, [0.95, 0.7, 0.45, 0.1], LEVELS[name]):
        assert mean == pytest.approx((1 - s) * DATA_MEAN, abs=1e-12)


def test_cps_is_exact_for_a_single_picture() -> None:
    """With one possible x0 the predicted noise is the true unit noise: any schedule keeps N((1-s) x0, s^2)."""
    for s, mean, variance in exact_moments("cps", [1.0, 0.7, 0.45, 0.1], 0.8, data_std=0.0):
        assert mean == pytest.approx((1 - s) * DATA_MEAN, abs=1e-12)
        assert variance == pytest.approx(s**2, rel=1e-12)


def test_cps_loses_variance_for_spread_data() -> None:
    """cps keeps coefficients, not marginals: E[x0|x] and E[e|x] have less variance than x0 and e.

    One step then gives ((1-s') (1-s) c^2 + s' s cos)^2 / var_s + (s' sin)^2, which is below var_s'.
    """
    s, s_next, angle = 0.6, 0.5, 0.8 * math.pi / 2
    ((_, _, variance),) = exact_moments("cps", [s, s_next], 0.8)
    kept = (1 - s_next) * (1 - s) * DATA_STD**2 + s_next * s * math.cos(angle)
    assert variance == pytest.approx(kept**2 / true_variance(s) + (s_next * math.sin(angle)) ** 2, rel=1e-12)
    assert variance < 0.95 * true_variance(s_next)


@pytest.mark.parametrize(
    ("name", "sigmas", "data_std"),
    [
        ("sde", torch.linspace(0.95, 0.05, 301).tolist(), DATA_STD),
        ("dance_sde", torch.linspace(0.95, 0.05, 301).tolist(), DATA_STD),
        ("cps", [1.0, 0.7, 0.45, 0.1], 0.0),
    ],
)
def test_sampled_marginals_stay_gaussian(name: str, sigmas: list[float], data_std: float) -> None:
    """40 000 paths through `step`: mean and variance within 5 Monte-Carlo errors at every step.

    300 steps leave a bias of the variance below 1 %, its Monte-Carlo error is 0.7 %, so 5 of them decide.
    """
    paths = 40_000
    scheduler = scheduler_with(sigmas[:-1])
    generator = torch.Generator().manual_seed(5)
    s = sigmas[0]
    x = (1 - s) * DATA_MEAN + math.sqrt(true_variance(s, data_std)) * torch.randn(1, paths, generator=generator)
    for step in range(len(sigmas) - 2):
        timestep = scheduler.timesteps[step]
        x = scheduler.step(
            true_velocity(x, sigmas[step], data_std),
            timestep,
            x,
            generator=generator,
            noise_level=LEVELS[name],
            sde_type=name,
        ).prev_sample
        s = sigmas[step + 1]
        variance = true_variance(s, data_std)
        assert x.mean().item() == pytest.approx((1 - s) * DATA_MEAN, abs=5 * math.sqrt(variance / paths))
        assert x.var().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / paths))


# ---- number formats and errors


@pytest.mark.parametrize("name", LEVELS)
def test_arithmetic_is_fp32_for_a_bf16_model(name: str) -> None:
    scheduler = scheduler_with([1.0, 0.6, 0.3])
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 50, generator=generator)
    v = torch.randn(2, 50, generator=generator).bfloat16()
    options = {"timestep": scheduler.timesteps[1], "sde_type": name, "noise_level": LEVELS[name]}
    from_bf16 = scheduler.sample_previous_step(x, v, generator=torch.Generator().manual_seed(7), **options)
    from_fp32 = scheduler.sample_previous_step(x, v.float(), generator=torch.Generator().manual_seed(7), **options)
    for low, full in zip(from_bf16, from_fp32, strict=True):
        assert low.dtype == torch.float32
        assert torch.equal(low, full)
    assert not torch.equal(from_bf16[0], from_bf16[0].bfloat16().float())


def test_unknown_kernel_lists_the_known_ones() -> None:
    scheduler = scheduler_with([1.0, 0.5])
    with pytest.raises(ValueError, match=r"'odd'.*cps, dance_sde, sde"):
        scheduler.sample_previous_step(torch.zeros(1, 2), torch.zeros(1, 2), sde_type="odd")


def gives_a_tuple(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """Mean and standard deviation, but no ReverseStep."""
    return sample, sigma


def gives_a_number(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """A standard deviation of no shape."""
    return ReverseStep(sample, noise_level)


def forgets_dimensions(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """A standard deviation [B], which would be of the last dimension."""
    return ReverseStep(sample, sigma.flatten())


def of_each_element(sample, velocity, sigma, sigma_next, sigma_max, noise_level):  # type: ignore[no-untyped-def]
    """A standard deviation of each element of the latent."""
    return ReverseStep(sample, sigma.expand_as(sample))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (gives_a_tuple, r"a tuple: return a ReverseStep\(mean, std_dev_t\)"),
        (gives_a_number, r"std_dev_t float for a sample \(2, 3, 4\): it should be a tensor of shape \(2, 1, 1\)"),
        (forgets_dimensions, r"std_dev_t \(2,\) for a sample \(2, 3, 4\): it should be a tensor of shape \(2, 1, 1\)"),
        (of_each_element, None),
    ],
)
def test_what_a_kernel_must_not_return_is_named(kernel: Any, message: str | None) -> None:
    scheduler = FlowMatchSDEDiscreteScheduler()
    scheduler.set_timesteps(4)
    sample, name = torch.zeros(2, 3, 4), f"{__name__}:{kernel.__name__}"

    def scored() -> Tensor:
        return scheduler.sample_previous_step(
            sample, sample, scheduler.timesteps[:1], prev_sample=sample, sde_type=name
        )[1]

    if message is None:
        assert scored().shape == (2,)
        return
    with pytest.raises(WrongAnswer, match=f"sde_type is '{name}', which returned {message}"):
        scored()


def test_timestep_outside_the_schedule() -> None:
    scheduler = scheduler_with([1.0, 0.5])
    timesteps = torch.tensor([500.0, 501.0])
    with pytest.raises(ValueError, match=r"501\.0 is not in"):
        scheduler.sample_previous_step(torch.zeros(2, 2), torch.zeros(2, 2), timestep=timesteps)


def test_per_token_timesteps_are_refused() -> None:
    scheduler = scheduler_with([1.0, 0.5])
    with pytest.raises(NotImplementedError, match="per_token_timesteps"):
        scheduler.step(torch.zeros(1, 2), 1000.0, torch.zeros(1, 2), per_token_timesteps=torch.ones(1, 2))
