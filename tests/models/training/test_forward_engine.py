# SPDX-License-Identifier: Apache-2.0
"""Losses of the forward process through the trainer on one rank, against plain autograd."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImagePipeline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.config.actor import ForwardProcessConfig
from models.families.base import DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import FinishedLatents, PromptTable
from models.training import forward_batches
from models.training.forward_batches import piece_sizes
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.training.weight_copies import WeightCopy
from models.weights.canary import Canary
from models.weights.trainable import export_weights, trainable
from tests.support.cases import crossed
from tests.support.helpers import (
    actor_config,
    largest_difference,
    model_config,
    passes_of_updates_alike,
    rollout_request,
)
from tests.support.plain_forward import Noised, noised, plain_iterations, plain_loss, predicted, with_pairs_noise
from tests.support.plain_trainer import plain_kl, plain_module, plain_replay

pytestmark = pytest.mark.usefixtures("one_rank")

NAN = float("nan")
KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora_rank": 4, "lora_alpha": 8}}
# Two mini-batches: two prompts of three samples and one of three; a missing reward, and a group whose rewards tie.
ADVANTAGES = (torch.tensor([1.0, -0.8, NAN, 0.3, 0.3, 0.3]), torch.tensor([0.6, -0.9, 6.0]))
KL = {"use_kl_loss": True, "kl_loss_coef": 0.2}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": (
        {"dpo_beta": 3.0, "matching_loss_coef": 0.3},
        {"timestep_sampling": "logit_normal", "num_train_timesteps": 2},
    ),
    "diffusion_nft": ({"nft_beta": 0.4, **KL}, {"num_train_timesteps": 3, "old_policy_decay": 0.4}),
    "awm": ({"clip_ratio": 0.02, "awm_weighting": "t", **KL}, {"timestep_fraction": 0.5, "old_policy_decay": 0.7}),
}
every_loss = pytest.mark.parametrize("loss", LOSSES)
full_and_lora = pytest.mark.parametrize("kind", KINDS)
loss_and_kind = pytest.mark.parametrize(("loss", "kind"), crossed(LOSSES, {kind: kind for kind in KINDS}))


def finished(config: DiffusionModelConfig) -> list[FinishedLatents]:
    """The samples of the two mini-batches, of prompts with 5, 3 and 7 tokens."""
    engine, parts = DiffusersRolloutEngine(config), []
    for name, lengths in (("a", (5, 3)), ("b", (7,))):
        request = rollout_request(samples=3, lengths=lengths, window=())
        keys = tuple(replace(key, prompt_uid=f"{name}/{key.prompt_uid}") for key in request.keys)
        _, samples = engine.generate(replace(request, keys=keys, record_finished=True))
        assert isinstance(samples, FinishedLatents)
        parts.append(samples)
    return parts


@pytest.mark.parametrize("loss", ["dpo", "diffusion_nft"])
@pytest.mark.parametrize("spoiled", ["latents", "text"])
def test_a_rank_with_fewer_pieces_than_others_does_not_meet_a_sample_that_was_left_out(
    one_block_model: Path, monkeypatch: pytest.MonkeyPatch, loss: str, spoiled: str
) -> None:
    """Its idle pieces change no weight, though its first sample's latents, or its text's embeddings, are not finite."""
    config, known = model_config(one_block_model), forward_batches._over_ranks
    first, advantages = finished(config)[0], torch.tensor([NAN, 0.9, -0.8, 0.3, -0.6, 0.2])
    if spoiled == "text":
        first.prompts.prompt_embeds[first.prompt_index[0]] = float("inf")
        advantages[first.prompt_index == first.prompt_index[0]] = NAN
    else:
        first.latents[0] = NAN
    batch, forward, weights = ActorBatch([(first, advantages)], 5), ForwardProcessConfig(num_train_timesteps=2), []
    for more in (0, 1):  # that another rank has

        def over_ranks(number: int, operation: Any, device: str, more: int = more) -> int:
            return known(number, operation, device) + (more if operation == dist.ReduceOp.MAX else 0)

        monkeypatch.setattr(forward_batches, "_over_ranks", over_ranks)
        engine = DiffusersFSDPEngine(config, actor_config(loss_mode=loss), forward_config=forward)
        engine.initialize()
        assert engine.update_policy([batch])["grad_norm"] > 0
        weights.append(engine.gather_weights())
    assert largest_difference(*weights) == 0.0


@pytest.mark.parametrize("loss", ["diffusion_nft", "dpo"])
def test_a_rank_of_whose_samples_none_is_chosen_gives_no_gradient(
    one_block_model: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """And none that is not finite, which all ranks would have, though its prompts' embeddings are."""
    config, known = model_config(one_block_model), forward_batches._over_ranks
    first = finished(config)[0]
    first.prompts.prompt_embeds[:] = float("inf")
    monkeypatch.setattr(forward_batches, "_over_ranks", lambda number, *how: known(number, *how) + 2)
    engine = DiffusersFSDPEngine(
        config, actor_config(loss_mode=loss), forward_config=ForwardProcessConfig(num_train_timesteps=2)
    )
    engine.initialize()
    batch = ActorBatch([(first, torch.full((len(first),), NAN))], 5)
    assert engine.update_policy([batch])["grad_norm"] == 0.0


