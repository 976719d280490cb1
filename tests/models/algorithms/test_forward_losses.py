# SPDX-License-Identifier: Apache-2.0
"""Losses of the forward process and of distillation: golden values, the formulas in plain Python floats, gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from models.algorithms import (
    AdvantageWeightedMatchingLoss,
    DiffusionNFTLoss,
    DistillFlowMatchingLoss,
    DistillKLLoss,
    DPOLoss,
    check_loss_inputs,
    get_diffusion_loss_fn,
)
from models.algorithms.forward_process import matching_log_prob
from models.algorithms.losses import velocity_distance
from models.algorithms.old_policy import SCHEDULES, is_copied, old_policy_decay
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, ForwardProcessConfig

SAMPLES, SHAPE = 12, (5, 3)
WEIGHTINGS = ("uniform", "t", "t2", "huber", "ghuber", "adaptive")


def config(**settings: Any) -> DiffusionActorConfig:
    return DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(**settings))


def random_inputs(seed: int = 0) -> dict[str, Tensor]:
    """Float64 inputs of every kind; the advantages reach beyond the clamp at 5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clean, noise = normal(SAMPLES, *SHAPE), normal(SAMPLES, *SHAPE)
    sigmas = torch.linspace(0.05, 1.0, SAMPLES, dtype=torch.float64)
    t = sigmas.view(-1, 1, 1)
    velocity = noise - clean + normal(SAMPLES, *SHAPE)
    return {
        "clean_latents": clean,
        "noise": noise,
        "noisy_latents": (1 - t) * clean + t * noise,
        "sigmas": sigmas,
        "velocity": velocity,
        "old_velocity": velocity + 0.5 * normal(SAMPLES, *SHAPE),
        "ema_velocity": velocity + 0.5 * normal(SAMPLES, *SHAPE),
        "ref_velocity": velocity + 0.5 * normal(SAMPLES, *SHAPE),
        "advantages": torch.linspace(-7, 7, SAMPLES, dtype=torch.float64),
    }


