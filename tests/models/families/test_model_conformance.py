# SPDX-License-Identifier: Apache-2.0
"""Every model family, with its own diffusers pipeline as the oracle: sampling, replay, gradients, export, errors."""

import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from models.config.actor import ForwardProcessConfig
from models.families.base import OPTIONAL_PIPELINE_FIELDS, DiffusionModelConfig
from models.families.latents import to_uint8
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.sampling import sample
from models.samples.trajectories import LATENTS, PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import INITIAL_NOISE, draw
from models.training.checkpoint import EngineCheckpoint
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.canary import Canary, check_canary, relative_difference
from models.weights.trainable import export_weights, kept_in_fp32, make_trainable, trainable
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.prompts import Prompt
from tests.support.cases import crossed
from tests.support.helpers import PROMPTS, actor_config, model_config, noise_keys
from tests.support.tiny_models import FAMILIES, NEGATIVE, Family

every_family = pytest.mark.parametrize("name", FAMILIES)
# What is the engine's more than an adapter's is quick for the three that differ most: one stream of tokens or two, full
# weights of which some stay in fp32, pictures and videos. That sampling and replay are right is quick for all of them.
LIKE_OTHERS = ("flux", "flux_2_klein", "z_image")
every_engine = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in FAMILIES]
)
with_and_without_guidance = pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
LORA = {"lora_rank": 4, "lora_alpha": 8}
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, 0.9])


class Checkpoint:
    """A family's tiny checkpoint with one scheduler config, its diffusers pipeline, and its settings."""

    def __init__(self, family: Family, folder: Path, scheduler: dict[str, Any]):
        self.family, self.folder, self.adapter = family, folder, family.adapter
        self.sampled: dict[str, Trajectories] = {}
        family.save(folder)
        path = folder / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | scheduler))

    @cached_property
    def pipeline(self) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        self.family.prepare(pipeline)
        return pipeline

    def config(self, guided: bool = False, size: tuple[int, int] | None = None, **overrides: Any):
        height, width = size or self.family.sizes[0]
        settings = {"height": height, "width": width, "num_inference_steps": 4}
        settings |= self.family.guided if guided else self.family.plain
        return model_config(self.folder, **(settings | overrides))

    def prompts(self, texts: list[str], guided: bool) -> PromptTable:
        """Encoded as the data stage does it."""

        def encode(some: list[str]) -> dict[str, Tensor]:
            with torch.no_grad():
                return self.adapter.encode_prompts(self.pipeline, some, self.family.call["max_sequence_length"])

        # As many as prompts, as the pipeline encodes it: matrices of another size round differently.
        negative = encode([NEGATIVE] * len(texts)) if guided else {}
        return PromptTable.of(encode(texts) | {f"negative_{key}": tensor[:1] for key, tensor in negative.items()})

    def request(self, guided: bool = False, samples: int = 2, window: tuple[int, ...] = (0, 1, 2), texts=PROMPTS):
        index = torch.arange(len(texts)).repeat_interleave(samples)
        return RolloutRequest(noise_keys(len(texts), samples), self.prompts(texts, guided), index, window)

    def rolled_out(self, config: DiffusionModelConfig, guided: bool) -> Trajectories:
        """What the config samples: once, and a copy for each test."""
        if repr(config) not in self.sampled:
            self.sampled[repr(config)] = self.newly_rolled_out(config, guided)
        return deepcopy(self.sampled[repr(config)])

    def newly_rolled_out(self, config: DiffusionModelConfig, guided: bool) -> Trajectories:
        _, trajectories = DiffusersRolloutEngine(config).generate(self.request(guided))
        assert trajectories is not None
        return trajectories

    def oracle(self, config: DiffusionModelConfig, latents: Tensor, output_type: str, **text: Any) -> Any:
        """What diffusers' own pipeline makes of the same start."""
        fields = {name: getattr(config.pipeline, name) for name in self.adapter.pipeline_fields}
        settings = {name: value for name, value in fields.items() if value is not None}
        if not self.adapter.is_guided(config.pipeline):
            settings |= self.family.unguided_call
        result = self.pipeline(
            height=config.pipeline.height,
            width=config.pipeline.width,
            num_inference_steps=config.pipeline.num_inference_steps,
            latents=self.family.start(config, latents.clone()),
            output_type=output_type,
            **settings,
            **self.family.call,
            # A copy: some pipelines write over it.
            **{name: list(given) if isinstance(given, list) else given for name, given in text.items()},
        )
        return result.frames if self.adapter.samples_video else result.images


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """(family, scheduler) -> its checkpoint, made once."""
    made: dict[tuple[str, str], Checkpoint] = {}

    def checkpoint(name: str, scheduler: str = "own") -> Checkpoint:
        if (name, scheduler) not in made:
            folder = tmp_path_factory.mktemp(f"{name}_{scheduler}") / "model"
            made[name, scheduler] = Checkpoint(FAMILIES[name], folder, FAMILIES[name].schedulers[scheduler])
        return made[name, scheduler]

    return checkpoint


