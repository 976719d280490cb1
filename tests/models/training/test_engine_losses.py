# SPDX-License-Identifier: Apache-2.0
"""Every loss, window and correction through the trainer, against plain autograd."""

import functools
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config.actor import ForwardProcessConfig
from models.families.velocity import velocity_field
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.actors.messages import BUSY_SECONDS, OldBatch, RankBatch, RankMiniBatch, SampleMismatch
from tasks.actors.trainer_rank import TrainerRank
from tasks.config.trainer import TrainerConfig
from tests.support.helpers import (
    actor_config,
    largest_difference,
    model_config,
    passes_of_updates_alike,
    rollout_request,
)
from tests.support.plain_trainer import latents_around, plain_updates

pytestmark = pytest.mark.usefixtures("one_rank")

ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, 0.9])
NAN = float("nan")
WINDOWS = [(0, 1, 2), (0, 2), (1, 3), (0, 1, 3), (1,)]
# Bounds that some samples reach after one update of this size and others do not.
LOSSES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"clip_ratio": 0.05},
    "grpo_guard": {"clip_ratio": 0.05},
    "flow_dppo": {"kl_mask_threshold": 0.1},
}
OLD_MEANS = ("grpo_guard", "flow_dppo")


def rolled_out(model: Path, window: tuple[int, ...] = (0, 1, 2), record_means: bool = True, **settings: Any):
    """Six samples of three prompts of different lengths: sampled once, and a copy for each test."""
    return deepcopy(sampled(model, window, record_means, **settings))


@functools.cache
def sampled(model: Path, window: tuple[int, ...], record_means: bool, **settings: Any) -> Trajectories:
    request = rollout_request(lengths=(5, 3, 7), window=window, record_means=record_means)
    _, trajectories = DiffusersRolloutEngine(model_config(model, **settings)).generate(request)
    assert trajectories is not None
    return trajectories


def trainer(model: Path, **settings: Any) -> DiffusersFSDPEngine:
    engine = DiffusersFSDPEngine(model_config(model), actor_config(**{"clip_grad": 1e6} | settings))
    engine.initialize()
    return engine


def batch_of(trajectories: Trajectories, advantages: Tensor = ADVANTAGES) -> ActorBatch:
    weights = trajectories.is_weights
    shares = torch.ones(len(advantages)) if weights is None else (~weights.isnan()).double().mean(1)
    return ActorBatch([(trajectories, advantages)], float(shares[~advantages.isnan()].sum()))


@pytest.fixture(scope="module")
def tiny_model(one_block_model: Path) -> Path:
    """What is tested here is the same in each block."""
    return one_block_model


# ---- windows with gaps


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("window", WINDOWS[:4])
def test_any_window_replays_bit_for_bit(tiny_model: Path, window: tuple[int, ...], sde_type: str) -> None:
    """Log-probs and, where they were recorded, means."""
    config = model_config(tiny_model, sde_type=sde_type)
    trajectories = rolled_out(tiny_model, window, sde_type=sde_type)
    engine = DiffusersFSDPEngine(config, actor_config(ppo_micro_batch_size_per_gpu=6))
    engine.initialize()
    again = engine.rescored(trajectories, with_means=True)
    assert torch.equal(again.log_probs, trajectories.log_probs)
    assert trajectories.means is not None
    assert again.means is not None
    assert torch.equal(again.means, trajectories.means)
    assert again.log_probs.std() > 1e-3


@pytest.mark.parametrize("window", WINDOWS)
def test_a_path_is_stored_once_and_read_where_it_was(tiny_model: Path, window: tuple[int, ...]) -> None:
    """Each gap costs one latent more; a step's view is its own x and x', and its timestep."""
    trajectories = rolled_out(tiny_model, window)
    runs = sum(step - 1 not in window for step in window)
    assert trajectories.latents.shape[1] == len(window) + runs
    for number, step in enumerate(window):
        one = trajectories.step(number)
        before, after = latents_around(trajectories, number)
        assert torch.equal(one.latents, torch.stack([before, after], 1))
        assert one.window == (step,)
        assert one.timesteps.unique().item() == pytest.approx(1000 * (1 - step / 4))
        assert torch.equal(one.log_probs, trajectories.log_probs[:, number : number + 1])
        assert torch.equal(one.prompt_index, trajectories.prompt_index)
        # Nothing but the step's own noise is between them: x' - mu is sd z.
        assert trajectories.means is not None
        assert (after - trajectories.means[:, number]).std() > 0.1