@pytest.fixture(scope="module")
def tiny_model(one_block_model: Path) -> Path:
    """One block is enough here."""
    return one_block_model


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> list[FinishedLatents]:
    """LoRA starts as the base model, so both kinds train on them."""
    return finished(model_config(tiny_model))


def trainer(config: DiffusionModelConfig, loss: str, **settings: Any) -> DiffusersFSDPEngine:
    """An engine with the loss's settings above; `settings` are of either section."""
    actor, forward = LOSSES.get(loss, ({}, {}))
    changes = {name: settings.pop(name) for name in ForwardProcessConfig.model_fields if name in settings}
    actor = {"loss_mode": loss, "ppo_micro_batch_size_per_gpu": 2, "clip_grad": 1e6} | actor | settings
    engine = DiffusersFSDPEngine(
        config, actor_config(**actor), forward_config=ForwardProcessConfig(**forward | changes)
    )
    engine.initialize()
    return engine


def batches_of(samples: Sequence[FinishedLatents], advantages: Sequence[Tensor] = ADVANTAGES) -> list[ActorBatch]:
    pairs = zip(samples, advantages, strict=True)
    return [ActorBatch([(part, row)], int((~row.isnan()).sum())) for part, row in pairs]


def levels_of(samples: FinishedLatents, forward: ForwardProcessConfig) -> Tensor:
    """[B, K] by the documented draw, step -2 of a sample's key."""
    generators = [torch.Generator().manual_seed(key.seed_of(-2)) for key in samples.keys]
    if forward.timestep_sampling == "logit_normal":
        return torch.stack(
            [torch.sigmoid(torch.randn(forward.num_train_timesteps or 1, generator=g)) for g in generators]
        )
    schedule = torch.tensor([1.0, 0.75, 0.5, 0.25])[: int(4 * forward.timestep_fraction)]
    count = forward.num_train_timesteps or len(schedule)
    return torch.stack([schedule[torch.randperm(len(schedule), generator=g)[:count]] for g in generators])


def plain_data(engine: DiffusersFSDPEngine, samples: Sequence[FinishedLatents]) -> list[Noised]:
    """What should be trained on: for dpo the best and worst of each group, else all that have an advantage."""
    data = []
    paired = engine.actor_config.diffusion_loss.loss_mode == "dpo"
    chosen = ([0, 1], [2, 1]) if paired else ([0, 1, 3, 4, 5], [0, 1, 2])
    for part, row, index in zip(samples, ADVANTAGES, chosen, strict=True):
        rows = part.rows(torch.tensor(index))
        rows = with_pairs_noise(rows) if paired else rows
        data.append(noised(rows, row[index], levels_of(rows, engine._forward_config)))
    return data