# ---- sampling


def sampling_cases() -> Iterator[Any]:
    """(family, scheduler, texts, size, guided): every pair of values of any two of them, and of each family both kinds
    of texts with and without guidance. The whole product, 80 cases, finds no more mutations of the adapters."""
    for number, (name, family) in enumerate(FAMILIES.items()):
        for other, scheduler in enumerate(family.schedulers):
            for single in (False, True):
                guided = single == bool(other)  # padded prompts with the family's own schedule, single with the other
                size = (number + guided) % 2
                kinds = ("single" if single else "padded", ("wide", "tall")[size], "guided" if guided else "plain")
                texts = PROMPTS[:1] if single else PROMPTS
                yield pytest.param(name, scheduler, texts, size, guided, id="-".join((name, scheduler, *kinds)))


@pytest.mark.parametrize(("name", "scheduler", "texts", "size", "guided"), sampling_cases())
def test_sampling_is_the_pipelines_own(
    checkpoint_of: Any, name: str, scheduler: str, texts: list[str], size: int, guided: bool
) -> None:
    """Bit for bit: text, schedule, latents and pictures, with prompts of different lengths in one batch."""
    model = checkpoint_of(name, scheduler)
    adapter, config = model.adapter, model.config(guided, model.family.sizes[size], num_inference_steps=3)
    request = model.request(guided, samples=1, window=(), texts=texts)
    start = draw(request.keys, INITIAL_NOISE, adapter.latent_shape(config), "cpu")
    transformer = adapter.load_transformer(config, torch.float32).eval()
    denoised = sample(
        adapter, transformer, adapter.build_scheduler(config), config, request, "cpu", initial_latents=start.clone()
    )
    latents = denoised.latents
    assert denoised.recorded() is None
    text = {"prompt": list(texts)}
    text |= model.family.contrasts(model.pipeline, [NEGATIVE] * len(texts)) if guided else {}
    shown = model.family.finish(model.pipeline, config, latents)
    assert torch.equal(shown, model.oracle(config, start, "latent", **text))
    pictures = to_uint8(adapter.decode(adapter.load_vae(config), config, latents))
    expected = (np.asarray(model.oracle(config, start, "np", **text)) * 255).round().astype("uint8")
    assert expected.shape[-3:] == (config.pipeline.height, config.pipeline.width, 3)
    assert expected.std() > 3  # a grey picture would prove nothing
    assert np.array_equal(pictures.numpy(), expected)


@every_family
def test_prompt_guidance_and_schedule_change_the_picture(checkpoint_of: Any, name: str) -> None:
    """Otherwise the comparison above would compare the same thing many times."""
    model = checkpoint_of(name)
    plain = DiffusersRolloutEngine(model.config()).generate(model.request(window=()))[0].float()
    guided = DiffusersRolloutEngine(model.config(True)).generate(model.request(True, window=()))[0].float()
    request = model.request(window=())
    moved = RolloutRequest(request.keys, request.prompts, request.prompt_index.roll(2), ())
    other = DiffusersRolloutEngine(model.config()).generate(moved)[0].float()
    assert (plain - guided).abs().max() > 3
    assert (plain - other).abs().max() > 3
    for scheduler in set(model.family.schedulers) - {"own"}:
        shifted = checkpoint_of(name, scheduler)
        pictures = DiffusersRolloutEngine(shifted.config()).generate(request)[0].float()
        assert (plain - pictures).abs().max() > 3


