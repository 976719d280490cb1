# SPDX-License-Identifier: Apache-2.0
"""The sampling loop, its errors, and the adapter registry, with the tiny Qwen-Image; the families have a suite of their
own."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor

import models.families.base
from models.families.base import DiffusionModelBase
from models.families.latents import to_uint8
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.sampling import Denoising, Drawn, finite_rows, sample
from models.rollout.vllm_omni.registry import VllmOmniPipelineBase
from models.samples.trajectories import LATENTS, PICTURES, Generated, RolloutRequest, Trajectories
from models.schedulers.kernels import ReverseStep
from models.schedulers.noise_keys import INITIAL_NOISE, draw
from models.weights.trainable import make_trainable
from tests.support.helpers import model_config, prompt_table, rollout_request
from tests.support.patience import PATIENCE


def test_engine_draws_the_start_by_its_noise_keys(tiny_model: Path) -> None:
    config = model_config(tiny_model)
    engine, request = DiffusersRolloutEngine(config), rollout_request(window=())
    pictures, _ = engine.generate(request)
    start = draw(request.keys, INITIAL_NOISE, (24, 16), "cpu")
    scheduler = QwenImage.build_scheduler(config)
    done = sample(QwenImage, engine.transformer, scheduler, config, request, "cpu", initial_latents=start)
    assert torch.equal(pictures, engine.decode(done.latents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_both_infinities_are_not_finite_and_large_numbers_are(dtype: torch.dtype) -> None:
    values = torch.full((5, 2, 3), torch.finfo(dtype).max, dtype=dtype)
    values[1, 0, 1], values[2, 1, 2], values[3, 0, 0] = torch.nan, torch.inf, -torch.inf
    assert finite_rows(values).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("spoilt", ["latents", "pixels", None])
def test_a_sample_is_finite_if_its_latents_and_its_pixels_are(tiny_model: Path, spoilt: str | None) -> None:
    """Each by itself: a decoder may make something of latents that are not, and nothing of such that are."""
    config = model_config(tiny_model)
    engine = DiffusersRolloutEngine(config)
    denoising = engine.begin(rollout_request(), config.pipeline, config.algo)
    for _ in denoising.timesteps:
        denoising.advance(torch.zeros_like(denoising.latents), None)
    pixels = torch.zeros(4, 3, 1, 16, 24)
    if spoilt is not None:
        {"latents": denoising.latents, "pixels": pixels}[spoilt][1] = torch.inf
    engine.vae.decode = lambda latent, **_: (pixels,)  # type: ignore[assignment]
    assert engine.finish(denoising).finite.tolist() == [True, spoilt is None, True, True]


def still(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, *_: Any) -> ReverseStep:
    """A kernel without noise, whose steps have no log-density."""
    return ReverseStep(sample + (sigma_next - sigma) * velocity, torch.zeros_like(sigma))


def test_a_sample_whose_log_probs_are_not_finite_is_not(tiny_model: Path) -> None:
    """Its latents and its picture are: the update would meet the log-probs alone."""
    config = model_config(tiny_model)
    algo = config.algo.model_copy(update={"sde_type": f"{__name__}:still"})
    made = DiffusersRolloutEngine(config).produce(rollout_request(outputs=frozenset({LATENTS})), algo=algo)
    assert made.latents is not None
    assert finite_rows(made.latents).all()
    assert made.finite.tolist() == [False] * 4


def test_a_family_that_makes_pictures_itself_is_refused() -> None:
    """As of 0.1.0: as floats in [-1, 1] almost all of uint8 is white."""
    assert to_uint8(torch.tensor([-3.0, -1.0, 0.0, 1.0]).view(1, 1, 2, 2)).flatten().tolist() == [0, 0, 128, 255]
    with pytest.raises(ValueError, match=r"floats in .* and not torch\.uint8: leave to_uint8 out"):
        to_uint8(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))


def test_encoding_is_the_pipelines_packing_of_the_vaes_latents(tiny_model: Path) -> None:
    """Diffusers' own picture processor and packing, and the inverse of the decoder's normalisation."""
    config = model_config(tiny_model)
    pipeline, vae = QwenImagePipeline.from_pretrained(tiny_model), QwenImage.load_vae(config)
    pictures = torch.randint(0, 256, (2, 16, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = pipeline.image_processor.preprocess([Image.fromarray(picture.numpy()) for picture in pictures])
    with torch.no_grad():
        raw = vae.encode(pixels[:, :, None]).latent_dist.mode()
    statistics = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in statistics)
    height, width = raw.shape[-2:]
    expected = pipeline._pack_latents((raw - mean) / std, 2, raw.shape[1], height, width)
    encoded = QwenImage.encode(vae, config, pictures)
    assert encoded.shape[1:] == QwenImage.latent_shape(config)
    assert encoded.std() > 0.1
    assert torch.allclose(encoded, expected, rtol=0, atol=2e-6)
    # What the decoder is handed is the VAE's own latent again.
    unpacked = pipeline._unpack_latents(encoded, 16, 24, pipeline.vae_scale_factor)
    assert torch.allclose(unpacked * std + mean, raw, rtol=0, atol=1e-5)
    seen = []
    vae.decode = lambda latent, **_: seen.append(latent) or (torch.zeros(2, 3, 1, 16, 24),)
    QwenImage.decode(vae, config, encoded)
    assert torch.allclose(seen[0], raw, rtol=0, atol=1e-5)


def test_a_sample_does_not_depend_on_its_place_in_the_batch(tiny_model: Path) -> None:
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    request = rollout_request(samples=2, lengths=(5, 3))
    order = torch.tensor([2, 0, 3, 1])
    moved = RolloutRequest(
        tuple(request.keys[i] for i in order), request.prompts, request.prompt_index[order], request.window
    )
    _, there = engine.generate(request)
    _, here = engine.generate(moved)
    assert torch.allclose(here.latents, there.latents[order], rtol=0, atol=1e-5)


def test_samples_of_a_prompt_may_start_from_the_same_noise(tiny_model: Path) -> None:
    """They then go apart in the window, where prompts have noise of their own; the ODE's, of a validation, never do."""
    plain = DiffusersRolloutEngine(model_config(tiny_model))
    shared = DiffusersRolloutEngine(model_config(tiny_model, init_same_noise=True))
    request = rollout_request(samples=2, lengths=(5, 5), window=(0, 1))
    _, recorded = shared.generate(request)
    start = recorded.latents[:, 0]
    assert torch.equal(start[0], start[1])
    assert torch.equal(start[2], start[3])
    assert not torch.equal(start[0], start[2])
    assert len(recorded.latents[:, 1].unique(dim=0)) == 4
    assert len(plain.generate(request)[1].latents[:, 0].unique(dim=0)) == 4
    again = shared.generate(rollout_request(samples=2, lengths=(5, 5), window=(0, 1), iteration=1))[1]
    assert not torch.equal(again.latents[0, 0], start[0])
    ode = rollout_request(window=())
    assert torch.equal(shared.generate(ode)[0], plain.generate(ode)[0])