def old_weights(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    with engine.holding("old"):
        return engine.gather_weights()


# ---- updates


@loss_and_kind
def test_iterations_equal_the_plain_trainers(
    tiny_model: Path, samples: list[FinishedLatents], kind: str, loss: str
) -> None:
    """Two iterations of two mini-batches and two epochs, in micro-batches of two."""
    config = model_config(tiny_model, **KINDS[kind])
    engine = trainer(config, loss)
    start = engine.gather_weights()
    data = plain_data(engine, samples)
    decay = engine._forward_config.old_policy_decay
    plain = plain_iterations(config, engine.actor_config, [data, data], [decay, decay], epochs=2)
    for number in range(2):
        metrics = engine.update_policy(batches_of(samples) * 2)
        assert metrics["grad_norm"] == pytest.approx(plain.norms[number], rel=1e-3)
        assert largest_difference(engine.gather_weights(), plain.weights[number]) < 3e-6
        if loss != "dpo":
            assert largest_difference(old_weights(engine), plain.old[number]) < 3e-6
    assert metrics["optimizer_steps"] == 8
    assert largest_difference(plain.weights[1], start) > 1e-3
    if loss != "dpo":
        assert largest_difference(plain.weights[1], plain.old[1]) > 1e-3


@every_loss
def test_a_compiled_update_computes_few_sizes_and_what_an_eager_one_does(
    tiny_model: Path, samples: list[FinishedLatents], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are left out of some iterations and not of others: code would be compiled anew for each number left."""
    monkeypatch.setattr("models.training.fsdp.compile_blocks", lambda adapter, module: None)
    sizes: set[int] = set()

    def note(module: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        sizes.add(len(named["hidden_states"]))

    engines = [
        trainer(model_config(tiny_model, compile=compiled), loss, ppo_micro_batch_size_per_gpu=8)
        for compiled in (False, True)
    ]
    engines[1].module.register_forward_pre_hook(note, with_kwargs=True)
    for left_out in ([2], [1, 2], [0, 1, 2, 4], []):
        advantages = ADVANTAGES[0].nan_to_num(0.1)
        advantages[3:] = torch.tensor([0.3, -0.2, 0.4])
        advantages[left_out] = torch.nan
        eager, compiled = (engine.update_policy(batches_of(samples[:1], [advantages])) for engine in engines)
        assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-7)
        assert compiled["sample_steps"] == eager["sample_steps"]
        assert largest_difference(engines[0].gather_weights(), engines[1].gather_weights()) < 3e-6
    assert sizes == ({4, 2} if loss == "dpo" else {6, 4, 2})


def test_the_sizes_that_a_compiled_piece_may_have() -> None:
    assert piece_sizes(256, 128, 1) == {128, 64, 32, 16}  # nothing is left over where none is left out
    assert piece_sizes(240, 128, 1) == {128, 64, 32, 16, 112}
    assert piece_sizes(96, 128, 2) == {128, 64, 32, 16, 96}
    assert piece_sizes(10, 6, 2) == {6, 2, 4}  # pairs stay together
    assert piece_sizes(5, 1, 1) == {1}


@pytest.mark.parametrize("loss", ["dpo", "diffusion_nft"])
def test_levels_that_share_a_pass_train_as_those_that_do_not(
    tiny_model: Path, samples: list[FinishedLatents], loss: str
) -> None:
    """The same gradients and metrics by a fraction of the passes; a batch of three samples has a part of one, too."""
    config = model_config(tiny_model, **KINDS["lora"])
    count = LOSSES[loss][1]["num_train_timesteps"]
    engines = [trainer(config, loss, levels_per_pass=together) for together in (1, count)]
    passes = passes_of_updates_alike(engines, lambda: batches_of(samples))
    assert passes[0] == count * passes[1]


@pytest.mark.parametrize(
    ("shared", "stratified"), [(True, False), (False, True), (True, True)], ids=["shared", "stratified", "both"]
)
@pytest.mark.parametrize("loss", ["diffusion_nft", "awm"])
def test_shared_noise_and_stratified_levels_apart_and_together_train_as_the_plain_trainers(
    tiny_model: Path, samples: list[FinishedLatents], loss: str, shared: bool, stratified: bool
) -> None:
    """By the documented draw of the group's own key, or of each sample's; two levels, stratified one of the two noisier
    and one of the two cleaner ones. Matching takes the same draws."""
    config = model_config(tiny_model)
    given: dict[str, Any] = {"num_train_timesteps": 2, "timestep_fraction": 1.0, "share_noise_in_group": shared}
    given |= {"awm_weighting": "adaptive"} if loss == "awm" else {}
    given |= {"timestep_sampling": "stratified"} if stratified else {}
    engine = trainer(config, loss, matching_loss_coef=0.3, **given)
    data = []
    for part, row, index in zip(samples, ADVANTAGES, ([0, 1, 3, 4, 5], [0, 1, 2]), strict=True):
        rows = part.rows(torch.tensor(index))
        if shared:
            rows = replace(rows, keys=tuple(replace(key, sample_index=-1) for key in rows.keys))
        levels = levels_of(rows, engine._forward_config)
        if stratified:
            drawn = [torch.Generator().manual_seed(key.seed_of(-2)) for key in rows.keys]
            picked = [[int(torch.randint(2, (1,), generator=generator)) for _ in range(2)] for generator in drawn]
            levels = torch.tensor([[(1.0, 0.75)[noisy], (0.5, 0.25)[clean]] for noisy, clean in picked])
        data.append(noised(rows, row[index], levels))
    decay = engine._forward_config.old_policy_decay
    plain = plain_iterations(config, engine.actor_config, [data, data], [decay, decay])
    for number in range(2):
        metrics = engine.update_policy(batches_of(samples))
        assert metrics["grad_norm"] == pytest.approx(plain.norms[number], rel=1e-3)
        assert largest_difference(engine.gather_weights(), plain.weights[number]) < 3e-6


@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_guided_velocities_learn_through_both_halves_or_through_the_prompts_alone(
    tiny_model: Path, samples: list[FinishedLatents], gradient: str
) -> None:
    """Twice the guidance, at noised samples, with Qwen-Image's length of the half with the prompt (plain autograd)."""
    config = model_config(tiny_model, true_cfg_scale=2.0)
    embeds, mask = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(3)), torch.ones(1, 4).bool()
    without = PromptTable(embeds, mask)
    part = samples[1]
    table = replace(part.prompts, negative_prompt_embeds=embeds, negative_prompt_embeds_mask=mask)
    engine = trainer(config, "awm", guidance_gradient=gradient)
    metrics = engine.update_policy(batches_of([replace(part, prompts=table)], ADVANTAGES[1:]))

    data, module = noised(part, ADVANTAGES[1], levels_of(part, engine._forward_config)), plain_module(config)
    conditional = predicted(module, data)
    unconditional = predicted(module, replace(data, table=without, rows=torch.zeros_like(data.rows)))
    unconditional = unconditional.detach() if gradient == "conditional" else unconditional
    v = unconditional + 2 * (conditional - unconditional)
    v = v * conditional.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True)
    plain_loss(engine.actor_config, v, {"old": v.detach(), "ema": v.detach()}, data).backward()
    norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@full_and_lora