@with_and_without_guidance
@every_family
def test_a_batch_samples_what_single_prompts_do(checkpoint_of: Any, name: str, guided: bool) -> None:
    """Neither padding nor neighbours change a sample, but for the order of sums."""
    model = checkpoint_of(name)
    engine = DiffusersRolloutEngine(model.config(guided))
    together = model.request(guided, samples=1)
    _, whole = engine.generate(together)
    for row, text in enumerate(PROMPTS):
        own = RolloutRequest(together.keys[row : row + 1], model.prompts([text], guided), torch.tensor([0]), (0, 1, 2))
        _, alone = engine.generate(own)
        assert torch.allclose(alone.latents[0], whole.latents[row], rtol=0, atol=1e-5)
        assert torch.allclose(alone.log_probs[0], whole.log_probs[row], rtol=0, atol=1e-5)


@every_family
def test_a_sample_that_is_not_finite_is_told_and_changes_no_other(checkpoint_of: Any, name: str) -> None:
    """Its text, the denoiser's or the decoder's weights, or the decoder's overflow: a picture says nothing of them."""
    model = checkpoint_of(name)
    config = model.config()
    engine, request = DiffusersRolloutEngine(config), model.request(samples=1)
    sound = engine.produce(request)
    assert sound.finite.tolist() == [True] * len(PROMPTS)
    spoilt = replace(request.prompts, prompt_embeds=request.prompts.prompt_embeds.clone())
    spoilt.prompt_embeds[1] = torch.nan
    made, others = engine.produce(replace(request, prompts=spoilt)), torch.tensor([0, *range(2, len(PROMPTS))])
    assert made.finite.tolist() == [number != 1 for number in range(len(PROMPTS))]
    assert torch.equal(made.pictures[others], sound.pictures[others])
    assert torch.equal(made.recorded.rows(others).latents, sound.recorded.rows(others).latents)
    assert torch.equal(made.recorded.log_probs[others], sound.recorded.log_probs[others])
    told_by_latents = engine.produce(replace(request, prompts=spoilt, window=(), outputs=frozenset({LATENTS})))
    assert told_by_latents.finite.equal(made.finite)
    for module in (engine.vae.decoder, engine.transformer):
        weight = next(module.parameters())
        for number in (torch.inf, torch.nan):
            kept = weight.detach().clone()
            weight.data.view(-1)[0] = number
            assert not engine.produce(request).finite.any()
            weight.data.copy_(kept)
    assert engine.produce(request).finite.all()