def test_only_the_window_is_stochastic_and_recorded(tiny_model: Path) -> None:
    """The recorded path starts where the plain ODE is after the steps before the window."""
    config = model_config(tiny_model, num_inference_steps=5)
    engine = DiffusersRolloutEngine(config)
    _, recorded = engine.generate(rollout_request(window=(2, 3)))
    assert recorded.latents.shape == (4, 3, 24, 16)
    assert recorded.log_probs.shape == (4, 2)
    assert torch.equal(recorded.timesteps, QwenImage.build_scheduler(config).timesteps[[2, 3]].expand(4, 2))
    _, from_start = engine.generate(rollout_request(window=(0, 1)))
    before = draw(rollout_request().keys, INITIAL_NOISE, (24, 16), "cpu")
    assert torch.equal(from_start.latents[:, 0], before)
    ode = [before]
    scheduler = QwenImage.build_scheduler(config)
    table = prompt_table((5, 3))
    text = table.expand(torch.tensor([0, 0, 1, 1]))
    for step in range(2):
        timestep = scheduler.timesteps[step]
        inputs, negative = QwenImage.prepare_model_inputs(
            engine.transformer, config, ode[-1], timestep.expand(4), **text, micro_batch=None, step=0
        )
        with torch.no_grad():
            velocity = QwenImage.predict_velocity(engine.transformer, config, inputs, negative)
        ode.append(ode[-1] + (scheduler.sigmas[step + 1] - scheduler.sigmas[step]) * velocity)
    assert torch.equal(recorded.latents[:, 0], ode[2])


