# SPDX-License-Identifier: Apache-2.0
"""Losses against the formulas in plain Python floats, finite differences and closed-form Gaussian divergences."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from models.algorithms import (
    DiffusionLossFn,
    DiffusionLossResult,
    FlowDPPOLoss,
    FlowGRPOLoss,
    GRPOGuardLoss,
    KLLoss,
    check_loss_inputs,
    get_diffusion_loss_fn,
    needs_old_means,
    register_diffusion_loss,
)
from models.algorithms.losses import REF_MEAN, TEACHER_MEAN, check_result
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig
from models.registry import WrongAnswer
from models.schedulers import KERNELS, FlowMatchSDEDiscreteScheduler

CLIP = 0.1
CONFIG = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(clip_ratio=CLIP, adv_clip_max=5.0))

# (log-ratio, advantage, does the sample still push): the clip stops a step that went far enough in its direction.
CASES = [
    (0.3, 1.5, False),
    (0.3, -1.5, True),
    (-0.3, 1.5, True),
    (-0.3, -1.5, False),
    (0.05, 2.0, True),
    (-0.05, -2.0, True),
    (0.02, 9.0, True),
    (0.02, -9.0, True),
    (0.0, 0.0, False),
]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(log_prob, old_log_prob, advantages) of CASES."""
    old = torch.linspace(-1.0, 0.5, len(CASES), dtype=torch.float64)
    log_ratio, advantages = torch.tensor([case[:2] for case in CASES], dtype=torch.float64).T
    return (old + log_ratio).to(dtype), old.to(dtype), advantages.to(dtype)


def reference(log_ratio: float, advantage: float) -> float:
    """-min(A r, A clip(r)) of one sample, with the advantage clamped to 5."""
    advantage = min(max(advantage, -5.0), 5.0)
    ratio = math.exp(log_ratio)
    return -min(advantage * ratio, advantage * min(max(ratio, 1 - CLIP), 1 + CLIP))


def test_flow_grpo_equals_the_formula() -> None:
    log_prob, old, advantages = tensors()
    loss, metrics = FlowGRPOLoss.compute_loss(old_log_prob=old, log_prob=log_prob, advantages=advantages, config=CONFIG)
    assert loss.item() == pytest.approx(sum(reference(r, a) for r, a, _ in CASES) / len(CASES), rel=1e-12)
    deviations = [abs(math.exp(r) - 1) for r, _, _ in CASES]
    assert float(metrics["ppo_kl"]) == pytest.approx(-sum(r for r, _, _ in CASES) / len(CASES))
    assert float(metrics["pg_clipfrac"]) == pytest.approx(sum(d > CLIP for d in deviations) / len(CASES))
    assert float(metrics["ratio_deviation/mean"]) == pytest.approx(sum(deviations) / len(CASES))
    assert float(metrics["ratio_deviation/max"]) == pytest.approx(max(deviations))


def test_every_single_sample_equals_the_formula() -> None:
    log_prob, old, advantages = tensors()
    for row, (log_ratio, advantage, _) in enumerate(CASES):
        one = slice(row, row + 1)
        loss, _ = FlowGRPOLoss.compute_loss(
            old_log_prob=old[one], log_prob=log_prob[one], advantages=advantages[one], config=CONFIG
        )
        assert loss.item() == pytest.approx(reference(log_ratio, advantage), rel=1e-12, abs=1e-15)


def test_flow_grpo_gradient() -> None:
    """Finite differences, and exactly zero where the clip holds a sample back."""
    log_prob, old, advantages = tensors()
    log_prob.requires_grad_()

    def total(values: Tensor) -> Tensor:
        return FlowGRPOLoss.compute_loss(old_log_prob=old, log_prob=values, advantages=advantages, config=CONFIG)[0]

    (gradient,) = torch.autograd.grad(total(log_prob), log_prob)
    for row, (_, _, pushes) in enumerate(CASES):
        shift = torch.zeros_like(log_prob)
        shift[row] = 1e-6
        with torch.no_grad():
            difference = (total(log_prob + shift) - total(log_prob - shift)).item() / 2e-6
        assert gradient[row].item() == pytest.approx(difference, rel=1e-6, abs=1e-9)
        assert (gradient[row] != 0) == pushes