@every_family
def test_encode_is_the_inverse_of_decode(checkpoint_of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encoder gave, normalised and packed, reaches the decoder as it was."""
    model = checkpoint_of(name)
    config = model.config()
    adapter, vae = model.adapter, model.adapter.load_vae(config)
    pictures, _ = DiffusersRolloutEngine(config).generate(model.request(window=()))
    latents = adapter.encode(vae, config, pictures)
    assert latents.shape[1:] == adapter.latent_shape(config)
    decode, reached = vae.decode, []
    monkeypatch.setattr(vae, "decode", lambda latent, **options: reached.append(latent) or decode(latent, **options))
    adapter.decode(vae, config, latents)
    pixels = pictures.float().movedim(-1, 1) / 127.5 - 1
    if reached[0].ndim > pixels.ndim:
        pixels = pixels.unsqueeze(2)
    assert torch.allclose(reached[0], vae.encode(pixels).latent_dist.mode(), rtol=0, atol=1e-5)
    assert latents.std() > 0.1


@every_family
def test_embeddings_of_the_data_stage_are_the_pipelines_own(checkpoint_of: Any, name: str, tmp_path: Path) -> None:
    """What is stored, read and padded again is what the text encoders gave."""
    model = checkpoint_of(name)
    limit = model.family.call["max_sequence_length"]
    text_side = model.adapter.load_text_pipeline(model.folder)
    prompts = [Prompt(f"uid{i}", text, None, {}, "p") for i, text in enumerate(PROMPTS)]
    write_embeddings(
        prompts,
        torch.no_grad()(lambda texts: model.adapter.encode_prompts(text_side, texts, limit)),
        tmp_path / "embeddings",
        shard_size=2,
        batch_size=1,
        negative_prompt=NEGATIVE,
        max_sequence_length=limit,
        model=name,
        model_digest="",
    )
    stored = PromptEmbeddings.open(tmp_path / "embeddings")
    assert stored.extras == tuple(sorted(model.adapter.prompt_extras))
    table = PromptTable.of(
        stored.get([prompt.uid for prompt in prompts])
        | {f"negative_{key}": tensor for key, tensor in stored.negative().items()}
    )
    expected = model.prompts(PROMPTS, guided=True)
    index = torch.arange(len(PROMPTS))
    got, wanted = table.expand(index), expected.expand(index)
    assert got.keys() == wanted.keys()
    for key in wanted:
        assert torch.allclose(got[key].float(), wanted[key].float(), rtol=0, atol=1e-5), key


@every_family
def test_prompt_lengths_are_those_that_the_encoder_keeps(checkpoint_of: Any, name: str) -> None:
    """With one token less something is lost: the last row, or where all are padded the prompt's last word; with one
    more a chat has padding behind its end."""
    model = checkpoint_of(name)
    texts = ["the number 472", "the number hello"]
    length, other = model.adapter.prompt_lengths(model.pipeline, texts)

    def encoded(text: str, limit: int) -> Tensor:
        return model.adapter.encode_prompts(model.pipeline, [text], limit)["prompt_embeds"][
            :, slice(*model.family.text_rows)
        ]

    if encoded(texts[0], length + 1).shape[1] == length:
        assert encoded(texts[0], length - 1).shape[1] == length - 1
    elif name == "flux_2_klein":
        tokenizer, limits = model.pipeline.tokenizer, (length, length + 1)
        own, found = tokenizer.pad_token, []
        for padding in (tokenizer.convert_ids_to_tokens(5), own):
            tokenizer.pad_token = padding
            found.append([encoded(texts[0], limit) for limit in limits])
        assert [torch.equal(*pair) for pair in zip(*found, strict=True)] == [True, False]
    else:
        assert length == other
        assert not torch.equal(encoded(texts[0], length), encoded(texts[1], length))
        assert torch.equal(encoded(texts[0], length - 1), encoded(texts[1], length - 1))


# ---- replay and training


def replay_cases() -> Iterator[Any]:
    """(family, kernel, guided): every family with every kernel, half of them guided: of each family and kernel some."""
    for number, name in enumerate(FAMILIES):
        for other, sde_type in enumerate(("sde", "dance_sde", "cps")):
            guided = (number + other) % 2 == 0
            yield pytest.param(name, sde_type, guided, id=f"{name}-{sde_type}-{'guided' if guided else 'plain'}")


def update_cases() -> Iterator[Any]:
    """(family, weights, guided): of every family both weights and both guidances; the other pairs are slow."""
    for number, name in enumerate(FAMILIES):
        for kind, weights in (("full", {}), ("lora", LORA)):
            for guided in (False, True):
                marks = [pytest.mark.slow] if (number + (kind == "lora") + guided) % 2 else []
                label = f"{name}-{kind}-{'guided' if guided else 'plain'}"
                yield pytest.param(name, weights, guided, id=label, marks=marks)


@pytest.mark.parametrize(("name", "sde_type", "guided"), replay_cases())
@pytest.mark.usefixtures("one_rank")
def test_replayed_log_probs_are_the_rollouts_own(checkpoint_of: Any, name: str, sde_type: str, guided: bool) -> None:
    """Bit for bit where the micro-batch is the rollout's batch."""
    model = checkpoint_of(name)
    config = model.config(guided, sde_type=sde_type, **LORA)
    trajectories = model.rolled_out(config, guided)
    replayed = trainer(config).rescored(trajectories).log_probs
    assert torch.equal(replayed, trajectories.log_probs)
    assert trajectories.log_probs.std() > 1e-4


@pytest.mark.parametrize(("name", "weights"), crossed(FAMILIES, {"full": {}, "lora": LORA}, LIKE_OTHERS))
@pytest.mark.usefixtures("one_rank")
def test_replay_in_bfloat16(checkpoint_of: Any, name: str, weights: dict[str, int]) -> None:
    """Guided, so that both halves are there. The sharded engine casts nothing that the rollout does not: timesteps and
    rotary angles keep their format, buffers have the rollout's, and what diffusers keeps in fp32 stays so: rollout,
    policy and reference are one."""
    model = checkpoint_of(name)
    config = model.config(True, dtype="bfloat16", **weights)
    trajectories = model.rolled_out(config, True)
    engine = trainer(config, use_kl_loss=True, kl_loss_coef=0.1)
    assert torch.equal(engine.rescored(trajectories).log_probs, trajectories.log_probs)
    # Six rows at three timesteps: what two rows of one timestep give, but for the rounding of another batch.
    prompts, rollout = model.prompts(PROMPTS[:2], True), DiffusersRolloutEngine(config)
    canary = Canary(prompts, rows=6, timesteps=3)
    own, alone = (rollout.canary_velocity(Canary(prompts, rows=rows, timesteps=3)) for rows in (6, 2))
    assert check_canary(engine.canary_velocity(canary), own, version=0, tolerance=0.0) == 0.0
    assert relative_difference(alone, own) < 0.03
    first = engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 6)])
    assert first["logprob_abs_diff/max"] == first["kl_loss"] == 0.0
    # Log-probs of drawn samples depend on the noise and its deviation alone: the paths tell the formats apart.
    in_fp32 = model.rolled_out(model.config(True, **weights), True)
    assert (in_fp32.latents - trajectories.latents).abs().max() > 1e-4


