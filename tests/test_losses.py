"""Losses against the formulas in plain Python floats, finite differences and closed-form Gaussian divergences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from models.algorithms import (
    DiffusionLossFn,
    DiffusionLossResult,
    FlowGRPOLoss,
    KLLoss,
    get_diffusion_loss_fn,
    register_diffusion_loss,
)
from models.config import DiffusionActorConfig, DiffusionLossConfig

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


def test_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"diffusion_loss\.loss_mode is 'flow_gropo'; known: .*flow_grpo"):
        get_diffusion_loss_fn("flow_gropo")


def test_a_taken_name_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="'flow_grpo' is already registered"):
        register_diffusion_loss("flow_grpo")(PairLoss)
    assert isinstance(get_diffusion_loss_fn("flow_grpo"), FlowGRPOLoss)