def test_compared_velocities_are_of_the_weights_before_the_first_step(
    tiny_model: Path, samples: list[FinishedLatents], kind: str
) -> None:
    """The first of an iteration's steps finds ratio 1 exactly, and the second does not."""
    engine = trainer(model_config(tiny_model, **KINDS[kind]), "awm", use_kl_loss=False, kl_loss_coef=0.0)
    first = engine.update_policy(batches_of(samples[:1], ADVANTAGES[:1]))
    assert first["ratio_deviation/max"] == 0.0
    assert first["ema_distance"] == 0.0
    second = engine.update_policy(batches_of(samples[:1], ADVANTAGES[:1]) * 2)
    assert second["ratio_deviation/max"] > 1e-4
    assert second["ema_distance"] > 0


@full_and_lora
def test_the_reference_is_the_start_and_the_policy_begins_there(
    tiny_model: Path, samples: list[FinishedLatents], kind: str
) -> None:
    """Adapters off, or a frozen copy: both are exactly the policy before the first step."""
    config = model_config(tiny_model, **KINDS[kind])
    engine = trainer(config, "dpo")
    assert (engine.reference is None) == (kind == "lora")
    first = engine.update_policy(batches_of(samples))
    assert first["rewards/chosen"] != 0.0  # of the second step: the weights have moved
    once = trainer(config, "dpo").update_policy(batches_of(samples[:1], ADVANTAGES[:1]))
    assert once["rewards/chosen"] == once["rewards/rejected"] == 0.0
    nft = trainer(config, "diffusion_nft")
    metrics = nft.update_policy(batches_of(samples[:1], ADVANTAGES[:1]))
    assert metrics["kl_loss"] == metrics["old_deviation"] == 0.0
    metrics = nft.update_policy(batches_of(samples[:1], ADVANTAGES[:1]))
    assert metrics["kl_loss"] > 0
    assert metrics["old_deviation"] > 0