@every_engine
@pytest.mark.usefixtures("one_rank")
def test_full_weights_in_bfloat16_are_exported_as_they_are_sampled_with(
    checkpoint_of: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two updates: every parameter and buffer of the rollout is, in value and format, what diffusers loads. The
    optimiser chooses as it does on CUDA: one call for all weights, where nothing forbids it."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    model = checkpoint_of(name)
    config = model.config(dtype="bfloat16")
    trajectories, rollout = model.rolled_out(config, False), DiffusersRolloutEngine(config)
    engine = trainer(config, clip_grad=0.1)
    start = engine.gather_weights()
    norms = [engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 6)])["grad_norm"] for _ in range(2)]
    weights = engine.gather_weights()
    assert min(norms) > 0
    moved = {key for key, tensor in weights.items() if not torch.equal(tensor, start[key])}
    kept = kept_in_fp32(rollout.transformer)
    assert bool(kept) == (name == "wan")
    assert kept <= moved
    assert {key for key, p in trainable(rollout.transformer).items() if p.dtype == torch.float32} == kept
    rollout.load_weights(weights)
    canary = Canary(model.prompts(PROMPTS[:2], False))
    assert check_canary(engine.canary_velocity(canary), rollout.canary_velocity(canary), 2, tolerance=0.0) == 0.0
    export_weights(model.adapter, config, weights, tmp_path / "exported")
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16).transformer
    for ours, theirs in (
        (rollout.transformer.named_parameters(), loaded.named_parameters()),
        (rollout.transformer.named_buffers(), loaded.named_buffers()),
    ):
        for (key, own), (same, other) in zip(ours, theirs, strict=True):
            assert (key, own.dtype) == (same, other.dtype)
            assert torch.equal(own, other), key


