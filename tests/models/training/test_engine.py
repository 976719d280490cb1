# SPDX-License-Identifier: Apache-2.0
"""The trainer on one rank: replay, updates against plain autograd, averages, checkpoints, exports, weight sync."""

import errno
import io
import shutil
import weakref
import zipfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.algorithms import DiffusionLossResult, FlowGRPOLoss
from models.config.actor import EmaConfig
from models.families.base import DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.registry import WrongAnswer
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import LATENTS, PICTURES, Trajectories
from models.training import checkpoint, fsdp
from models.training.fsdp import ActorBatch, DiffusersFSDPEngine
from models.training.gradients import GradientNotFinite
from models.training.shards import TrainedShards
from models.training.weight_copies import WeightAverage
from models.weights.canary import Canary, check_canary
from models.weights.trainable import WeightSyncError, load_trainable, trainable
from tasks.config.tree import TrainConfig
from tasks.run.capacity import checkpoint_bytes
from tests.support.cases import crossed
from tests.support.helpers import (
    actor_config,
    largest_difference,
    model_config,
    prompt_table,
    rollout_request,
    wait_until_saved,
)
from tests.support.plain_trainer import plain_kl, plain_module, plain_replay, plain_updates
from tests.support.tiny_models import FAMILIES, embeddings_of

pytestmark = pytest.mark.usefixtures("one_rank")

ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, 0.9])
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 4, "lora_alpha": 8},
    "guided": {"true_cfg_scale": 3.0},
    "guided_lora": {"true_cfg_scale": 3.0, "lora_rank": 4, "lora_alpha": 8},
}
full_and_lora = pytest.mark.parametrize("kind", ["full", "lora"])


def config_of(kind: str, tiny_model: Path) -> DiffusionModelConfig:
    return model_config(tiny_model, **KINDS[kind])


SAMPLED: dict[str, Trajectories] = {}


def rolled_out(config: DiffusionModelConfig, **recorded: bool) -> Trajectories:
    """Six samples of three prompts of different lengths, over a window of three steps.

    What a config samples is sampled once, and each test has a copy of its own.
    """
    key = repr((config, recorded))
    if key not in SAMPLED:
        SAMPLED[key] = newly_rolled_out(config, **recorded)
    return deepcopy(SAMPLED[key])


def newly_rolled_out(config: DiffusionModelConfig, **recorded: bool) -> Trajectories:
    guided = config.pipeline.true_cfg_scale > 1
    request = rollout_request(samples=2, lengths=(5, 3, 7), negative_length=4 if guided else None, **recorded)
    _, trajectories = DiffusersRolloutEngine(config).generate(request)
    assert trajectories is not None
    return trajectories


def trainer(config: DiffusionModelConfig, **settings: Any) -> DiffusersFSDPEngine:
    engine = DiffusersFSDPEngine(config, actor_config(**settings))
    engine.initialize()
    return engine


def batch_of(trajectories: Trajectories, advantages: Tensor = ADVANTAGES) -> ActorBatch:
    return ActorBatch([(trajectories, advantages)], int((~advantages.isnan()).sum()))


