# SPDX-License-Identifier: Apache-2.0
"""Losses in the form that VeRL-Omni documents: three of them, imports changed, each in an update of a real trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.algorithms import DiffusionLossFn, DiffusionLossResult, register_diffusion_loss
from models.algorithms.losses import _LOSSES
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import actor_config, largest_difference, model_config, rollout_request

pytestmark = pytest.mark.usefixtures("one_rank", "ported")
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])


class PortedClipLoss(DiffusionLossFn):
    """A clipped objective whose formula is a classmethod, as each of theirs is."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("old_log_probs", "advantages")

    @classmethod
    def compute_loss(cls, *, old_log_prob, log_prob, advantages, config):
        settings = config.diffusion_loss
        clipped = advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)
        ratio = (log_prob - old_log_prob).exp()
        bounded = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
        return torch.maximum(-clipped * ratio, -clipped * bounded).mean(), {"ppo_ratio": ratio.mean().detach()}

    def __call__(self, *, config, model_output, data):
        loss, metrics = self.compute_loss(
            old_log_prob=data["old_log_probs"],
            log_prob=model_output["log_probs"],
            advantages=data["advantages"],
            config=config,
        )
        return DiffusionLossResult(loss=loss, metrics=metrics)


class PortedReinforceLoss(DiffusionLossFn):
    """Without a ratio, and with its own name for the loss in the metrics."""

    required_model_output_keys = ("log_probs",)
    required_data_keys = ("advantages",)

    def __call__(self, *, config, model_output, data) -> DiffusionLossResult:
        loss = -(data["advantages"] * model_output["log_probs"]).mean()
        return DiffusionLossResult(loss, {"pg_loss": loss.item()}, add_loss_metric=False)


class PortedMeanLoss(DiffusionLossFn):
    """It reads a step's mean, deviation and the mean of the weights that sampled."""

    required_model_output_keys = ("log_probs", "prev_sample_mean", "std_dev_t")
    required_data_keys = ("old_log_probs", "advantages", "old_prev_sample_mean")

    def __call__(self, *, config, model_output, data):
        drift = (model_output["prev_sample_mean"] - data["old_prev_sample_mean"]) / model_output["std_dev_t"]
        drift = drift.pow(2).flatten(1).mean(1)
        ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
        loss = (0.5 * drift - data["advantages"] * ratio).mean()
        return DiffusionLossResult(loss=loss, metrics={"drift": drift.max().detach()})


@pytest.fixture
def ported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as there; forgotten after the test."""
    monkeypatch.setattr(_LOSSES, "entries", dict(_LOSSES.entries))
    register_diffusion_loss("ported_clip")(PortedClipLoss)
    register_diffusion_loss("ported_reinforce")(PortedReinforceLoss)
    register_diffusion_loss("ported_mean")(PortedMeanLoss)


def sampled(folder: Path, **recorded: bool) -> Trajectories:
    request = rollout_request(samples=2, lengths=(5, 3), **recorded)
    _, trajectories = DiffusersRolloutEngine(model_config(folder)).generate(request)
    assert trajectories is not None
    return trajectories


def trained(folder: Path, loss: str, trajectories: Trajectories, **settings: Any) -> tuple[dict, list]:
    """Weights and metrics of two updates."""
    engine = DiffusersFSDPEngine(model_config(folder), actor_config(loss_mode=loss, **settings))
    engine.initialize()
    batch = ActorBatch([(trajectories, ADVANTAGES)], 4)
    metrics = [engine.update_policy([batch]) for _ in range(2)]
    return engine.gather_weights(), metrics


def test_a_clipped_objective_trains_as_the_projects_own(tiny_model: Path) -> None:
    trajectories = sampled(tiny_model)
    weights, metrics = trained(tiny_model, "ported_clip", trajectories)
    own, _ = trained(tiny_model, "flow_grpo", trajectories)
    assert largest_difference(weights, own) < 1e-6
    assert metrics[0]["ppo_ratio"] == 1.0
    assert metrics[1]["ppo_ratio"] != 1.0


def test_a_plain_policy_gradient_has_its_own_metric(tiny_model: Path) -> None:
    """At the first update its gradient is that of the ratio: so are the weights, within rounding."""
    trajectories = sampled(tiny_model)
    _, metrics = trained(tiny_model, "ported_reinforce", trajectories)
    expected = -(ADVANTAGES[:, None] * trajectories.log_probs).mean().item()
    assert metrics[0]["pg_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics[1]["pg_loss"] < metrics[0]["pg_loss"]


def test_a_loss_of_means_gets_those_of_the_weights_that_sampled(tiny_model: Path) -> None:
    _, metrics = trained(tiny_model, "ported_mean", sampled(tiny_model, record_means=True))
    assert metrics[0]["drift"] == pytest.approx(0.0, abs=1e-10)
    assert metrics[1]["drift"] > 0.0