@pytest.mark.parametrize(("name", "weights", "guided"), update_cases())
@pytest.mark.usefixtures("one_rank")
def test_one_update_moves_the_trained_weights_and_nothing_else(
    checkpoint_of: Any, name: str, weights: dict[str, int], guided: bool
) -> None:
    """The first ratio is exactly one, two updates change the policy, and the rollout's copy follows it."""
    model = checkpoint_of(name)
    config = model.config(guided, **weights)
    trajectories = model.rolled_out(config, guided)
    engine, rollout = trainer(config, weight_decay=0.0), DiffusersRolloutEngine(config)
    before = {key: parameter.detach().clone() for key, parameter in engine.module.named_parameters()}
    batch = ActorBatch([(trajectories, ADVANTAGES)], 6)
    first = engine.update_policy([batch])
    assert first["ratio_deviation/max"] == 0.0
    assert first["ppo_kl"] == 0.0
    assert first["pg_loss"] == pytest.approx(-ADVANTAGES.mean().item(), abs=1e-6)
    assert first["grad_norm"] > 0
    assert engine.update_policy([batch])["ratio_deviation/max"] > 0  # LoRA's A moves only after B has left zero
    moved = {key for key, p in engine.module.named_parameters() if not torch.equal(p.detach(), before[key])}
    assert moved == set(trainable(engine.module)) - model.family.unreached(trainable(engine.module))
    canary = Canary(model.prompts(PROMPTS[:2], guided))
    stale = rollout.canary_velocity(canary)
    rollout.load_weights(engine.gather_weights())
    assert check_canary(engine.canary_velocity(canary), rollout.canary_velocity(canary), 1, tolerance=0.0) == 0
    assert not torch.equal(stale, rollout.canary_velocity(canary))


@every_engine
@pytest.mark.parametrize("reshards", [True, False], ids=["by_block", "in_one_group"])
@pytest.mark.parametrize("kind", [LORA, {}], ids=["lora", "full"])
@pytest.mark.usefixtures("one_rank")
def test_gradient_checkpointing_changes_nothing(
    checkpoint_of: Any, name: str, kind: dict[str, Any], reshards: bool
) -> None:
    """To the bit, by torch's own and by `recomputed`."""
    model = checkpoint_of(name)
    config = model.config(**kind)
    trajectories = model.rolled_out(config, False)
    engines = [trainer(config, gradient_checkpointing=on, reshard_after_forward=reshards) for on in (True, False)]
    for engine in engines:
        engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 6)])
    recomputed, kept = (engine.gather_weights() for engine in engines)
    assert all(torch.equal(recomputed[key], kept[key]) for key in kept)


@every_engine
@pytest.mark.usefixtures("one_rank")
def test_a_loss_of_the_forward_process_trains_it(checkpoint_of: Any, name: str) -> None:
    """Such a loss asks for velocities alone, at noise levels that are on no schedule."""
    model = checkpoint_of(name)
    config = model.config(**LORA)
    _, finished = DiffusersRolloutEngine(config).generate(replace(model.request(window=()), record_finished=True))
    actor = actor_config(loss_mode="awm", ppo_micro_batch_size_per_gpu=6, weight_decay=0.0)
    engine = DiffusersFSDPEngine(config, actor, forward_config=ForwardProcessConfig(timestep_sampling="logit_normal"))
    engine.initialize()
    before = {key: parameter.detach().clone() for key, parameter in engine.module.named_parameters()}
    for _ in range(2):
        assert engine.update_policy([ActorBatch([(finished, ADVANTAGES)], 6)])["grad_norm"] > 0
    moved = {key for key, p in engine.module.named_parameters() if not torch.equal(p.detach(), before[key])}
    assert moved == set(trainable(engine.module)) - model.family.unreached(trainable(engine.module))