def of(loss: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a loss's formula takes out of `given`."""
    return {name: given[name] for name in (*loss.required_model_output_keys, *loss.required_data_keys)}


def row_of(given: dict[str, Tensor], row: int) -> dict[str, Any]:
    """One sample as Python floats and flat lists of them."""
    one = {name: tensor[row].flatten().tolist() for name, tensor in given.items()}
    return one | {name: given[name][row].item() for name in ("sigmas", "advantages")}


def mean_square(one: list[float], other: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)


def target_of(one: dict[str, Any]) -> list[float]:
    return [e - x for e, x in zip(one["noise"], one["clean_latents"], strict=True)]


def check_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient, which must be that of central differences."""
    leaf = at.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf, eps=1e-6, atol=1e-7, rtol=1e-5)
    return torch.autograd.grad(loss(leaf), leaf)[0]


# ---- DPO


def with_errors(*errors: float) -> Tensor:
    """[B, 4] velocities whose matching error is the given one where x0 = e = 0."""
    return torch.tensor(errors, dtype=torch.float64).sqrt()[:, None].expand(-1, 4)


def test_dpo_golden_value() -> None:
    """beta 100, m_w .30, ref_w .31, m_l .35, ref_l .34: inside 1.0, loss .313262."""
    zero = torch.zeros(2, 4, dtype=torch.float64)
    loss, metrics = DPOLoss.compute_loss(
        velocity=with_errors(0.30, 0.35),
        ref_velocity=with_errors(0.31, 0.34),
        clean_latents=zero,
        noise=zero,
        config=config(dpo_beta=100.0),
    )
    assert metrics["rewards/margins"].item() == pytest.approx(1.0, abs=1e-9)
    assert loss.item() == pytest.approx(0.313262, abs=5e-7)
    assert metrics["rewards/chosen"].item() == pytest.approx(0.5)
    assert metrics["rewards/rejected"].item() == pytest.approx(-0.5)
    assert metrics["implicit_acc"].item() == 1.0


@pytest.mark.parametrize("beta", [2.0, 2000.0])
def test_dpo_equals_the_formula(beta: float) -> None:
    """At beta 2000 the sigmoid saturates on both sides, where log(sigmoid) written out would be -inf."""
    given = random_inputs()
    losses, margins = [], []
    for pair in range(SAMPLES // 2):
        inside = 0.0
        for row, sign in ((2 * pair, 1), (2 * pair + 1, -1)):
            one = row_of(given, row)
            error, ref = (mean_square(one[name], target_of(one)) for name in ("velocity", "ref_velocity"))
            inside -= sign * beta / 2 * (error - ref)
        margins.append(inside)
        losses.append(math.log1p(math.exp(-inside)) if inside > 0 else -inside + math.log1p(math.exp(inside)))
    loss, metrics = DPOLoss.compute_loss(**of(DPOLoss, given), config=config(dpo_beta=beta))
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-10)
    assert metrics["rewards/margins"].item() == pytest.approx(sum(margins) / len(margins), rel=1e-10)
    assert metrics["implicit_acc"].item() == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert 0 < metrics["implicit_acc"] < 1


def test_dpo_gradient_pulls_the_chosen_in_and_pushes_the_rejected_away() -> None:
    given = of(DPOLoss, random_inputs())
    gradient = check_gradient(
        lambda v: DPOLoss.compute_loss(**given | {"velocity": v}, config=config(dpo_beta=2.0))[0], given["velocity"]
    )
    outwards = given["velocity"] - (given["noise"] - given["clean_latents"])
    along = (gradient * outwards).flatten(1).sum(1)
    assert (along[0::2] > 0).all()
    assert (along[1::2] < 0).all()


def test_dpo_refuses_half_a_pair() -> None:
    three = {name: tensor[:3] for name, tensor in of(DPOLoss, random_inputs()).items()}
    with pytest.raises(ValueError, match="compares pairs but was given 3 samples, an odd number"):
        DPOLoss.compute_loss(**three, config=config())


# ---- DiffusionNFT


def test_nft_golden_value() -> None:
    """x0=.2 xt=.7 t=.5 v=.9 v_old=1.1 b=.5 r=.7 c=5: v+ = 1.0, v- = 1.2, x0+ = .2, x0- = .1, loss 0.3."""

    def one(value: float) -> Tensor:
        return torch.full((1, 4), value, dtype=torch.float64)

    loss, metrics = DiffusionNFTLoss.compute_loss(
        velocity=one(0.9),
        old_velocity=one(1.1),
        clean_latents=one(0.2),
        noisy_latents=one(0.7),
        sigmas=torch.tensor([0.5], dtype=torch.float64),
        advantages=torch.tensor([2.0], dtype=torch.float64),  # r = 2 / 10 + 1/2
        config=config(nft_beta=0.5, adv_clip_max=5.0),
    )
    assert loss.item() == pytest.approx(0.3, rel=1e-6)
    assert metrics["nft_positive_error"].item() == pytest.approx(0.0, abs=1e-9)  # x0+ = x0, and w is not 0
    assert metrics["nft_negative_error"].item() == pytest.approx(0.1)  # (x0- - x0)^2 / |x0- - x0|
    assert metrics["nft_share"].item() == pytest.approx(0.7)


def nft_sides(one: dict[str, Any], b: float) -> list[list[float]]:
    """x+ - x0 and x- - x0 of one sample."""
    sides, both = [], (one["velocity"], one["old_velocity"])
    for sign in (1, -1):
        velocity = [sign * b * v + (1 - sign * b) * old for v, old in zip(*both, strict=True)]
        predicted = [xt - one["sigmas"] * v for xt, v in zip(one["noisy_latents"], velocity, strict=True)]
        sides.append([x - x0 for x, x0 in zip(predicted, one["clean_latents"], strict=True)])
    return sides


def nft_reference(given: dict[str, Tensor], b: float, c: float, weights: list[list[float]] | None = None) -> float:
    """The loss in Python floats; `weights` of each sample's two sides, if they are not the formula's own."""
    total = 0.0
    for row in range(SAMPLES):
        one = row_of(given, row)
        share = min(max(one["advantages"], -c), c) / (2 * c) + 0.5
        for side, (off, factor) in enumerate(zip(nft_sides(one, b), (share, 1 - share), strict=True)):
            own = max(sum(abs(x) for x in off) / len(off), 1e-5)
            weight = own if weights is None else weights[row][side]
            total += factor * sum(x * x / weight for x in off) / len(off) / b
    return c * total / SAMPLES


@pytest.mark.parametrize("c", [5.0, 1.0])
@pytest.mark.parametrize("b", [1.0, 0.1])
def test_nft_equals_the_formula(b: float, c: float) -> None:
    given = random_inputs()
    settings = config(nft_beta=b, adv_clip_max=c)
    loss, _ = DiffusionNFTLoss.compute_loss(**of(DiffusionNFTLoss, given), config=settings)
    assert loss.item() == pytest.approx(nft_reference(given, b, c), rel=1e-11)


@pytest.mark.parametrize("b", [1.0, 0.1])
def test_nft_gradient_holds_its_normaliser_fixed(b: float) -> None:
    """Differences of the formula with w as it is at this point: w is detached, so they are not those of the loss."""
    given = random_inputs()
    leaf = given["velocity"].clone().requires_grad_()
    inputs = of(DiffusionNFTLoss, given) | {"velocity": leaf}
    loss, _ = DiffusionNFTLoss.compute_loss(**inputs, config=config(nft_beta=b))
    (gradient,) = torch.autograd.grad(loss, leaf)
    sides = [nft_sides(row_of(given, row), b) for row in range(SAMPLES)]
    weights = [[max(sum(abs(x) for x in off) / len(off), 1e-5) for off in pair] for pair in sides]
    moving = 0
    for row, token, channel in [(0, 0, 0), (3, 2, 1), (7, 4, 2), (11, 1, 0)]:
        values = []
        for held in (weights, None):
            ends = []
            for step in (1e-5, -1e-5):
                moved = given["velocity"].clone()
                moved[row, token, channel] += step
                ends.append(nft_reference(given | {"velocity": moved}, b, 5.0, held))
            values.append((ends[0] - ends[1]) / 2e-5)
        assert gradient[row, token, channel].item() == pytest.approx(values[0], rel=1e-5, abs=1e-9)
        moving += values[1] != pytest.approx(values[0], rel=1e-3)
    assert moving >= 3


def test_nft_at_the_old_policy_says_nothing_of_the_reward_but_learns_from_it() -> None:
    """v = v_old: the value is the same for every advantage, the gradient proportional to it."""
    given = of(DiffusionNFTLoss, random_inputs())
    values, gradients = [], []
    for factor in (-1.0, 0.0, 0.5, 1.0):
        leaf = given["old_velocity"].clone().requires_grad_()
        advantages = torch.full((SAMPLES,), 4.0 * factor, dtype=torch.float64)
        inputs = given | {"velocity": leaf, "advantages": advantages}
        loss, metrics = DiffusionNFTLoss.compute_loss(**inputs, config=config())
        assert metrics["old_deviation"].item() == 0.0
        values.append(loss.item())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert values == pytest.approx([values[0]] * 4, rel=1e-12)
    assert gradients[3].abs().max() > 1e-3
    assert gradients[1].abs().max() < 1e-15
    assert torch.allclose(gradients[0], -gradients[3], rtol=1e-10, atol=1e-15)
    assert torch.allclose(gradients[2], 0.5 * gradients[3], rtol=1e-10, atol=1e-15)


def test_nft_leads_towards_good_samples_and_away_from_bad_ones() -> None:
    """Down the gradient, the prediction of x0 comes nearer to x0 if the sample is good and leaves it if it is bad."""
    given = of(DiffusionNFTLoss, random_inputs())
    for advantage, nearer in ((5.0, True), (-5.0, False)):
        leaf = given["old_velocity"].clone().requires_grad_()
        inputs = given | {"velocity": leaf, "advantages": torch.full((SAMPLES,), advantage, dtype=torch.float64)}
        DiffusionNFTLoss.compute_loss(**inputs, config=config())[0].backward()
        assert leaf.grad is not None
        t = given["sigmas"].view(-1, 1, 1)
        off, step = given["noisy_latents"] - t * leaf.detach() - given["clean_latents"], t * leaf.grad
        assert (((off + 1e-3 * step) ** 2).flatten(1).mean(1) < (off**2).flatten(1).mean(1)).all() == nearer


@pytest.mark.parametrize(
    ("b", "off", "bias"), [(0.1, 0, 0), (0.3, 0, 0), (1.0, 0, 0), (0.3, 0.1, 0.4), (0.3, 0.1, -0.4)]
)
def test_nft_ends_where_each_sample_weighs_its_advantage_over_b_and_c(b: float, off: float, bias: float) -> None:
    """At one point x_t, as docs/algorithms.md has it; also where the old policy does not point towards the mean of the
    samples, and where these are better (`bias`) or worse than others. In many dimensions and of many samples, so that
    all normalisers are equal and stay so."""
    generator, samples, size, c = torch.Generator().manual_seed(3), 200, 4_000, 5.0
    towards, noisy = torch.randn(2, samples, size, generator=generator, dtype=torch.float64).unbind()
    noisy, old = noisy[:1].expand(samples, -1), towards.mean(0) + off * noisy[1]
    advantages = 0.2 * torch.randn(samples, generator=generator, dtype=torch.float64)
    advantages += bias - advantages.mean()
    given = {"old_velocity": old.expand(samples, -1), "noisy_latents": noisy, "clean_latents": noisy - 0.5 * towards}
    given |= {"sigmas": torch.full((samples,), 0.5, dtype=torch.float64), "advantages": advantages}

    def slope(velocity: Tensor) -> Tensor:
        leaf = velocity.clone().requires_grad_()
        settings = config(nft_beta=b, adv_clip_max=c)
        loss, _ = DiffusionNFTLoss.compute_loss(velocity=leaf.expand(samples, -1), config=settings, **given)
        return torch.autograd.grad(loss, leaf)[0]

    found, along = old.clone(), torch.randn(size, generator=generator, dtype=torch.float64)
    for _ in range(8):  # Newton's steps: the curvature is one number
        curvature = ((slope(found + 1e-3 * along) - slope(found)) @ along / (along @ along)).item() / 1e-3
        found = found - slope(found) / curvature
    expected = old + (advantages[:, None] * (towards - old)).mean(0) / (b * c)
    assert (found - expected).norm() < 0.04 * (expected - old).norm()
    before, after = (old - towards.mean(0)).norm(), (found - towards.mean(0)).norm()
    assert off == 0 or (after < before) == (bias > 0), "what was wrong where the samples are bad gets worse"


def test_nft_divides_by_no_zero() -> None:
    """An exact prediction has normaliser 1e-5, loss 0 and a finite gradient."""
    given = of(DiffusionNFTLoss, random_inputs())
    exact = (given["noisy_latents"] - given["clean_latents"]) / given["sigmas"].view(-1, 1, 1)
    leaf = exact.clone().requires_grad_()
    loss, _ = DiffusionNFTLoss.compute_loss(**given | {"velocity": leaf, "old_velocity": exact}, config=config())
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-20)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


# ---- AWM


def x0_errors(velocity: list[float], one: dict[str, Any]) -> list[float]:
    """(x_t - t v) - x0."""
    triples = zip(one["noisy_latents"], velocity, one["clean_latents"], strict=True)
    return [xt - one["sigmas"] * v - x0 for xt, v, x0 in triples]


def normaliser(velocity: list[float], one: dict[str, Any]) -> float:
    """mean |x - x0| of the predicted x, V-GRPO's and DiffusionNFT's."""
    off = x0_errors(velocity, one)
    return max(sum(abs(x) for x in off) / len(off), 1e-5)


def awm_log_prob(velocity: list[float], one: dict[str, Any], weighting: str, held: float | None = None) -> float:
    """`held`: the adaptive weighting's normaliser, if it is not the velocity's own."""
    m, t = mean_square(velocity, target_of(one)), one["sigmas"]
    if weighting == "adaptive":
        off = x0_errors(velocity, one)
        return -sum(x * x for x in off) / len(off) / (held or normaliser(velocity, one))
    return {
        "uniform": -m,
        "t": -t * m,
        "t2": -t * t * m,
        "huber": -(math.sqrt(m + 1e-10) - 1e-5) * t,
        "ghuber": -((m + 1e-10) ** 0.25 - (1e-10) ** 0.25) * t / 0.25,
    }[weighting]


def awm_reference(
    given: dict[str, Tensor], weighting: str, eps: float, coef: float, at: Tensor | None = None
) -> tuple[float, int]:
    """(the loss in Python floats, how many samples the clip holds back); `at`: velocities whose normaliser is held."""
    total, held = 0.0, 0
    for row in range(SAMPLES):
        one = row_of(given, row)
        fixed = None if at is None else normaliser(at[row].flatten().tolist(), one)
        own = awm_log_prob(one["velocity"], one, weighting, fixed)
        log_ratio = own - awm_log_prob(one["old_velocity"], one, weighting)
        ratio, advantage = math.exp(log_ratio), min(max(one["advantages"], -5.0), 5.0) / 5.0
        clipped = min(max(ratio, 1 - eps), 1 + eps)
        held += advantage * clipped < advantage * ratio
        total += max(-advantage * ratio, -advantage * clipped)
        total += coef * mean_square(one["velocity"], one["ema_velocity"])
    return total / SAMPLES, held


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("eps", "coef"), [(1.0, 1.0), (0.05, 0.0)])
def test_awm_equals_the_formula(weighting: Any, eps: float, coef: float) -> None:
    given = random_inputs()
    settings = config(awm_weighting=weighting, clip_ratio=eps, awm_ema_coef=coef, adv_clip_max=5.0)
    loss, metrics = AdvantageWeightedMatchingLoss.compute_loss(
        **of(AdvantageWeightedMatchingLoss, given), config=settings
    )
    expected, held = awm_reference(given, weighting, eps, coef)
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # the engine's losses are fp32
    assert (held > 0) == (eps < 1)
    assert metrics["ema_distance"].item() == pytest.approx(
        sum(mean_square(r["velocity"], r["ema_velocity"]) for r in (row_of(given, i) for i in range(SAMPLES))) / SAMPLES
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_awm_gradient(weighting: Any) -> None:
    """Differences of the reference; samples that the clip holds back feel only the slower copy."""
    given = random_inputs()
    settings = config(awm_weighting=weighting, clip_ratio=0.05, awm_ema_coef=0.3)
    leaf = given["velocity"].clone().requires_grad_()
    inputs = of(AdvantageWeightedMatchingLoss, given) | {"velocity": leaf}
    loss, _ = AdvantageWeightedMatchingLoss.compute_loss(**inputs, config=settings)
    (gradient,) = torch.autograd.grad(loss, leaf)
    for row in range(SAMPLES):
        ends = []
        for step in (1e-5, -1e-5):
            moved = given["velocity"].clone()
            moved[row, 1, 2] += step
            # The adaptive weighting's normaliser is detached: held where it was.
            ends.append(awm_reference(given | {"velocity": moved}, weighting, 0.05, 0.3, at=given["velocity"])[0])
        assert gradient[row, 1, 2].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_awm_adaptive_is_diffusion_nfts_error() -> None:
    """lp = -mean (x - x0)^2 / mean |x - x0|: of b = 1 the positive side of DiffusionNFT, in float64."""
    given = random_inputs()
    target = given["noise"] - given["clean_latents"]
    lp = matching_log_prob(given["velocity"], target, given["sigmas"], "adaptive")
    errors = DiffusionNFTLoss._error(given["velocity"], given["clean_latents"], given["noisy_latents"], given["sigmas"])
    assert torch.allclose(lp, -errors, rtol=1e-12, atol=0)
    scale = (target - given["velocity"]).abs().flatten(1).mean(1)
    shorter = -given["sigmas"] * ((target - given["velocity"]) ** 2).flatten(1).mean(1) / scale
    assert torch.allclose(lp, shorter, rtol=1e-12, atol=0)


def test_awm_adaptive_divides_by_no_zero() -> None:
    """An exact prediction, and t = 0, where x is x0 whatever the velocity."""
    given = random_inputs()
    target = given["noise"] - given["clean_latents"]
    sigmas = given["sigmas"].clone()
    sigmas[1] = 0.0
    leaf = torch.cat([target[:1], given["velocity"][1:]]).requires_grad_()
    lp = matching_log_prob(leaf, target, sigmas, "adaptive")
    (gradient,) = torch.autograd.grad(lp.sum(), leaf)
    assert lp[:2].abs().max() == 0.0
    assert gradient.isfinite().all()
    assert gradient[:2].abs().max() == 0.0


# ---- distillation and the distance to the reference


def test_distill_kl_is_the_divergence_to_the_teachers_step() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, teacher = torch.randn(2, SAMPLES, *SHAPE, generator=generator, dtype=torch.float64)
    std = 0.2 + torch.rand(SAMPLES, 1, 1, generator=generator, dtype=torch.float64)

    def loss(value: Tensor) -> Tensor:
        return DistillKLLoss.compute_loss(prev_sample_mean=value, teacher_prev_sample_mean=teacher, std_dev_t=std)[0]

    assert loss(mean).item() == pytest.approx(kl_divergence(Normal(mean, std), Normal(teacher, std)).mean().item())
    gradient = check_gradient(loss, mean)
    assert torch.allclose(gradient, (mean - teacher) / std**2 / mean.numel(), rtol=1e-10, atol=0)
    assert loss(teacher).item() == 0.0


@pytest.mark.parametrize(
    "distance",
    [lambda v, other: DistillFlowMatchingLoss.compute_loss(velocity=v, teacher_velocity=other)[0], velocity_distance],
    ids=["distill_fm_mse", "use_kl_loss"],
)
def test_the_distance_of_velocities(distance: Callable[[Tensor, Tensor], Tensor]) -> None:
    given = random_inputs()
    rows = [row_of(given, row) for row in range(SAMPLES)]
    expected = sum(mean_square(row["velocity"], row["ref_velocity"]) for row in rows) / SAMPLES
    assert distance(given["velocity"], given["ref_velocity"]).item() == pytest.approx(expected, rel=1e-12)
    gradient = check_gradient(lambda v: distance(v, given["ref_velocity"]), given["velocity"])
    difference = given["velocity"] - given["ref_velocity"]
    assert torch.allclose(gradient, 2 * difference / difference.numel(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["dpo", "diffusion_nft", "awm", "distill_fm_mse"])
def test_calling_a_loss_gives_it_what_it_declared(name: str) -> None:
    loss, given = get_diffusion_loss_fn(name), random_inputs()
    given["teacher_velocity"] = given["ref_velocity"]
    data = {key: value for key, value in given.items() if key != "velocity"}
    result = loss(config=config(), model_output={"velocity": given["velocity"]}, data=data)
    settings = {} if name == "distill_fm_mse" else {"config": config()}
    assert result.loss.item() == loss.compute_loss(**of(loss, given), **settings)[0].item()


# ---- the old policy


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("copy", {0: 0.0, 1: 0.0, 10_000: 0.0}),
        ("linear_to_0_3", {0: 0.0, 100: 0.1, 299: 0.299, 300: 0.3, 5000: 0.3}),
        ("linear_to_0_5", {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 501: 0.5}),
        (
            "delayed_linear_to_0_999",
            {0: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 9999: 0.999},
        ),
    ],
)
def test_old_policy_schedules(schedule: Any, expected: dict[int, float]) -> None:
    settings = ForwardProcessConfig(old_policy_decay_schedule=schedule)
    assert {step: old_policy_decay(step, settings) for step in expected} == pytest.approx(expected)


def test_a_constant_decay_replaces_the_schedule() -> None:
    settings = ForwardProcessConfig(old_policy_decay=0.25, old_policy_decay_schedule="linear_to_0_5")
    assert [old_policy_decay(step, settings) for step in (0, 10_000)] == [0.25, 0.25]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("decay", [None, 0.0, 0.25])
@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_an_old_policy_is_taken_for_the_policy_only_where_it_is_that_after_every_iteration(
    schedule: Any, decay: float | None, interval: int
) -> None:
    """Followed through a hundred iterations of a step each, in which the policy is the number of the last."""
    settings = ForwardProcessConfig(
        old_policy_decay=decay, old_policy_decay_schedule=schedule, old_policy_update_interval=interval
    )
    old, equal = 0.0, []
    for update in range(1, 101):
        if update % interval == 0:
            kept = old_policy_decay(update, settings)
            old = kept * old + (1 - kept) * update
        equal.append(old == update)
    assert is_copied(settings) == all(equal)


# ---- what a loss may ask for


@pytest.mark.parametrize(
    ("name", "teacher", "message"),
    [
        ("distill_kl", False, "'distill_kl' needs a teacher: set actor.teacher_path"),
        ("distill_fm_mse", False, "'distill_fm_mse' needs a teacher: set actor.teacher_path"),
        ("dpo", True, "'dpo' has no use for a teacher: leave out actor.teacher_path"),
        ("flow_grpo", True, "'flow_grpo' has no use for a teacher: leave out actor.teacher_path"),
    ],
)
def test_a_teacher_that_is_missing_or_of_no_use(name: str, teacher: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss_inputs(name, use_kl_loss=False, teacher=teacher)
    check_loss_inputs(name, use_kl_loss=False, teacher=not teacher)


@pytest.mark.parametrize("name", ["dpo", "diffusion_nft", "awm"])
def test_what_the_forward_process_needs_is_always_there(name: str) -> None:
    check_loss_inputs(name, use_kl_loss=False)
    check_loss_inputs(name, use_kl_loss=True)