@every_loss
def test_an_iteration_without_a_pair_or_a_reward_moves_nothing(
    tiny_model: Path, samples: list[FinishedLatents], loss: str
) -> None:
    engine = trainer(model_config(tiny_model), loss)
    start = engine.gather_weights()
    nothing = torch.full((6,), NAN) if loss != "dpo" else torch.tensor([0.5, 0.5, NAN, NAN, 0.1, NAN])
    metrics = engine.update_policy(batches_of(samples[:1], [nothing]))
    assert metrics["optimizer_steps"] == 0
    assert "grad_norm" not in metrics
    assert largest_difference(engine.gather_weights(), start) == 0.0


def test_the_first_step_is_the_first_that_is_made(tiny_model: Path, samples: list[FinishedLatents]) -> None:
    """A mini-batch before it in which no group has a pair is in no metric, as if it had not been given."""
    single = torch.tensor([0.5, 0.5, NAN, NAN, 0.1, NAN])
    without, paired = batches_of(samples, [single, ADVANTAGES[1]])
    found, plain = (
        trainer(model_config(tiny_model), "dpo").update_policy(given) for given in ([without, paired], [paired])
    )
    assert found["first_sample_steps"] > 0
    assert found == plain


@pytest.mark.parametrize("loss", ["diffusion_nft", "awm"])
def test_unsharded_weights_are_never_stale(tiny_model: Path, samples: list[FinishedLatents], loss: str) -> None:
    """With reshard_after_forward off, a forward leaves gathered weights behind; swapped ones must be gathered again."""
    config = model_config(tiny_model)
    kept, freed = trainer(config, loss, reshard_after_forward=False), trainer(config, loss)
    for _ in range(2):
        for engine in (kept, freed):
            engine.update_policy(batches_of(samples))
    assert largest_difference(kept.gather_weights(), freed.gather_weights()) < 1e-6
    assert largest_difference(old_weights(kept), old_weights(freed)) < 1e-6
    for engine, sharded in ((kept, False), (freed, True)):
        engine.warm_up(Canary(samples[0].prompts))
        held = trainable(engine.module).values()
        assert {isinstance(weight, DTensor) for weight in held} == {sharded}, "between the passes of a step"


# ---- the old policy


@full_and_lora
def test_the_old_policy_moves_by_its_schedule_and_interval(
    tiny_model: Path, samples: list[FinishedLatents], kind: str
) -> None:
    config = model_config(tiny_model, **KINDS[kind])
    engine = trainer(
        config,
        "diffusion_nft",
        old_policy_decay=None,
        old_policy_decay_schedule="linear_to_0_5",
        old_policy_update_interval=2,
    )
    start = engine.gather_weights()
    engine.update_policy(batches_of(samples))
    assert largest_difference(old_weights(engine), start) == 0.0
    engine.update_policy(batches_of(samples))  # after four optimiser steps d is .004
    ahead = engine.gather_weights()
    expected = {name: 0.004 * start[name] + 0.996 * ahead[name] for name in ahead}
    assert largest_difference(old_weights(engine), expected) < 1e-6
    assert largest_difference(old_weights(engine), ahead) > 1e-5
    assert largest_difference(engine.gather_weights(), ahead) == 0.0