@pytest.mark.parametrize("weights", [{}, LORA], ids=["full", "lora"])
@every_family
def test_gradients_reach_exactly_the_trained_weights(checkpoint_of: Any, name: str, weights: dict[str, int]) -> None:
    """All of them, but for those whose output leads nowhere; and through guidance too."""
    model = checkpoint_of(name)
    config = model.config(True, **weights)
    module = model.adapter.load_transformer(config, torch.float32)
    make_trainable(model.adapter, module, config)
    with torch.no_grad():
        for parameter in trainable(module).values():  # LoRA's B matrices start at zero, which stops A's gradient
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    request = model.request(True, samples=1)
    index, scheduler = request.prompt_index, model.adapter.build_scheduler(config)
    latents = draw(request.keys, INITIAL_NOISE, model.adapter.latent_shape(config), "cpu")
    timesteps = scheduler.timesteps[1].expand(len(latents))
    inputs = model.adapter.model_inputs(module, config, latents, timesteps, request.prompts.expand(index))
    velocity = model.adapter.predict_velocity(module, config, *inputs)
    assert velocity.dtype == torch.float32
    assert velocity.shape == latents.shape
    velocity.square().mean().backward()
    reached = {key for key, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == set(trainable(module)) - model.family.unreached(trainable(module))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_rank")
def test_compiled_blocks_sample_and_learn_as_eager_ones(
    checkpoint_of: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding; with LoRA inside the blocks and FSDP around them. The family that compiles fastest.

    Without inductor's code, which takes most of the time, the same blocks become graphs that compute as eager ones.
    """
    if backend != "inductor":
        compiler = torch.compile

        def by_backend(function: Any, *, options: dict[str, Any], **settings: Any) -> Any:
            return compiler(function, backend=backend, **settings)

        monkeypatch.setattr(torch, "compile", by_backend)
    counters.clear()
    model = checkpoint_of("wan")
    eager = model.config(True, **LORA)
    compiled = replace(eager, model=eager.model.model_copy(update={"compile": True}))
    settings = actor_config(clip_grad=1e6, ppo_micro_batch_size_per_gpu=6)
    results = []
    for config in (eager, compiled):
        trajectories = model.newly_rolled_out(config, True)
        engine = DiffusersFSDPEngine(config, settings)
        engine.initialize()
        norm = engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 6)])["grad_norm"]
        results.append((trajectories, norm, engine.gather_weights()))
    (expected, expected_norm, expected_weights), (trajectories, norm, weights) = results
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert torch.equal(trajectories.latents, expected.latents) == (backend != "inductor")
    torch.testing.assert_close(trajectories.latents, expected.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(trajectories.log_probs, expected.log_probs, rtol=0, atol=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-3)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "weights"), crossed(FAMILIES, {"full": {}, "lora": LORA}, LIKE_OTHERS))
@pytest.mark.usefixtures("one_rank")
def test_exported_weights_load_in_diffusers(
    checkpoint_of: Any, name: str, weights: dict[str, int], tmp_path: Path
) -> None:
    """A pipeline folder, or LoRA by `load_lora_weights`, that samples what the rollout engine samples."""
    model = checkpoint_of(name)
    config = model.config(**weights)
    engine = trainer(config, lr=0.1)
    trajectories = model.rolled_out(config, False)
    for _ in range(2):
        engine.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 6)])
    folder, gathered = tmp_path / "exported", engine.gather_weights()
    export_weights(model.adapter, config, gathered, folder)
    rollout = DiffusersRolloutEngine(config)
    request = model.request(samples=1, window=())
    untrained, _ = rollout.generate(request)
    rollout.load_weights(gathered)
    ours, _ = rollout.generate(request)
    assert (ours.float() - untrained.float()).abs().max() > 3
    reloaded = DiffusersRolloutEngine(config)
    reloaded.load_exported(folder)
    assert torch.equal(reloaded.generate(request)[0], ours)

    pipeline = DiffusionPipeline.from_pretrained(model.folder if weights else folder)
    if weights:
        pipeline.load_lora_weights(folder)
    model.family.prepare(pipeline)
    other = Checkpoint.__new__(Checkpoint)
    other.__dict__ |= {"family": model.family, "adapter": model.adapter, "pipeline": pipeline}
    start = draw(request.keys, INITIAL_NOISE, model.adapter.latent_shape(config), "cpu")
    theirs = (np.asarray(other.oracle(config, start, "np", prompt=list(PROMPTS))) * 255).round()
    assert np.array_equal(theirs, ours.numpy())


@pytest.mark.parametrize("name", ["qwen_image", "stable_diffusion_3", "wan"])
@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_an_earlier_version_goes_on(
    checkpoint_of: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sharded what diffusers keeps in fp32, had fp32 buffers in a bf16 model, and counted the average's moves."""
    model = checkpoint_of(name)
    config, settings = model.config(dtype="bfloat16"), {"enable": True, "update_interval": 1, "clip_grad": 0.1}
    batch = ActorBatch([(model.rolled_out(config, False), ADVANTAGES)], 6)
    state = EngineCheckpoint._state

    def earlier_state(checkpoint: EngineCheckpoint) -> dict[str, Any]:
        found = state(checkpoint)
        del found["extra"]["nonfinite_in_a_row"]
        found["extra"]["ema_updates"] = 1
        return found

    with monkeypatch.context() as earlier:
        earlier.setattr("models.training.fsdp.kept_in_fp32", lambda module: set())
        earlier.setattr("models.training.fsdp.keep_formats", lambda module, dtype: None)
        earlier.setattr(EngineCheckpoint, "_state", earlier_state)
        saved = trainer(config, **settings)
        saved.update_policy([batch])
        saved.save_checkpoint(tmp_path / "checkpoint")
    engine = trainer(config, **settings)
    engine.load_checkpoint(tmp_path / "checkpoint")
    for which in ("average", "policy"):
        with saved.holding(which), engine.holding(which):
            expected, loaded = saved.gather_weights(), engine.gather_weights()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    moments = [
        {key: each.optimizer.state[p]["exp_avg"] for key, p in trainable(each.module).items()}
        for each in (saved, engine)
    ]
    for key, kept in moments[0].items():
        assert torch.equal(whole(moments[1][key]), whole(kept)), key
    formats = {key: buffer.dtype for key, buffer in DiffusersRolloutEngine(config).transformer.named_buffers()}
    assert {key: buffer.dtype for key, buffer in engine.module.named_buffers()} == formats
    assert engine.update_policy([batch])["optimizer_steps"] == 2


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trainer(config: DiffusionModelConfig, **settings: Any) -> DiffusersFSDPEngine:
    engine = DiffusersFSDPEngine(config, actor_config(**({"ppo_micro_batch_size_per_gpu": 6} | settings)))
    engine.initialize()
    return engine


# ---- errors


@every_family
def test_a_size_that_the_model_does_not_divide(checkpoint_of: Any, name: str) -> None:
    model = checkpoint_of(name)
    height, width = model.family.sizes[0]
    for size in ((height + 2, width), (height, width + 2)):
        config = model.config(size=size)
        message = rf"height {size[0]} and pipeline.width {size[1]} must be multiples of"
        with pytest.raises(ValueError, match=message):
            model.adapter.check_pipeline(config)


@every_family
def test_a_setting_that_the_model_does_not_read(checkpoint_of: Any, name: str) -> None:
    model = checkpoint_of(name)
    model.adapter.check_pipeline(model.config())
    model.adapter.check_pipeline(model.config(guided=True))
    given = {"true_cfg_scale": 2.0, "guidance_scale": 2.0, "num_frames": 5}
    assert given.keys() == OPTIONAL_PIPELINE_FIELDS.keys()
    for field in given.keys() - set(model.adapter.pipeline_fields):
        with pytest.raises(
            ValueError, match=rf"pipeline.{field} is .* does not read.*{model.adapter.pipeline_fields[0]}"
        ):
            model.adapter.check_pipeline(model.config(**{field: given[field]}))


@every_family
def test_guidance_without_a_negative_prompt(checkpoint_of: Any, name: str) -> None:
    model = checkpoint_of(name)
    engine = DiffusersRolloutEngine(model.config(guided=True))
    with pytest.raises(ValueError, match=rf"{model.adapter.pipeline_fields[0]} > \d needs negative_prompt_embeds"):
        engine.generate(model.request(guided=False))