def test_the_first_window_step_after_a_gap_starts_from_the_ode(tiny_model: Path) -> None:
    """Steps outside the window are deterministic: the same samples, replayed from the latent before the gap."""
    config = model_config(tiny_model)
    with_gap, without = rolled_out(tiny_model, (0, 2)), rolled_out(tiny_model, (0, 1, 2))
    assert torch.equal(with_gap.latents[:, :2], without.latents[:, :2])
    assert not torch.equal(with_gap.latents[:, 2], without.latents[:, 2])
    request = rollout_request(lengths=(5, 3, 7), window=())
    engine = DiffusersRolloutEngine(config)
    velocity = velocity_field(engine.adapter, engine.transformer, config, request.prompts, request.prompt_index)
    with torch.no_grad():
        x = with_gap.latents[:, 1]
        expected = x - 0.25 * velocity(x, torch.tensor(750.0))[0]
    assert torch.allclose(with_gap.latents[:, 2], expected, rtol=0, atol=1e-6)


# ---- losses


@pytest.mark.parametrize(("window", "together"), [((0, 1, 2), 1), ((0, 2), 1), ((0, 1, 2), 3), ((0, 2), 2)])
@pytest.mark.parametrize("loss", LOSSES)
def test_updates_equal_the_plain_trainers(tiny_model: Path, loss: str, window: tuple[int, ...], together: int) -> None:
    """Three updates in uneven micro-batches, step by step or all steps in one pass; in them the loss holds some samples
    back and others not."""
    trajectories = rolled_out(tiny_model, window, record_means=loss in OLD_MEANS)
    engine = trainer(tiny_model, loss_mode=loss, levels_per_pass=together, **LOSSES[loss])
    start = engine.gather_weights()
    metrics = [engine.update_policy([batch_of(trajectories)]) for _ in range(3)]
    weights, norms = plain_updates(engine.model_config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=3)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-3)
    assert largest_difference(engine.gather_weights(), weights) < 2e-6
    assert largest_difference(weights, start) > 1e-3
    held = "pg_dropfrac" if loss == "flow_dppo" else "pg_clipfrac"
    assert 0 < metrics[1][held] < 1