def test_rollout_weights_multiply_samples_and_carry_no_gradient() -> None:
    log_prob, old, advantages = tensors()
    weights = torch.linspace(0.5, 2.0, len(CASES), dtype=torch.float64).requires_grad_()
    loss, _ = FlowGRPOLoss.compute_loss(
        old_log_prob=old,
        log_prob=log_prob.requires_grad_(),
        advantages=advantages,
        config=CONFIG,
        rollout_is_weights=weights,
    )
    terms = [w * reference(r, a) for w, (r, a, _) in zip(weights.tolist(), CASES, strict=True)]
    assert loss.item() == pytest.approx(sum(terms) / len(CASES), rel=1e-12)
    assert torch.autograd.grad(loss, weights, allow_unused=True) == (None,)


def test_calling_the_loss_takes_what_it_declared() -> None:
    log_prob, old, advantages = tensors()
    result = FlowGRPOLoss()(
        config=CONFIG,
        model_output={"log_probs": log_prob},
        data={"old_log_probs": old, "advantages": advantages, "rollout_is_weights": torch.full_like(old, 2.0)},
    )
    assert isinstance(result, DiffusionLossResult)
    assert result.loss.item() == pytest.approx(2 * sum(reference(r, a) for r, a, _ in CASES) / len(CASES), rel=1e-12)


# ---- losses that compare the step's means