def test_a_second_request_is_sampled_while_the_first_is_copied(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two threads; the samples are those of one after the other, to the bit, and leave in their order."""
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    requests = [rollout_request(iteration=number) for number in range(2)]
    alone = [engine.produce(request) for request in requests]
    sampled, left = [threading.Event() for _ in requests], []
    draw_it, copy_it = engine._draw, engine._copied

    def drawn(denoising: Denoising) -> Drawn:
        made = draw_it(denoising)
        sampled[requests.index(denoising.request)].set()
        return made

    def copied(made: Drawn) -> Generated:
        number = requests.index(made.denoising.request)
        assert sampled[1].wait(PATIENCE), "the first request's copies were waited for"
        left.append(number)
        return copy_it(made)

    monkeypatch.setattr(engine, "_draw", drawn)
    monkeypatch.setattr(engine, "_copied", copied)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(engine.produce, requests[0])
        assert sampled[0].wait(PATIENCE)
        found = [first, threads.submit(engine.produce, requests[1])]
        for one, together in zip(alone, found, strict=True):
            assert torch.equal(one.pictures, together.result().pictures)
            assert torch.equal(one.recorded.latents, together.result().recorded.latents)
            assert torch.equal(one.recorded.log_probs, together.result().recorded.log_probs)
    assert left == [0, 1]


@pytest.mark.parametrize("part", ["_draw", "_copied"])
def test_a_request_that_fails_keeps_no_other_waiting(
    part: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room")

    engine, request = DiffusersRolloutEngine(model_config(tiny_model)), rollout_request()
    with monkeypatch.context() as patch:
        patch.setattr(engine, part, fail)
        with pytest.raises(MemoryError):
            engine.produce(request)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(engine.produce, request).result(PATIENCE).pictures is not None


def test_validation_may_sample_with_other_steps(tiny_model: Path) -> None:
    """One engine, two schedules in turn: neither leaves anything behind in the other."""
    config, other = model_config(tiny_model), model_config(tiny_model, num_inference_steps=6, height=24)
    engine, request = DiffusersRolloutEngine(config), rollout_request(window=())
    first, _ = engine.generate(request)
    second, _ = engine.generate(request, other.pipeline)
    assert torch.equal(engine.generate(request)[0], first)
    assert torch.equal(second, DiffusersRolloutEngine(other).generate(request)[0])
    assert second.shape == (4, 24, 24, 3)


# ---- errors


@pytest.mark.parametrize("compiles", [True, False])
def test_a_small_batch_of_a_validation_is_filled_up_where_code_is_compiled(tiny_model: Path, compiles: bool) -> None:
    """Two of three samples, each with a prompt of its own, in whole batches of four."""
    config = model_config(tiny_model, compile=compiles)
    engine, seen = DiffusersRolloutEngine(config, batch_size=4), set()
    engine.transformer.register_forward_hook(
        lambda _, given, named, __: seen.add(len(named["hidden_states"])), with_kwargs=True
    )
    whole, pipeline = rollout_request(samples=1, lengths=(5, 3, 4), window=()), config.pipeline
    part = replace(whole, keys=whole.keys[1:], prompt_index=whole.prompt_index[1:], outputs={PICTURES, LATENTS})
    with torch.compiler.set_stance("force_eager"):
        pictures, _ = engine.generate(whole, pipeline)
        made = engine.produce(part, pipeline)
        assert seen == ({4} if compiles else {3, 2})
        engine.produce(part)  # in a training rollout the copies would be drawn every iteration
    assert torch.equal(made.pictures, pictures[1:])
    assert made.latents.shape[0] == 2
    assert 2 in seen


def test_what_a_validation_records_is_of_the_samples_that_were_asked_for(tiny_model: Path) -> None:
    config = model_config(tiny_model, compile=True)
    request = rollout_request(samples=1)
    with torch.compiler.set_stance("force_eager"):
        made = DiffusersRolloutEngine(config, batch_size=3).produce(request, config.pipeline)
        alone = DiffusersRolloutEngine(config).produce(request, config.pipeline)
    assert made.recorded.keys == request.keys
    assert torch.equal(made.recorded.log_probs, alone.recorded.log_probs)


def test_unknown_lora_targets_are_named(tiny_model: Path) -> None:
    config = model_config(tiny_model, lora_rank=2, target_modules=("to_q", "to_nowhere"))
    transformer = QwenImage.load_transformer(config, torch.float32)
    with pytest.raises(ValueError, match=r"target_modules names \['to_nowhere'\]"):
        make_trainable(QwenImage, transformer, config)


def test_folder_without_a_model_index(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model_index\.json does not exist.*diffusers format"):
        model_config(tmp_path)


def test_model_index_without_a_class(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="no _class_name"):
        model_config(tmp_path)


# ---- the registry


def test_every_step_of_the_window_has_noise_of_its_own(tiny_model: Path) -> None:
    """z = (x' - mean) / sd of a recorded step is the draw that the sample's key names for it."""
    config = model_config(tiny_model)
    request = replace(rollout_request(samples=2, window=(0, 1, 2)), record_means=True)
    _, path = DiffusersRolloutEngine(config).generate(request)
    assert isinstance(path, Trajectories)
    assert path.means is not None
    scheduler, algo = QwenImage.build_scheduler(config), config.algo
    for number, step in enumerate(request.window):
        before, after = path.step(number).latents.unbind(1)
        at = path.timesteps[:, number]
        settings = {"noise_level": algo.noise_level, "sde_type": algo.sde_type, "prev_sample": after}
        deviation = scheduler.sample_previous_step(before, torch.zeros_like(before), at, **settings)[3]
        noise = (after - path.means[:, number]) / deviation
        assert torch.allclose(noise, draw(request.keys, step, (24, 16), "cpu"), rtol=0, atol=1e-4)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for registry in (models.families.base._ADAPTERS, models.rollout.vllm_omni.registry._PIPELINES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))


def folder_of(architecture: str, folder: Path) -> Path:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": architecture}))
    return folder


@pytest.mark.usefixtures("own_registry")
def test_the_exact_pair_comes_before_the_architecture(tmp_path: Path) -> None:
    @DiffusionModelBase.register("ForTestsPipeline")
    class Every(QwenImage):
        pass

    @DiffusionModelBase.register("ForTestsPipeline", "dpo")
    class ForDpo(QwenImage):
        pass

    folder = folder_of("ForTestsPipeline", tmp_path)
    assert DiffusionModelBase.get_class(model_config(folder, algorithm="dpo")) is ForDpo
    assert DiffusionModelBase.get_class(model_config(folder, algorithm="flow_grpo")) is Every


@pytest.mark.usefixtures("own_registry")
def test_hooks_that_an_adapter_lacks_are_named(tmp_path: Path) -> None:
    """When it is asked for: an adapter has no instances, so Python would never say so."""

    class Half(DiffusionModelBase):
        latent_shape = QwenImage.latent_shape
        set_timesteps = QwenImage.set_timesteps
        prepare_model_inputs = QwenImage.prepare_model_inputs
        decode = QwenImage.decode
        encode = QwenImage.encode
        prompt_lengths = QwenImage.prompt_lengths

    DiffusionModelBase.register("ForTestsPipeline")(Half)
    with pytest.raises(ValueError, match=r"Half, the adapter of ForTestsPipeline, lacks encode_prompts, guide: write"):
        DiffusionModelBase.get_class(model_config(folder_of("ForTestsPipeline", tmp_path)))


def test_an_architecture_serves_every_algorithm(tiny_model: Path) -> None:
    for algorithm in ("flow_grpo", "diffusion_nft", "my_own"):
        assert DiffusionModelBase.get_class(model_config(tiny_model, algorithm=algorithm)) is QwenImage


@pytest.mark.usefixtures("own_registry")
def test_an_adapter_for_one_algorithm_does_not_serve_another(tmp_path: Path) -> None:
    DiffusionModelBase.register("ForTestsPipeline", "dpo")(QwenImage)
    with pytest.raises(ValueError, match=r"'ForTestsPipeline' \(algorithm 'awm'\)"):
        DiffusionModelBase.get_class(model_config(folder_of("ForTestsPipeline", tmp_path), algorithm="awm"))


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    config = model_config(folder_of("NoSuchPipeline", tmp_path))
    with pytest.raises(ValueError, match=r"'NoSuchPipeline'.*known architectures: .*QwenImagePipeline"):
        DiffusionModelBase.get_class(config)


@pytest.mark.usefixtures("own_registry")
def test_a_taken_key_is_not_overwritten() -> None:
    class Other(QwenImage):
        pass

    with pytest.raises(ValueError, match=r"already registered: models\.families\.qwen_image\.QwenImage"):
        DiffusionModelBase.register("QwenImagePipeline")(Other)


@pytest.mark.usefixtures("own_registry")
def test_rollout_pipelines_are_found_by_path() -> None:
    @VllmOmniPipelineBase.register("ForTestsPipeline")
    class Pipeline:
        pass

    assert VllmOmniPipelineBase.get_class("ForTestsPipeline", "flow_grpo") is Pipeline
    path = VllmOmniPipelineBase.get_pipeline_path("ForTestsPipeline", "flow_grpo")
    assert path == f"{__name__}.{Pipeline.__qualname__}"
    assert VllmOmniPipelineBase.get_pipeline_path("NoSuchPipeline", "flow_grpo") is None