def test_copy_is_on_policy(tiny_model: Path, samples: list[FinishedLatents], monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is put in the weights' place for the old policy's velocities; an old policy that lags is."""
    swaps: list[WeightCopy] = []
    applied = WeightCopy.applied

    def noted(copy: WeightCopy) -> Any:
        swaps.append(copy)
        return applied(copy)

    monkeypatch.setattr(WeightCopy, "applied", noted)
    engine = trainer(model_config(tiny_model), "diffusion_nft", old_policy_decay=None)
    first, second = [engine.update_policy(batches_of(samples)) for _ in range(2)]
    assert swaps == []
    assert first["old_deviation"] > 0  # of the second step
    assert second["old_deviation"] > 0
    assert largest_difference(old_weights(engine), engine.gather_weights()) == 0.0
    lags = trainer(model_config(tiny_model), "diffusion_nft", old_policy_decay=0.5)
    swaps.clear()  # `old_weights` made one
    lags.update_policy(batches_of(samples))
    assert {id(copy) for copy in swaps} == {id(lags.old_policy)}


def test_a_batch_that_does_not_stay_on_the_device_trains_alike(
    tiny_model: Path, samples: list[FinishedLatents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one rank asks no other how many samples it has: on a GPU it would wait for the answer."""
    monkeypatch.setattr(forward_batches.dist, "all_reduce", pytest.fail)
    weights = []
    for largest in (forward_batches.KEPT_ON_DEVICE, 0):
        monkeypatch.setattr(forward_batches, "KEPT_ON_DEVICE", largest)
        engine = trainer(model_config(tiny_model), "awm", old_policy_decay=None)
        engine.update_policy(batches_of(samples))
        weights.append(engine.gather_weights())
    assert largest_difference(*weights) == 0.0


def test_who_keeps_no_old_policy_says_so(tiny_model: Path) -> None:
    engine = trainer(model_config(tiny_model), "dpo")
    with pytest.raises(ValueError, match="keeps no old weights"):
        engine.holding("old")


@loss_and_kind
def test_a_resumed_engine_goes_on_bit_for_bit(
    tiny_model: Path, samples: list[FinishedLatents], tmp_path: Path, kind: str, loss: str
) -> None:
    config = model_config(tiny_model, **KINDS[kind])
    settings = {"old_policy_update_interval": 2} if loss == "awm" else {}
    undisturbed, resumed = trainer(config, loss, **settings), trainer(config, loss, **settings)
    undisturbed.update_policy(batches_of(samples))
    undisturbed.save_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    metrics = [engine.update_policy(batches_of(samples)) for engine in (undisturbed, resumed)]
    assert metrics[0] == metrics[1]
    assert largest_difference(undisturbed.gather_weights(), resumed.gather_weights()) == 0.0
    if loss != "dpo":
        assert largest_difference(old_weights(undisturbed), old_weights(resumed)) == 0.0
        assert largest_difference(old_weights(resumed), resumed.gather_weights()) > 1e-4


# ---- teachers


@pytest.fixture(scope="module", params=["full", "lora"])
def teacher(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """(folder of an export, its transformer as diffusers itself loads it)."""
    config = model_config(tiny_model, **KINDS[request.param])
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: p.detach() + 0.05 * torch.randn(p.shape, generator=generator)
        for name, p in trainable(plain_module(config)).items()
    }
    folder = tmp_path_factory.mktemp("teacher") / "exported"
    export_weights(QwenImage, config, weights, folder)
    if request.param == "full":
        return folder, QwenImagePipeline.from_pretrained(folder).transformer
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    pipeline.load_lora_weights(folder)
    return folder, pipeline.transformer


@pytest.mark.parametrize("student", [{}, {"lora_rank": 2, "lora_alpha": 2}], ids=["full", "rank_2"])
def test_distilling_velocities_equals_the_plain_trainers(
    tiny_model: Path, samples: list[FinishedLatents], teacher: tuple[Path, nn.Module], student: dict[str, Any]
) -> None:
    """The student may train other weights than the teacher did, or another rank."""
    folder, module = teacher
    config = model_config(tiny_model, **student)
    engine = trainer(config, "distill_fm_mse", teacher_path=str(folder), num_train_timesteps=2)
    start = engine.gather_weights()
    data = plain_data(engine, samples)
    plain = plain_iterations(config, engine.actor_config, [data, data], [None, None], teacher=module)
    metrics = [engine.update_policy(batches_of(samples)) for _ in range(2)]
    assert [m["grad_norm"] for m in metrics] == pytest.approx(plain.norms, rel=1e-3)
    assert largest_difference(engine.gather_weights(), plain.weights[1]) < 3e-6
    assert largest_difference(engine.gather_weights(), start) > 1e-3


def test_distilling_steps_equals_the_plain_trainers(tiny_model: Path, teacher: tuple[Path, nn.Module]) -> None:
    """The divergence of the steps that the student sampled, to the teacher's."""
    folder, module = teacher
    config = model_config(tiny_model, lora_rank=2, lora_alpha=2)
    _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3)))
    assert paths is not None
    engine = trainer(config, "distill_kl", teacher_path=str(folder))
    advantages = torch.tensor([1.0, 0.0, NAN, -1.0])
    metrics = engine.update_policy([ActorBatch([(paths, advantages)], 3)])
    own, kept = plain_module(config), paths.rows(torch.tensor([0, 1, 3]))
    steps = [(plain_replay(own, config, kept, n), plain_replay(module, config, kept, n)) for n in range(3)]
    loss = sum(plain_kl(mine, theirs) for mine, theirs in steps) / 3
    gradients = torch.autograd.grad(loss, list(trainable(own).values()), allow_unused=True)
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    assert metrics["pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