def old_and_new(samples: int = 40) -> dict[str, Tensor]:
    """Random steps in float64, some of them far apart and some not."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_mean, spread = normal(samples, 6, 4), torch.rand(samples, 1, 1, generator=generator, dtype=torch.float64)
    old = normal(samples)
    return {
        "old_log_prob": old,
        "log_prob": old + 0.1 * normal(samples),
        "advantages": 4 * normal(samples),
        "old_prev_sample_mean": old_mean,
        "prev_sample_mean": old_mean + spread * normal(samples, 6, 4),
        "std_dev_t": 0.5 + torch.rand(samples, 1, 1, generator=generator, dtype=torch.float64),
        "sqrt_dt": 0.2 + torch.rand(samples, generator=generator, dtype=torch.float64),
    }


def drift_of(given: dict[str, Tensor], row: int) -> float:
    new, old = (given[name][row].flatten().tolist() for name in ("prev_sample_mean", "old_prev_sample_mean"))
    square = sum((a - b) ** 2 for a, b in zip(new, old, strict=True)) / len(new)
    return square / (2 * given["std_dev_t"][row].item() ** 2)


def guard_reference(given: dict[str, Tensor], row: int) -> float:
    """One sample of GRPO-Guard in Python floats."""
    log_ratio = (given["log_prob"][row] - given["old_log_prob"][row]).item() + drift_of(given, row)
    loss = reference(log_ratio * given["std_dev_t"][row].item(), given["advantages"][row].item())
    return loss / given["sqrt_dt"][row].item() ** 2


def dppo_reference(given: dict[str, Tensor], row: int, threshold: float) -> float:
    """One sample of Flow-DPPO in Python floats."""
    ratio = math.exp((given["log_prob"][row] - given["old_log_prob"][row]).item())
    advantage = given["advantages"][row].item()
    outwards = (ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0)
    return 0.0 if drift_of(given, row) >= threshold and outwards else -advantage * ratio


def test_grpo_guard_golden_ratio() -> None:
    """lp - lp_old 1e-3, mean drift squared 2e-5, sd .4: ratio 1.00042509; D = -1/4 divides the loss."""
    mean = torch.zeros(1, 8, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    loss, metrics = GRPOGuardLoss.compute_loss(
        old_log_prob=-one,
        log_prob=-one + 1e-3,
        advantages=-one,
        config=CONFIG,
        old_prev_sample_mean=mean,
        prev_sample_mean=mean + math.sqrt(2e-5),
        std_dev_t=torch.tensor([[0.4]], dtype=torch.float64),
        sqrt_dt=torch.tensor([0.5], dtype=torch.float64),
    )
    assert loss.item() * 0.25 == pytest.approx(1.00042509, abs=5e-9)
    assert metrics["mean_drift"].item() == pytest.approx(6.25e-5)


def test_grpo_guard_equals_the_formula_sample_by_sample() -> None:
    given = old_and_new()
    loss, metrics = GRPOGuardLoss.compute_loss(**given, config=CONFIG)
    expected = [guard_reference(given, row) for row in range(40)]
    assert loss.item() == pytest.approx(sum(expected) / 40, rel=1e-12)
    assert 0 < metrics["pg_clipfrac"] < 1
    for row in range(40):
        one = {name: value[row : row + 1] for name, value in given.items()}
        assert GRPOGuardLoss.compute_loss(**one, config=CONFIG)[0].item() == pytest.approx(expected[row], rel=1e-12)


def test_grpo_guard_takes_one_deviation_a_sample() -> None:
    given = old_and_new()
    given["std_dev_t"] = given["std_dev_t"].expand_as(given["prev_sample_mean"])
    with pytest.raises(WrongAnswer, match=r"one deviation a sample, and the kernel gives \(40, .* choose another loss"):
        GRPOGuardLoss.compute_loss(**given, config=CONFIG)


@pytest.mark.parametrize("name", ["sde", "dance_sde"])
@pytest.mark.parametrize("levels", [(0.95, 0.9), (0.6, 0.5), (0.2, 0.1)])
def test_grpo_guards_ratio_has_one_mean_and_one_scale_at_every_level(name: str, levels: tuple[float, float]) -> None:
    """For x' that the old policy drew: log-ratio ~ N(0, mean (mu - mu_old)^2 / D), whatever the step's sd."""
    samples, size = 64, 4096
    x, v, dv, z = torch.randn(4, samples, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sigmas = [torch.full((samples, 1), level, dtype=torch.float64) for level in (*levels, 0.97)]
    kernel = KERNELS[name]
    old, own = (kernel.step(x, velocity, *sigmas, 0.8) for velocity in (v, v + 0.05 * dv))
    drawn = old.mean + old.std_dev_t * z
    _, metrics = GRPOGuardLoss.compute_loss(
        old_log_prob=kernel.log_prob(drawn, old),
        log_prob=kernel.log_prob(drawn, own),
        advantages=torch.ones(samples, dtype=torch.float64),
        config=CONFIG,
        old_prev_sample_mean=old.mean,
        prev_sample_mean=own.mean,
        std_dev_t=own.std_dev_t,
        sqrt_dt=torch.sqrt(sigmas[0] - sigmas[1]).flatten(),
    )
    scale = ((own.mean - old.mean) ** 2).mean().sqrt().item() / math.sqrt(size)
    assert abs(metrics["ppo_kl"].item()) < 5 * scale / math.sqrt(samples)
    assert metrics["ratio_deviation/mean"].item() == pytest.approx(scale * math.sqrt(2 / math.pi), rel=0.4)


def test_grpo_guard_takes_scalars_for_a_step_that_all_share() -> None:
    given = old_and_new() | {"std_dev_t": torch.full((40, 1, 1), 0.7), "sqrt_dt": torch.full((40,), 0.3)}
    scalars = given | {"std_dev_t": torch.tensor(0.7), "sqrt_dt": torch.tensor(0.3)}
    losses = [GRPOGuardLoss.compute_loss(**each, config=CONFIG)[0].item() for each in (given, scalars)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_flow_dppo_equals_the_formula_sample_by_sample() -> None:
    given = old_and_new()
    del given["sqrt_dt"]
    threshold = sorted(drift_of(given, row) for row in range(40))[20]
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(kl_mask_threshold=threshold, adv_clip_max=0.1))
    loss, metrics = FlowDPPOLoss.compute_loss(**given, config=config)
    expected = [dppo_reference(given, row, threshold) for row in range(40)]
    assert loss.item() == pytest.approx(sum(expected) / 40, rel=1e-12)
    dropped = sum(value == 0 for value in expected)
    assert 5 < dropped < 20  # about a quarter is both far and on its way out
    assert metrics["pg_dropfrac"].item() == pytest.approx(dropped / 40)


def test_flow_dppo_drops_exactly_at_its_threshold_and_only_outwards() -> None:
    mean, std = torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    drifted = mean + 0.5  # D_kl = 0.125
    log_ratio = torch.tensor([0.1, 0.1, -0.1, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for threshold, kept in ((0.125, [False, True, True, False]), (0.1251, [True] * 4)):
        config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(kl_mask_threshold=threshold))
        loss, _ = FlowDPPOLoss.compute_loss(
            old_log_prob=torch.zeros(4, dtype=torch.float64),
            log_prob=log_ratio,
            advantages=advantages,
            config=config,
            old_prev_sample_mean=mean,
            prev_sample_mean=drifted,
            std_dev_t=std,
        )
        (gradient,) = torch.autograd.grad(loss, log_ratio)
        expected = -advantages * torch.exp(log_ratio.detach()) / 4 * torch.tensor(kept)
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [GRPOGuardLoss, FlowDPPOLoss])
def test_weights_and_gradients_through_the_means(loss: Any) -> None:
    """Finite differences in the mean and the log-prob; a weight multiplies its sample and takes no gradient."""
    given = old_and_new(8)
    if loss is FlowDPPOLoss:
        del given["sqrt_dt"]
    weights = torch.linspace(0.0, 2.0, 8, dtype=torch.float64, requires_grad=True)

    def value(mean: Tensor, log_prob: Tensor) -> Tensor:
        changed = given | {"prev_sample_mean": mean, "log_prob": log_prob}
        return loss.compute_loss(**changed, config=CONFIG, rollout_is_weights=weights)[0]

    leaves = (given["prev_sample_mean"].requires_grad_(), given["log_prob"].requires_grad_())
    assert torch.autograd.gradcheck(value, leaves)
    assert torch.autograd.grad(value(*leaves), weights, allow_unused=True) == (None,)
    reference_of = guard_reference if loss is GRPOGuardLoss else functools.partial(dppo_reference, threshold=1e-5)
    expected = sum(weights[row].item() * reference_of(given, row) for row in range(8)) / 8
    assert value(*leaves).item() == pytest.approx(expected, rel=1e-12)


# ---- the divergence from the reference


def test_kl_is_the_gaussian_one() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, reference_mean = torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64)
    std = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64).view(3, 1, 1)
    loss, metrics = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=reference_mean, std_dev_t=std)
    expected = kl_divergence(Normal(mean, std), Normal(reference_mean, std)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["kl_loss"].item() == loss.item()


def test_kl_gradient_pulls_the_mean_back() -> None:
    """d/dmu (mu - mu_ref)^2 / (2 sd^2) / numel = (mu - mu_ref) / sd^2 / numel."""
    mean = torch.tensor([[1.0, -2.0], [0.5, 0.0]], requires_grad=True)
    std = torch.tensor([[0.5], [2.0]])
    loss, metrics = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=torch.zeros(2, 2), std_dev_t=std)
    (gradient,) = torch.autograd.grad(loss, mean)
    assert torch.allclose(gradient, mean.detach() / std**2 / 4)
    assert not metrics["kl_loss"].requires_grad


def test_kl_of_flow_grpo_is_the_public_formula() -> None:
    """Their loop divides the squared distance of the means by 2 g^2, g = sd / sqrt(-D)."""
    generator = torch.Generator().manual_seed(0)
    mean, reference_mean = torch.randn(2, 3, 4, 5, 2, generator=generator, dtype=torch.float64)
    g = torch.tensor([0.7, 1.2, 3.3], dtype=torch.float64).view(3, 1, 1, 1)
    sqrt_dt = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    means = {"prev_sample_mean": mean, "ref_prev_sample_mean": reference_mean}
    std = g * sqrt_dt.view(3, 1, 1, 1)
    public, metrics = KLLoss.compute_loss(**means, std_dev_t=std, sqrt_dt=sqrt_dt)
    in_full, _ = KLLoss.compute_loss(**means, std_dev_t=std.expand_as(mean), sqrt_dt=sqrt_dt)
    assert in_full.item() == pytest.approx(public.item(), rel=1e-12)
    expected = (((mean - reference_mean) ** 2).mean(dim=(1, 2, 3), keepdim=True) / (2 * g**2)).mean()
    assert public.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["kl_loss"].item() == public.item()
    for row in range(3):
        one = {name: value[row : row + 1] for name, value in means.items()}
        gaussian, _ = KLLoss.compute_loss(**one, std_dev_t=std[row : row + 1])
        same, _ = KLLoss.compute_loss(**one, std_dev_t=std[row : row + 1], sqrt_dt=sqrt_dt[row : row + 1])
        assert same.item() == pytest.approx(gaussian.item() * sqrt_dt[row].item() ** 2, rel=1e-12)


def test_how_far_apart_the_two_forms_of_the_kl_are() -> None:
    """On Stable Diffusion 3's schedule, at equal distance of the velocities: what docs/algorithms.md says."""
    scheduler = FlowMatchSDEDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigma, lengths = scheduler.sigmas[:9].double(), -scheduler.sigmas.double().diff()[:9]
    factors = 1 / lengths
    assert factors[[0, -1]].tolist() == pytest.approx([25.1, 3.7], abs=0.05)
    assert factors.mean().item() == pytest.approx(13.0, abs=0.05)
    g_squared = 0.49 * sigma / (1 - torch.where(sigma == 1, sigma[1], sigma))
    public = (lengths * (1 + g_squared * (1 - sigma) / (2 * sigma))) ** 2 / (2 * g_squared)
    assert ((public * factors).sum() / public.sum()).item() == pytest.approx(4.4, abs=0.05)