def all_parameters(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Every parameter, trained or frozen, whole."""
    named = ((n, p.detach()) for n, p in engine.module.named_parameters())
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in named}


# ---- replay


def test_replay_in_micro_batches_differs_by_rounding_only(tiny_model: Path) -> None:
    config = config_of("guided", tiny_model)
    trajectories = rolled_out(config)
    replayed = trainer(config, ppo_micro_batch_size_per_gpu=4).rescored(trajectories).log_probs
    assert torch.allclose(replayed, trajectories.log_probs, rtol=0, atol=2e-6)


def test_replay_agrees_with_the_formula(tiny_model: Path) -> None:
    config = config_of("guided", tiny_model)
    trajectories = rolled_out(config)
    module = plain_module(config)
    with torch.no_grad():
        expected = [plain_replay(module, config, trajectories, step).log_probs for step in range(3)]
    assert torch.allclose(trajectories.log_probs, torch.stack(expected, 1), rtol=0, atol=2e-6)


def test_batches_are_cut_where_too_large_and_never_merged(tiny_model: Path) -> None:
    config = config_of("full", tiny_model)
    short, long = differently_long_rollouts(config)
    pieces = ActorBatch([(short, ADVANTAGES[:2]), (long, ADVANTAGES[2:])], 6).cut(3).parts
    assert pieces[0][0] is short, "a batch that is no larger was copied"
    assert [piece.keys for piece, _ in pieces] == [short.keys, long.keys[:3], long.keys[3:]]
    assert torch.equal(torch.cat([advantages for _, advantages in pieces]), ADVANTAGES)
    assert torch.equal(torch.cat([piece.latents for piece, _ in pieces[1:]]), long.latents)
    assert pieces[2][0].prompt_index.tolist() == [1]


def differently_long_rollouts(config: DiffusionModelConfig) -> list[Trajectories]:
    """Two samples of a prompt of 3 tokens, and two each of prompts of 7 and 5, sampled apart."""
    rollout = DiffusersRolloutEngine(config)
    requests = [rollout_request(lengths=(3,)), rollout_request(lengths=(7, 5), iteration=1)]
    sampled = [rollout.generate(request)[1] for request in requests]
    return [trajectories for trajectories in sampled if trajectories is not None]


# ---- updates


@pytest.mark.parametrize(("kind", "clip_grad"), crossed(KINDS, {"norm_clipped": 0.01, "norm_free": 1e6}))
def test_updates_equal_the_reference_trainer(tiny_model: Path, kind: str, clip_grad: float) -> None:
    """Three updates, uneven micro-batches of 4 and 2: weights and gradient norms."""
    config = config_of(kind, tiny_model)
    trajectories = rolled_out(config)
    engine = trainer(config, clip_grad=clip_grad, betas=(0.8, 0.95), weight_decay=0.1)
    start = engine.gather_weights()
    metrics = [engine.update_policy([batch_of(trajectories)]) for _ in range(3)]
    weights, norms = plain_updates(config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=3)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-4)
    assert (norms[0] > clip_grad) == (clip_grad < 1)
    assert largest_difference(engine.gather_weights(), weights) < 1e-6
    assert largest_difference(engine.gather_weights(), start) > 1e-3


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_a_bf16_model_trains_is_kept_in_fp32(one_block_model: Path, kind: str) -> None:
    """Weights, moments and average: a step of a small learning rate is less than a bf16 weight's last bit."""
    engine = trainer(model_config(one_block_model, dtype="bfloat16", **KINDS[kind]), enable=True)
    assert engine.ema is not None
    moments = [state[name] for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    kept = [*engine.optimizer.param_groups[0]["params"], *moments, *engine.ema.shadow.values()]
    assert len(kept) > 4
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_micro_batches_computed_in_bf16_are_added_up_in_fp32(one_block_model: Path) -> None:
    """Else the sum of hundreds would be rounded to eight bits at each, and no gradient be more than a bf16 number."""
    config = config_of("full", one_block_model)
    engine = trainer(config, param_dtype="bfloat16", ppo_micro_batch_size_per_gpu=1, clip_grad=1e6)
    sums: list[torch.Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sums.extend(p.grad.full_tensor() for p in optimizer.param_groups[0]["params"] if p.grad is not None)

    engine.optimizer.register_step_pre_hook(look)
    engine.update_policy([batch_of(rolled_out(config))])
    values = torch.cat([gradient.flatten() for gradient in sums])
    values = values[values != 0]
    assert (values != values.bfloat16().float()).double().mean() > 0.5


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "recorded"])
@pytest.mark.parametrize("kind", ["guided", "guided_lora"])
def test_the_half_without_prompt_may_be_a_constant(one_block_model: Path, kind: str, recorded: bool) -> None:
    """Three optimiser steps of one iteration: what the rollout recorded holds for the first one alone."""
    config = config_of(kind, one_block_model)
    trajectories = rolled_out(config, record_unconditional=recorded)
    assert (trajectories.unconditional is not None) == recorded
    settings = {"guidance_gradient": "conditional", "clip_grad": 1e6}
    engine = trainer(config, **settings)
    metrics = engine.update_policy([batch_of(trajectories)] * 3)
    assert (metrics["sample_steps"], metrics["recorded_steps"]) == (54, 18 if recorded else 0)
    weights, _ = plain_updates(config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=3)
    both, _ = plain_updates(config, actor_config(clip_grad=1e6), [(trajectories, ADVANTAGES)], updates=3)
    assert largest_difference(engine.gather_weights(), weights) < 1e-6
    assert largest_difference(weights, both) > 1e-4


def test_a_recorded_half_is_not_computed_again(one_block_model: Path) -> None:
    """A wrong one shows in the first step's log-probs, and not in the reference's, which has a half of its own."""
    config = config_of("guided", one_block_model)
    trajectories = rolled_out(config, record_unconditional=True)
    assert trajectories.unconditional is not None
    wrong = replace(trajectories, unconditional=trajectories.unconditional + 1.0)
    settings = {"guidance_gradient": "conditional", "use_kl_loss": True, "kl_loss_coef": 0.1}
    told, misled = (trainer(config, **settings).update_policy([batch_of(t)]) for t in (trajectories, wrong))
    assert told["ratio_deviation/max"] < 1e-5
    assert misled["ratio_deviation/max"] > 1e-3
    assert told["kl_loss"] < 1e-9
    assert misled["kl_loss"] > 1e-6


def test_a_recorded_half_is_that_of_the_first_step_alone(one_block_model: Path) -> None:
    """The weights that it was recorded of have moved by the second step, which computes its own."""
    config = config_of("guided", one_block_model)
    trajectories = rolled_out(config, record_unconditional=True)
    assert trajectories.unconditional is not None
    wrong = replace(trajectories, unconditional=trajectories.unconditional + 1.0)
    engines = [trainer(config, guidance_gradient="conditional") for _ in range(2)]
    told, misled = (
        engine.update_policy([batch_of(trajectories), batch_of(second)])
        for engine, second in zip(engines, (trajectories, wrong), strict=True)
    )
    assert told == misled
    assert largest_difference(*(engine.gather_weights() for engine in engines)) == 0
    count = len(trajectories) * trajectories.steps
    assert (told["sample_steps"], told["first_sample_steps"], told["recorded_steps"]) == (2 * count, count, count)


def test_parts_of_a_batch_add_up_to_one_mean(one_block_model: Path) -> None:
    """A part of two and a part of four, of different lengths: each sample weighs the same, and replays exactly."""
    config = config_of("full", one_block_model)
    short, long = differently_long_rollouts(config)
    parts = [(short, ADVANTAGES[:2]), (long, ADVANTAGES[2:])]
    engine = trainer(config, clip_grad=1e6)
    metrics = [engine.update_policy([ActorBatch(parts, 6)]) for _ in range(2)]
    assert metrics[0]["ratio_deviation/max"] == 0.0
    weights, norms = plain_updates(config, engine.actor_config, parts, updates=2)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-4)
    assert largest_difference(engine.gather_weights(), weights) < 1e-6