@pytest.mark.parametrize("together", [2, 3])
def test_steps_that_share_a_pass_train_as_those_that_do_not(tiny_model: Path, together: int) -> None:
    """By fewer passes, with a KL, a missing reward, rejected steps and weights; of three steps two leave one over."""
    advantages, weights = ADVANTAGES.clone(), torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.5
    advantages[1], weights[0, 0], weights[4] = NAN, NAN, torch.tensor([0.7, NAN, NAN])
    batch = batch_of(replace(rolled_out(tiny_model, record_means=False), is_weights=weights), advantages)
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.3, "ppo_micro_batch_size_per_gpu": 3}
    engines = [trainer(tiny_model, levels_per_pass=count, **settings) for count in (1, together)]
    assert passes_of_updates_alike(engines, lambda: [batch]) == [2 * 2 * 3, 2 * 2 * (3 // together + 3 % together)]


def test_steps_that_share_a_pass_of_the_rollout_s_size_replay_bit_for_bit(tiny_model: Path) -> None:
    """Six samples at one step were sampled together; two at all three steps are as many rows."""
    trajectories = rolled_out(tiny_model)
    engine = trainer(tiny_model, ppo_micro_batch_size_per_gpu=2, levels_per_pass=3)
    again = engine.rescored(trajectories, with_means=True)
    assert torch.equal(again.log_probs, trajectories.log_probs)
    assert torch.equal(again.means, trajectories.means)
    metrics = engine.update_policy([batch_of(trajectories)])
    assert metrics["ratio_deviation/max"] == metrics["logprob_abs_diff/max"] == 0.0


@pytest.mark.parametrize("rectified", [False, True])
def test_batches_of_one_optimiser_step_may_have_other_windows(tiny_model: Path, rectified: bool) -> None:
    """As with `sde_window_per: prompt`, which gives each prompt its own; each step has its own weight."""
    engine = trainer(tiny_model, temporal_gradient_rectification=rectified, **LOSSES["flow_grpo"])
    paths = [rolled_out(tiny_model, window) for window in ((0,), (2,), (1,))]
    rows = [ADVANTAGES, -ADVANTAGES, ADVANTAGES.flip(0)]
    for _ in range(2):
        engine.update_policy([ActorBatch(list(zip(paths, rows, strict=True)), 18)])
    if rectified:  # c = |D (1 + g^2 (1-s) / (2s))| / (g sqrt(-D)) of the steps from 1, 3/4 and 1/2, all 1/4 long
        level = engine.model_config.algo.noise_level
        drifts = [(s, level * (s / (1 - (0.75 if s == 1 else s))) ** 0.5) for s in (1.0, 0.75, 0.5)]
        inverse = [2 * g / (1 + g**2 * (1 - s) / (2 * s)) for s, g in drifts]
        factors = [3 * inverse[path.window[0]] / sum(inverse) for path in paths]
        paths = [replace(p, is_weights=torch.full((6, 1), w)) for p, w in zip(paths, factors, strict=True)]
    parts = list(zip(paths, rows, strict=True))
    weights, _ = plain_updates(engine.model_config, engine.actor_config, parts, updates=2)
    assert largest_difference(engine.gather_weights(), weights) < 2e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_update_finds_no_drift(tiny_model: Path, loss: str) -> None:
    engine = trainer(tiny_model, loss_mode=loss, ppo_micro_batch_size_per_gpu=6)
    trajectories = rolled_out(tiny_model)
    first = engine.update_policy([batch_of(trajectories)])
    assert first["ratio_deviation/max"] == 0.0
    assert first.get("mean_drift", 0.0) == 0.0
    second = engine.update_policy([batch_of(trajectories)])
    assert second["ratio_deviation/max"] > 0
    assert loss == "flow_grpo" or second["mean_drift"] > 0


@pytest.mark.parametrize("loss", OLD_MEANS)
def test_a_rollout_without_means_is_refused_by_name(tiny_model: Path, loss: str) -> None:
    engine = trainer(tiny_model, loss_mode=loss)
    with pytest.raises(ValueError, match=f"loss '{loss}' needs data 'old_prev_sample_mean'"):
        engine.update_policy([batch_of(rolled_out(tiny_model, record_means=False))])


# ---- old log-probs of the trainer's own


@pytest.mark.parametrize("loss", LOSSES)
def test_rescored_samples_train_as_the_rollouts_own(tiny_model: Path, loss: str) -> None:
    """Where both engines agree to the last bit, recomputing the old policy changes nothing."""
    bypassed, decoupled = (trainer(tiny_model, loss_mode=loss, ppo_micro_batch_size_per_gpu=6) for _ in range(2))
    recorded, bare = rolled_out(tiny_model), rolled_out(tiny_model, record_means=False)
    old = decoupled.rescored(bare, with_means=loss in OLD_MEANS)
    for _ in range(2):
        bypassed.update_policy([batch_of(recorded)])
        decoupled.update_policy([batch_of(old)])
    assert largest_difference(bypassed.gather_weights(), decoupled.gather_weights()) == 0.0


def test_the_engines_distance_is_measured_before_the_weights_move(tiny_model: Path) -> None:
    engine = trainer(tiny_model, ppo_micro_batch_size_per_gpu=6)
    trajectories = rolled_out(tiny_model)
    offsets = torch.linspace(-3e-4, 1e-4, 18).view(6, 3)
    shifted = replace(trajectories, log_probs=trajectories.log_probs + offsets)
    metrics = engine.update_policy([batch_of(shifted)] * 3)
    exact = (shifted.log_probs - trajectories.log_probs).abs()
    assert metrics["logprob_abs_diff/mean"] == pytest.approx(exact.mean().item(), rel=1e-5)
    assert metrics["logprob_abs_diff/max"] == pytest.approx(exact.max().item(), rel=1e-5)
    assert metrics["ratio_deviation/max"] > 10 * exact.max().item()


# ---- weights and rejection

WEIGHTS = torch.tensor(
    [[0.5, 1.0, 2.0], [NAN, 0.7, 1.1], [NAN, NAN, NAN], [1.3, NAN, 0.0], [1.0, 1.0, 1.0], [0.2, 1.9, NAN]]
)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_multiply_and_rejected_steps_leave_the_mean(tiny_model: Path, loss: str) -> None:
    """Numerator and denominator; a weight of 0 stays in the denominator."""
    trajectories = replace(rolled_out(tiny_model), is_weights=WEIGHTS)
    engine = trainer(tiny_model, loss_mode=loss, **LOSSES[loss])
    metrics = [engine.update_policy([batch_of(trajectories)]) for _ in range(2)]
    weights, norms = plain_updates(engine.model_config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=2)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-3)
    assert largest_difference(engine.gather_weights(), weights) < 2e-6


def test_a_rejected_step_takes_its_kl_along(tiny_model: Path) -> None:
    """Rejecting all of a sample is as if it had not been sampled."""
    settings = {"use_kl_loss": True, "kl_loss_coef": 20.0}
    trajectories = rolled_out(tiny_model)
    kept = torch.tensor([0, 1, 3, 4])
    rejected = torch.ones(6, 3)
    rejected[[2, 5]] = NAN
    with_rejected, without = (trainer(tiny_model, **settings) for _ in range(2))
    for _ in range(2):
        with_rejected.update_policy([batch_of(replace(trajectories, is_weights=rejected))])
        without.update_policy([batch_of(trajectories.rows(kept), ADVANTAGES[kept])])
    assert largest_difference(with_rejected.gather_weights(), without.gather_weights()) < 1e-6


def test_the_kl_has_the_form_that_the_config_names(tiny_model: Path) -> None:
    """At steps of one length, here 1/4, public Flow-GRPO's form is the Gaussian one times that length."""
    trajectories, distance = rolled_out(tiny_model), {}
    for form in ("gaussian", "flow_grpo"):  # too small a weight to move anything
        engine = trainer(tiny_model, use_kl_loss=True, kl_loss_coef=1e-12, kl_loss_type=form)
        distance[form] = [engine.update_policy([batch_of(trajectories)])["kl_loss"] for _ in range(2)][1]
    assert distance["gaussian"] > 1e-6
    assert distance["flow_grpo"] == pytest.approx(distance["gaussian"] / 4, rel=1e-4)


def test_a_rank_joins_old_scores_to_the_batches_they_belong_to(tiny_model: Path) -> None:
    """And takes no batch whose samples are not those of its advantages."""
    rank = TrainerRank(
        model_config(tiny_model), actor_config(loss_mode="grpo_guard"), ForwardProcessConfig(), TrainerConfig()
    )
    rank.engine, plain = (trainer(tiny_model, loss_mode="grpo_guard") for _ in range(2))
    whole = rolled_out(tiny_model)
    bare = [replace(whole.rows(half), means=None) for half in torch.arange(6).split(3)]
    halves = [plain.rescored(half, with_means=True) for half in bare]  # in whole batches a last bit may differ
    rescored = [rank.rescore(half, True) for half in bare]
    assert [torch.equal(own.log_probs[0], half.log_probs) for own, half in zip(rescored, halves, strict=True)] == [
        True
    ] * 2
    assert [own.log_probs[1] is half.log_probs for own, half in zip(rescored, bare, strict=True)] == [True] * 2
    assert [torch.equal(own.means, half.means) for own, half in zip(rescored, halves, strict=True)] == [True] * 2

    weights, rows = WEIGHTS.split(3), [values.numpy() for values in ADVANTAGES.split(3)]
    old = [OldBatch(own.log_probs[0], weight, own.means) for own, weight in zip(rescored, weights, strict=True)]
    parts = [RankBatch(half, half.keys, row, own) for half, row, own in zip(bare, rows, old, strict=True)]
    metrics = rank.update([RankMiniBatch((parts[1],), 7 / 3), RankMiniBatch((parts[0],), 5 / 3)], 1)
    weighted = [replace(half, is_weights=weight) for half, weight in zip(halves, weights, strict=True)]
    expected = plain.update_policy([batch_of(weighted[i], ADVANTAGES.split(3)[i]) for i in (1, 0)])
    assert metrics.pop(BUSY_SECONDS) > 0
    assert metrics == expected
    assert largest_difference(rank.engine.gather_weights(), plain.gather_weights()) == 0.0
    with pytest.raises(SampleMismatch, match="a batch of an update has the samples"):
        rank.update([RankMiniBatch((replace(parts[1], samples=bare[0]),), 7 / 3)], 1)
    of_the_next = tuple(replace(key, iteration=key.iteration + 1) for key in bare[1].keys)
    with pytest.raises(SampleMismatch, match="a batch of an update has the samples"):
        rank.update([RankMiniBatch((replace(parts[1], keys=of_the_next),), 7 / 3)], 1)
    assert largest_difference(rank.engine.gather_weights(), plain.gather_weights()) == 0.0


# ---- several updates an iteration


def test_two_epochs_are_two_passes(tiny_model: Path) -> None:
    """The old log-probs are the rollout's in every pass."""
    trajectories = rolled_out(tiny_model)
    halves = [batch_of(trajectories.rows(half), ADVANTAGES[half]) for half in torch.arange(6).split(3)]
    at_once, one_by_one = trainer(tiny_model), trainer(tiny_model)
    metrics = at_once.update_policy(halves, epochs=2)
    passes = [one_by_one.update_policy(halves) for _ in range(2)]
    assert largest_difference(at_once.gather_weights(), one_by_one.gather_weights()) == 0.0
    assert metrics["optimizer_steps"] == passes[1]["optimizer_steps"] == 4
    assert metrics["ratio_deviation/mean"] == pytest.approx(sum(p["ratio_deviation/mean"] for p in passes) / 2)