# ---- declared inputs and the registry


class PairLoss(DiffusionLossFn):
    """A loss of a user's own file."""

    required_model_output_keys = ("log_probs", "velocity")
    required_data_keys = ("partner", "advantages")

    @classmethod
    def compute_loss(cls, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        return torch.zeros(()), {}

    def __call__(self, *, config: Any, model_output: Any, data: Any) -> DiffusionLossResult:
        return DiffusionLossResult(*self.compute_loss())


class ReferenceLoss(PairLoss):
    """One that wants the reference's mean."""

    required_model_output_keys = ("prev_sample_mean",)
    required_data_keys = ("ref_prev_sample_mean",)


def test_missing_inputs_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"'pair' needs model output 'velocity', data 'partner'") as error:
        PairLoss().validate_inputs(loss_name="pair", model_output={"log_probs": 1}, data={"advantages": 1})
    assert "log_probs" not in str(error.value)
    PairLoss().validate_inputs(
        loss_name="pair", model_output={"log_probs": 1, "velocity": 1}, data={"advantages": 1, "partner": 1}
    )


def test_loss_by_name_and_by_import_path() -> None:
    assert isinstance(get_diffusion_loss_fn("flow_grpo"), FlowGRPOLoss)
    assert isinstance(get_diffusion_loss_fn(f"{__name__}:PairLoss"), PairLoss)