@full_and_lora
def test_kl_pulls_towards_the_reference_as_the_formula_says(one_block_model: Path, kind: str) -> None:
    config = config_of(kind, one_block_model)
    trajectories = rolled_out(config)
    engine = trainer(config, use_kl_loss=True, kl_loss_coef=20.0, clip_grad=1e6)
    for _ in range(3):
        engine.update_policy([batch_of(trajectories)])
    weights, _ = plain_updates(config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=3)
    without, _ = plain_updates(config, actor_config(clip_grad=1e6), [(trajectories, ADVANTAGES)], updates=3)
    assert largest_difference(engine.gather_weights(), weights) < 1e-6
    assert largest_difference(weights, without) > 1e-4


@full_and_lora
def test_kl_is_zero_at_the_start_and_then_the_gaussian_one(one_block_model: Path, kind: str) -> None:
    config = config_of(kind, one_block_model)
    trajectories = rolled_out(config)
    engine = trainer(config, use_kl_loss=True, kl_loss_coef=0.5, ppo_micro_batch_size_per_gpu=6)
    assert engine.update_policy([batch_of(trajectories)])["kl_loss"] == 0.0
    own, base = plain_module(config), QwenImage.load_transformer(config, torch.float32)
    load_trainable(own, engine.gather_weights())
    with torch.no_grad():
        pairs = [[plain_replay(m, config, trajectories, step) for m in (own, base)] for step in range(3)]
    expected = sum(plain_kl(*pair).item() for pair in pairs) / 3
    assert expected > 1e-6
    assert engine.update_policy([batch_of(trajectories)])["kl_loss"] == pytest.approx(expected, rel=1e-3)


def test_lora_starts_as_the_base_model_and_alike_everywhere(tiny_model: Path) -> None:
    """The first matrices come from a seed of their own, whatever torch's global generator was doing."""
    config = config_of("lora", tiny_model)
    one = plain_module(config)
    torch.rand(7)
    before = torch.get_rng_state()
    other = plain_module(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert largest_difference(dict(trainable(one)), dict(trainable(other))) == 0.0
    assert {name for name, p in trainable(one).items() if p.any()} == {n for n in trainable(one) if "lora_A" in n}
    base = config_of("full", tiny_model)
    assert torch.equal(newly_rolled_out(config).latents, newly_rolled_out(base).latents)


# ---- missing rewards


@pytest.mark.parametrize("missing", [[1], [0, 1, 2, 3]], ids=["one_sample", "a_whole_micro_batch"])
def test_a_missing_reward_leaves_the_update(one_block_model: Path, missing: Sequence[int]) -> None:
    """Also its share of the KL, which an advantage of 0 would keep."""
    config = config_of("full", one_block_model)
    trajectories = rolled_out(config)
    advantages = ADVANTAGES.clone()
    advantages[missing] = float("nan")
    kept = torch.tensor([row for row in range(6) if row not in missing])
    with_missing, without = (trainer(config, use_kl_loss=True, kl_loss_coef=20.0) for _ in range(2))
    start = without.gather_weights()
    for _ in range(2):
        with_missing.update_policy([batch_of(trajectories, advantages)])
        without.update_policy([batch_of(trajectories.rows(kept), ADVANTAGES[kept])])
    assert largest_difference(with_missing.gather_weights(), without.gather_weights()) < 1e-6
    assert largest_difference(without.gather_weights(), start) > 1e-3


@pytest.mark.parametrize("missing", [[1], [0, 1, 2, 3]], ids=["one_sample", "most"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("amplified", [False, True], ids=["as_it_is", "amplified"])
def test_the_first_ratio_is_exactly_one_whatever_is_missing(
    one_block_model: Path, missing: Sequence[int], dtype: str, amplified: bool
) -> None:
    """The rest is computed in the batch that it was sampled in. A CPU's sums show less of a batch's size than a GPU's:
    amplified, it shows in every output."""
    config = model_config(one_block_model, dtype=dtype, true_cfg_scale=3.0)
    rollout = DiffusersRolloutEngine(config)
    engine = trainer(config, ppo_micro_batch_size_per_gpu=6, loss_mode="grpo_guard")
    if amplified:
        for module in (rollout.transformer, engine.module):
            module.register_forward_hook(lambda _, inputs, output: tuple(o * (1 + len(o) / 64) for o in output))
    request = rollout_request(samples=2, lengths=(5, 3, 7), negative_length=4, record_means=True)
    trajectories = rollout.produce(request).recorded
    assert isinstance(trajectories, Trajectories)
    assert torch.equal(engine.rescored(trajectories).log_probs, trajectories.log_probs)
    advantages = ADVANTAGES.clone()
    advantages[missing] = float("nan")
    weights = torch.ones(6, 3)
    weights[5, 1] = float("nan")  # a step that rollout correction rejects
    metrics = engine.update_policy([batch_of(replace(trajectories, is_weights=weights), advantages)])
    assert metrics["logprob_abs_diff/max"] == metrics["ratio_deviation/max"] == metrics["mean_drift"] == 0.0
    assert metrics["grad_norm"] > 0
    assert metrics["sample_steps"] == 3 * (6 - len(missing)) - 1


@pytest.mark.parametrize("missing", [[2], [0, 1, 2, 3]], ids=["one_sample", "a_whole_micro_batch"])
def test_a_sample_that_overflowed_and_has_no_reward_harms_no_other(
    one_block_model: Path, missing: Sequence[int]
) -> None:
    """It is computed with the others, where a gradient of 0 times what is not finite would be NaN, be it its text's."""
    config = config_of("guided", one_block_model)
    request = rollout_request(samples=2, lengths=(5, 3, 7), negative_length=4, record_unconditional=True)
    trajectories = DiffusersRolloutEngine(config).produce(request).recorded
    assert isinstance(trajectories, Trajectories)
    assert trajectories.unconditional is not None
    advantages = ADVANTAGES.clone()
    advantages[missing] = float("nan")
    broken, whole = (trajectories.rows(torch.arange(6)) for _ in range(2))
    for tensor in (broken.latents[:, 1:], broken.log_probs, broken.unconditional):
        assert tensor is not None
        tensor[missing] = float("nan")
    text, mask = broken.prompts.prompt_embeds, broken.prompts.prompt_embeds_mask
    one_more = {
        "prompt_embeds": torch.cat([text, text[:1] * torch.nan]),
        "prompt_embeds_mask": torch.cat([mask, mask[:1]]),
    }
    index = broken.prompt_index.clone()
    index[missing] = len(text)
    broken = replace(broken, prompts=replace(broken.prompts, **one_more), prompt_index=index)
    settings: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 20.0, "guidance_gradient": "conditional"}
    with_broken, without = (trainer(config, **settings) for _ in range(2))
    for _ in range(2):
        found = with_broken.update_policy([batch_of(broken, advantages)])
        expected = without.update_policy([batch_of(whole, advantages)])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert largest_difference(with_broken.gather_weights(), without.gather_weights()) < 1e-6


def test_a_gradient_that_is_not_finite_stops_the_update(one_block_model: Path) -> None:
    """The weights stay, and nothing of the bad gradient is left for the next update."""
    config = config_of("full", one_block_model)
    trajectories = rolled_out(config)
    engine, untouched = trainer(config), trainer(config)
    start = engine.gather_weights()
    broken = trajectories.rows(torch.arange(6))
    broken.latents[2, 1, 0, 0] = float("nan")
    with pytest.raises(GradientNotFinite, match=r"norm of optimiser step 0 is nan\. .* trainer\.on_nonfinite skip\. "):
        engine.update_policy([batch_of(broken)])
    assert largest_difference(engine.gather_weights(), start) == 0.0
    for each in (engine, untouched):
        each.update_policy([batch_of(trajectories)])
    assert largest_difference(engine.gather_weights(), untouched.gather_weights()) == 0.0


class WithoutGradient(FlowGRPOLoss):
    """A loss of numbers that the weights have no part in."""

    def __call__(self, **given: Any) -> DiffusionLossResult:
        return DiffusionLossResult(super().__call__(**given).loss.detach())


def test_a_loss_without_gradient_is_named(one_block_model: Path) -> None:
    """torch's own words are of an element 0 of tensors."""
    config = config_of("full", one_block_model)
    engine = trainer(config, loss_mode=f"{__name__}:WithoutGradient")
    with pytest.raises(WrongAnswer, match=r"Gradient', whose loss has no gradient: compute it from .*log_probs"):
        engine.update_policy([batch_of(rolled_out(config))])


# ---- learning rate and averages


def test_warm_up_is_linear_to_the_learning_rate(one_block_model: Path) -> None:
    config = config_of("lora", one_block_model)
    trajectories = rolled_out(config)
    engine = trainer(config, lr_warmup_steps=4)
    metrics = [engine.update_policy([batch_of(trajectories)]) for _ in range(6)]
    rates = [0.25e-2, 0.5e-2, 0.75e-2, 1e-2, 1e-2, 1e-2]
    weights, _ = plain_updates(config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=6, rates=rates)
    assert largest_difference(engine.gather_weights(), weights) < 1e-6
    constant, _ = plain_updates(config, engine.actor_config, [(trajectories, ADVANTAGES)], updates=6)
    assert largest_difference(constant, weights) > 1e-4
    assert metrics[-1]["lr"] == 1e-2
    assert metrics[-1]["optimizer_steps"] == 6


@full_and_lora
def test_average_follows_its_formula(one_block_model: Path, kind: str) -> None:
    """shadow <- d shadow + (1-d) weights, d = min((1+s)/(10+s), decay) after s optimiser steps, every second one."""
    config = config_of(kind, one_block_model)
    trajectories = rolled_out(config)
    engine = trainer(config, enable=True, decay=0.4, update_interval=2)
    shadow = engine.gather_weights()
    for update in range(1, 7):
        engine.update_policy([batch_of(trajectories)])
        weights = engine.gather_weights()
        if update % 2 == 0:
            decay = min((1 + update) / (10 + update), 0.4)
            shadow = {name: decay * shadow[name] + (1 - decay) * weights[name] for name in shadow}
        with engine.holding("average"):
            averaged = engine.gather_weights()
        assert largest_difference(averaged, shadow) < 1e-6
        assert largest_difference(engine.gather_weights(), weights) == 0.0
    assert largest_difference(shadow, weights) > 1e-5


def test_the_average_lags_as_in_public_flow_grpo() -> None:
    """Behind a weight that moves by 1 a step, with SD3's settings there: the ramp counts optimiser steps."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    config = EmaConfig(enable=True, decay=0.9, update_interval=8)
    average, shadow, lags = WeightAverage(TrainedShards(module), config), 0.0, {}
    for step in range(1, 641):
        nn.init.constant_(module.weight, step)
        average.update(step)
        if step % 8 == 0:
            shadow += (1 - min((1 + step) / (10 + step), 0.9)) * (step - shadow)
        lags[step] = step - average.shadow["weight"].item()
        assert lags[step] == pytest.approx(step - shadow, abs=1e-9)
    assert [round(lags[step]) for step in (40, 160, 320, 640)] == [19, 60, 71, 72]


# ---- checkpoints


@full_and_lora
@pytest.mark.parametrize("small", [0, checkpoint.SMALL_BYTES])
def test_a_resumed_trainer_goes_on_bit_for_bit(
    tiny_model: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """However its tensors are read."""
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", small)
    config = config_of(kind, tiny_model)
    trajectories = rolled_out(config)
    settings = {"enable": True, "update_interval": 1, "lr_warmup_steps": 5, "use_kl_loss": True, "kl_loss_coef": 0.1}
    engine = trainer(config, **settings)
    for _ in range(2):
        engine.update_policy([batch_of(trajectories)])
    engine.save_checkpoint(tmp_path / "checkpoint")
    drawn = torch.rand(3)
    resumed = trainer(config, **settings)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), drawn)
    for _ in range(2):
        metrics = [each.update_policy([batch_of(trajectories)]) for each in (engine, resumed)]
        assert metrics[0] == metrics[1]
    assert metrics[0]["optimizer_steps"] == 4
    assert largest_difference(all_parameters(engine), all_parameters(resumed)) == 0.0
    with engine.holding("average"), resumed.holding("average"):
        assert largest_difference(engine.gather_weights(), resumed.gather_weights()) == 0.0


@full_and_lora
def test_each_checkpoint_that_is_written_behind_has_the_state_of_its_begin(
    one_block_model: Path, kind: str, tmp_path: Path
) -> None:
    """The second one's copy takes the memory of the first one's, and training goes on meanwhile."""
    config = config_of(kind, one_block_model)
    engine, batch = trainer(config, enable=True, lr_warmup_steps=5), batch_of(rolled_out(config))
    states = []
    for number in range(2):
        engine.update_policy([batch])
        engine.start_saving(tmp_path / str(number))
        states.append((engine.gather_weights(), engine.optimizer_steps, engine.lr_scheduler.get_last_lr()))
        engine.update_policy([batch])
        wait_until_saved(engine)
    resumed = trainer(config, enable=True, lr_warmup_steps=5)
    for number, (weights, steps, rate) in enumerate(states):
        resumed.load_checkpoint(tmp_path / str(number))
        assert largest_difference(resumed.gather_weights(), weights) == 0.0
        assert (resumed.optimizer_steps, resumed.lr_scheduler.get_last_lr()) == (steps, rate)
    assert largest_difference(states[0][0], states[1][0]) > 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("room", [2**16, 2**17 + 2**15, 2**18])
def test_a_full_disk_is_told_as_of_any_other_file(
    tiny_model: Path, small_disk: Path, background: bool, room: int
) -> None:
    """Not as torch's own exception with its frames: a command ends with this error's sentence. Wherever in a file the
    room ends."""
    engine = trainer(config_of("full", tiny_model))
    (small_disk / "another's").write_bytes(bytes(2**20 - room))
    save = engine.start_saving if background else engine.save_checkpoint
    with pytest.raises(OSError, match="No space left on device") as raised:  # noqa: PT012  by either of the two
        save(small_disk / "checkpoint")
        wait_until_saved(engine)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(small_disk / "checkpoint")


@pytest.mark.parametrize("copies", [0, 1])
def test_a_checkpoint_takes_what_is_counted(tiny_model: Path, tmp_path: Path, copies: int) -> None:
    config = config_of("full", tiny_model)
    engine = trainer(config, enable=bool(copies))
    engine.update_policy([batch_of(rolled_out(config))])
    engine.save_checkpoint(tmp_path / "checkpoint")
    entries = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata.values()
    stored = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    written = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in stored)
    run = TrainConfig.model_validate(
        {"actor_rollout_ref": {"model": {"path": str(tiny_model)}, "actor": {"ema": {"enable": bool(copies)}}}}
    )
    trained = sum(weight.numel() for weight in trainable(engine.module).values())
    counted = checkpoint_bytes(run, SimpleNamespace(trained=trained))
    assert 0 <= written - counted < 0.01 * counted, "a counter of steps for each weight, and the schedule"


def test_a_checkpoint_has_no_checksums_and_other_files_have(one_block_model: Path, tmp_path: Path) -> None:
    """They are made under Python's lock, beside an iteration that trains, and torch reads none."""
    folder = tmp_path / "checkpoint"
    trainer(config_of("full", one_block_model)).save_checkpoint(folder)
    places = [*FileSystemReader(folder).read_metadata().storage_data.values()]
    assert places
    for place in places:
        content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert not any(entry.CRC for entry in archive.infolist())
    torch.save(torch.ones(3), tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "other.pt") as archive:
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


def test_saving_before_the_first_update_changes_nothing(one_block_model: Path, tmp_path: Path) -> None:
    config = config_of("full", one_block_model)
    trajectories = rolled_out(config)
    saved, unsaved, resumed = trainer(config), trainer(config), trainer(config)
    saved.save_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for engine in (saved, unsaved, resumed):
        engine.update_policy([batch_of(trajectories)])
    assert largest_difference(saved.gather_weights(), unsaved.gather_weights()) == 0.0
    assert largest_difference(resumed.gather_weights(), unsaved.gather_weights()) == 0.0


def test_a_warm_up_changes_nothing(one_block_model: Path) -> None:
    """Neither the first update, which its gradient has no part in, nor what is drawn later."""
    config = config_of("lora", one_block_model)
    trajectories = rolled_out(config)
    warmed, cold = trainer(config), trainer(config)
    state = torch.get_rng_state()
    warmed.warm_up(Canary(prompt_table((5, 3))))
    assert torch.equal(torch.get_rng_state(), state)
    found = [engine.update_policy([batch_of(trajectories)]) for engine in (warmed, cold)]
    assert found[0] == found[1]
    assert largest_difference(warmed.gather_weights(), cold.gather_weights()) == 0.0


# ---- the weights leave the trainer


Trained = tuple[DiffusersFSDPEngine, DiffusersRolloutEngine]


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request: pytest.FixtureRequest, tiny_model: Path) -> Trained:
    """A trainer after two updates, and a rollout engine with its weights."""
    config = config_of(request.param, tiny_model)
    engine, rollout = trainer(config), DiffusersRolloutEngine(config)
    trajectories = rolled_out(config)
    for _ in range(2):
        engine.update_policy([batch_of(trajectories)])
    rollout.load_weights(engine.gather_weights())
    return engine, rollout


def test_canary_agrees_after_a_sync_and_notices_one_weight(trained: Trained) -> None:
    engine, rollout = trained
    canary = Canary(prompt_table((5, 3)))
    ours = engine.canary_velocity(canary)
    assert check_canary(ours, rollout.canary_velocity(canary), version=1, tolerance=0.0) == 0.0
    weights = engine.gather_weights()
    name = next(n for n in weights if "to_q" in n)
    weights[name][0, 0] += 1e-2
    rollout.load_weights(weights)
    with pytest.raises(WeightSyncError, match=r"weight sync of policy version 7 .*allowed 0:"):
        check_canary(ours, rollout.canary_velocity(canary), version=7, tolerance=0.0)
    rollout.load_weights(engine.gather_weights())


@pytest.mark.parametrize(("theirs", "tolerance"), [(1.02, 0.01), (float("nan"), 1e9)])
def test_canary_beyond_its_tolerance(theirs: float, tolerance: float) -> None:
    with pytest.raises(WeightSyncError):
        check_canary(torch.ones(4), torch.full((4,), theirs), version=0, tolerance=tolerance)
    assert check_canary(torch.ones(4), torch.full((4,), 1.02), version=0, tolerance=0.03) == pytest.approx(
        0.02, rel=1e-4
    )


def test_weights_with_wrong_names_are_refused(trained: Trained) -> None:
    engine, rollout = trained
    weights = engine.gather_weights()
    name, value = weights.popitem()
    with pytest.raises(WeightSyncError, match="1 names differ") as error:
        rollout.load_weights(weights)
    assert name in str(error.value)
    with pytest.raises(WeightSyncError, match="2 names differ"):
        rollout.load_weights(weights | {name + "x": value})
    assert (
        check_canary(
            engine.canary_velocity(Canary(prompt_table())), rollout.canary_velocity(Canary(prompt_table())), 0, 0.0
        )
        == 0.0
    )


def test_a_rollout_that_is_asked_for_latents_only_never_decodes(tiny_model: Path) -> None:
    """The latents it leaves are those that the pictures are decoded from, to the bit."""
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    decode, decoded = engine.vae.decode, []
    engine.vae.decode = lambda *given, **more: decoded.append(1) or decode(*given, **more)
    bare = engine.produce(replace(rollout_request(), outputs=frozenset({LATENTS})))
    assert (bare.pictures, decoded) == (None, [])
    assert bare.latents.dtype == torch.float32
    drawn = engine.produce(replace(rollout_request(), outputs=frozenset({PICTURES})))
    assert (drawn.latents, decoded) == (None, [1])
    assert torch.equal(engine.decode(bare.latents), drawn.pictures)


@pytest.mark.parametrize(
    ("settings", "sharded"),
    [({}, False), ({"param_offload": True}, True), ({"param_dtype": "bfloat16"}, True)],
    ids=["alone", "offloaded", "cast"],
)
def test_a_lone_rank_shards_no_frozen_weight_that_it_need_not(
    tiny_model: Path, settings: dict[str, Any], sharded: bool
) -> None:
    """What FSDP has sharded it copies in every pass; but it also offloads it, and casts it to another format."""
    engine = DiffusersFSDPEngine(config_of("lora", tiny_model), actor_config(**settings))
    engine.initialize()
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    assert {isinstance(parameter, DTensor) for parameter in frozen} == {sharded}
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_a_lone_rank_trains_is_shared_in_one_group(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """Not block by block, where nothing is let go between the blocks; a checkpoint of either goes on as the other. Of
    all weights, those that several blocks depend on have the blocks' gradients summed in another order."""
    config = config_of(kind, tiny_model)
    trajectories = rolled_out(config)
    blocks, at_once = trainer(config), trainer(config, reshard_after_forward=False)
    shared = [[part for part in each.module.modules() if isinstance(part, FSDPModule)] for each in (blocks, at_once)]
    assert len(shared[0]) > 2
    assert shared[1] == [at_once.module]
    blocks.update_policy([batch_of(trajectories)])
    blocks.save_checkpoint(tmp_path / "checkpoint")
    at_once.load_checkpoint(tmp_path / "checkpoint")
    for _ in range(2):
        first, second = (each.update_policy([batch_of(trajectories)]) for each in (blocks, at_once))
        assert first == (second if kind == "lora" else pytest.approx(second, rel=1e-4, abs=1e-6))
    difference = largest_difference(all_parameters(blocks), all_parameters(at_once))
    assert difference == 0.0 if kind == "lora" else difference < 1e-5
    offloading = trainer(config, reshard_after_forward=False, param_offload=True)
    assert len([part for part in offloading.module.modules() if isinstance(part, FSDPModule)]) > 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_guided_updates_in_bf16_are_the_same_block_by_block_and_at_once(tiny_model: Path, checkpointing: bool) -> None:
    """To the bit, also where each block is called twice in a pass and computed anew for both calls."""
    config = model_config(tiny_model, lora_rank=4, lora_alpha=8, true_cfg_scale=3.0, dtype="bfloat16")
    trajectories = rolled_out(config)
    ways = ({}, {"reshard_after_forward": False, "gradient_checkpointing": checkpointing})
    blocks, at_once = (trainer(config, **settings) for settings in ways)
    for _ in range(2):
        first, second = (each.update_policy([batch_of(trajectories)]) for each in (blocks, at_once))
        assert first == second
    assert largest_difference(all_parameters(blocks), all_parameters(at_once)) == 0.0


def test_no_frozen_weight_stays_whole_while_the_others_are_divided(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Qwen-Image's 38 GiB two GPUs held all and a half each: 58 GiB taken at the load, where 20 are needed."""
    alive: list[float] = []
    whole: list[weakref.ref[nn.Parameter]] = []
    divide = fsdp.fully_shard

    def noting(part: nn.Module, **settings: Any) -> None:
        frozen = [
            weight for weight in part.parameters() if not weight.requires_grad and not isinstance(weight, DTensor)
        ]
        divide(part, **settings)
        whole.extend(weakref.ref(weight) for weight in frozen)
        del frozen
        alive.append(sum(weight() is not None for weight in whole) / max(1, len(whole)))

    monkeypatch.setattr(fsdp, "fully_shard", noting)
    config = model_config(tiny_model, lora_rank=4, lora_alpha=8)
    DiffusersFSDPEngine(config, actor_config(param_dtype="bfloat16")).initialize()
    assert len(whole) > 0
    assert alive == [0.0] * len(alive)


@pytest.mark.parametrize(
    ("family", "network"),
    [("stable_diffusion_3", "time_text_embed"), ("wan", "condition_embedder"), ("z_image", "t_embedder")],
)
def test_where_bf16_computes_over_fp32_weights_the_timestep_is_the_rollouts(
    tmp_path: Path, family: str, network: str
) -> None:
    """bf16 numbers between 512 and 1024 are 4 apart: 790.4 was 792, and velocities .04 to .14 away in place of .01."""
    known = FAMILIES[family]
    known.save(tmp_path)
    sizes = dict(zip(("height", "width"), known.sizes[0], strict=True)) | known.plain
    config = model_config(tmp_path, lora_rank=4, lora_alpha=8, num_inference_steps=10, **sizes)
    canary = Canary(embeddings_of(config, [5, 3]), rows=2, timesteps=10)
    engine = trainer(config, param_dtype="bfloat16")
    seen: list[Tensor] = []
    engine.module.get_submodule(network).register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten()))
    own, rollouts = engine.canary_velocity(canary), DiffusersRolloutEngine(config).canary_velocity(canary)
    apart = [(a - b).norm() / b.norm() for a, b in zip(own, rollouts, strict=True)]
    assert 0.002 < max(apart) < 0.01
    assert {time.dtype for time in seen} == {torch.float32}
    engine.warm_up(canary)  # a backward pass, too


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_stored_weights_are_widened_block_by_block_where_that_loses_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    """A rank that reads all of Qwen-Image in fp32 takes 76 GiB of the host's memory, which files in fp32 need."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    transformer = QwenImageTransformer2DModel.from_pretrained(tiny_model, subfolder="transformer").to(stored)
    transformer.save_pretrained(folder / "transformer")
    blocks: list[set[torch.dtype]] = []
    divide = fsdp.fully_shard

    def noting(part: nn.Module, **settings: Any) -> None:
        """What the last block is in meanwhile."""
        blocks.append({weight.dtype for weight in modules[0].transformer_blocks[-1].parameters()})
        divide(part, **settings)

    class Noted(DiffusersFSDPEngine):
        def _shard(self, module: nn.Module) -> nn.Module:
            modules.append(module)
            return super()._shard(module)

    modules: list[Any] = []
    monkeypatch.setattr(fsdp, "fully_shard", noting)
    engine = Noted(model_config(folder, dtype="bfloat16"), actor_config())
    engine.initialize()
    assert blocks[0] == {stored}
    weights, expected = engine.gather_weights(), transformer.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert largest_difference(weights, {name: weight.float() for name, weight in expected.items()}) == 0.0


@pytest.mark.parametrize(("kind", "dtype"), [("full", torch.bfloat16), ("lora", torch.float32)])
def test_all_weights_go_to_a_rollout_as_it_holds_them(one_block_model: Path, kind: str, dtype: torch.dtype) -> None:
    """Of Qwen-Image they are 38 GiB so, and 76 in the fp32 that they are trained in. LoRA's are few: each engine rounds
    them as it needs them."""
    config = model_config(one_block_model, dtype="bfloat16", **KINDS[kind])
    engine = trainer(config)
    whole, trained = dict(engine.whole_weights()), engine.gather_weights()
    assert {weight.dtype for weight in whole.values()} == {dtype}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert all(torch.equal(whole[name], weight.to(dtype)) for name, weight in trained.items())
    rollout = DiffusersRolloutEngine(config)
    load = rollout.begin_load()
    load.take(whole)
    load.finish()
    held = rollout.held_weights()
    assert all(torch.equal(held[name], weight.bfloat16()) for name, weight in trained.items())