@pytest.mark.parametrize("alias", ["dance_grpo", "mix_grpo"])
def test_aliases_are_the_same_loss(alias: str) -> None:
    assert type(get_diffusion_loss_fn(alias)) is FlowGRPOLoss


def test_who_needs_the_old_means() -> None:
    needing = [name for name in ("flow_grpo", "dance_grpo", "grpo_guard", "flow_dppo") if needs_old_means(name)]
    assert needing == ["grpo_guard", "flow_dppo"]


def test_inputs_that_no_update_gives_are_all_named_before_a_model_loads() -> None:
    with pytest.raises(ValueError, match=r"PairLoss' needs velocity, partner; an update gives log_probs, .*sqrt_dt"):
        check_loss_inputs(f"{__name__}:PairLoss", use_kl_loss=False)
    check_loss_inputs(f"{__name__}:ReferenceLoss", use_kl_loss=True)
    check_loss_inputs("grpo_guard", use_kl_loss=False, weighted=True)
    with pytest.raises(ValueError, match=r"does not name rollout_is_weights .* would ignore .*rollout_is: set that"):
        check_loss_inputs(f"{__name__}:ReferenceLoss", use_kl_loss=True, weighted=True)
    with pytest.raises(ValueError, match="needs ref_prev_sample_mean"):
        check_loss_inputs(f"{__name__}:ReferenceLoss", use_kl_loss=False)


class OfOtherNames(PairLoss):
    """A call by other names than the engine's."""

    def __call__(self, config, output, batch):  # type: ignore[override, no-untyped-def]
        return DiffusionLossResult(output["log_probs"].mean())


def test_a_loss_that_cannot_be_called_is_refused_before_a_model_loads() -> None:
    path = f"{__name__}:OfOtherNames"
    message = (
        rf"loss_mode is '{path}', which cannot be called with \(config=..., model_output=..., data=...\): .*'model_"
    )
    with pytest.raises(ValueError, match=message):
        check_loss_inputs(path, use_kl_loss=False)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(()), r"a Tensor: return a DiffusionLossResult\(loss, metrics\)"),
        (None, "a NoneType: return a Diff"),
        (DiffusionLossResult(torch.zeros(4)), r"a loss that is a tensor of shape \(4,\): return the mean over the"),
        (DiffusionLossResult(0.5), "a loss that is a float"),  # type: ignore[arg-type]
        (
            DiffusionLossResult(torch.zeros(()), {"r": torch.ones(4)}),
            r"'r' that is a tensor of shape \(4,\): return one",
        ),
        (DiffusionLossResult(torch.zeros(()), {"r": "high"}), "a metric 'r' that is a str"),
    ],
)
def test_what_a_loss_must_not_return_is_named(result: Any, message: str) -> None:
    with pytest.raises(WrongAnswer, match=f"loss_mode is 'mine:Loss', which returned .*{message}"):
        check_result("mine:Loss", result)
    check_result(
        "mine:Loss", DiffusionLossResult(torch.zeros(1), {"one": torch.ones(()), "two": np.float32(2), "3": 3})
    )


def test_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"diffusion_loss\.loss_mode is 'flow_gropo'; known: .*flow_grpo"):
        get_diffusion_loss_fn("flow_gropo")


def test_a_taken_name_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="'flow_grpo' is already registered"):
        register_diffusion_loss("flow_grpo")(PairLoss)
    assert isinstance(get_diffusion_loss_fn("flow_grpo"), FlowGRPOLoss)


def test_distillation_compares_with_the_teacher_also_where_a_reference_is_there() -> None:
    """As with use_kl_loss, which brings the starting weights' means too."""
    generator = torch.Generator().manual_seed(0)
    mean, teacher, start = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    output = {"prev_sample_mean": mean, "std_dev_t": torch.full((2, 1), 0.5, dtype=torch.float64)}
    data = {TEACHER_MEAN: teacher, REF_MEAN: start}
    loss = get_diffusion_loss_fn("distill_kl")(config=CONFIG, model_output=output, data=data).loss
    expected = kl_divergence(Normal(mean, 0.5), Normal(teacher, 0.5)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
