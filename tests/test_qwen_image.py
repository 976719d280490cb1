"""Qwen-Image's adapter and the sampling loop, with diffusers' own pipeline as the oracle; and the adapter registry."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from helpers import PROMPTS, model_config, noise_keys, prompt_table, rollout_request
from PIL import Image
from torch import Tensor

import models.base
from models.base import DiffusionModelBase, DiffusionModelConfig, VllmOmniPipelineBase
from models.engines.diffusers_rollout import DiffusersRolloutEngine
from models.engines.sampling import sample
from models.engines.trajectories import PromptTable, RolloutRequest
from models.engines.weights import make_trainable
from models.qwen_image import QwenImage
from models.schedulers.noise_keys import INITIAL_NOISE, draw

NEGATIVE = "blurry and low quality"
DYNAMIC_SHIFT = {  # the values of Qwen/Qwen-Image
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


@pytest.fixture(scope="module")
def shifted_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the scheduler of the real one, whose shift depends on the picture's size."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("shifted") / "model")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | DYNAMIC_SHIFT))
    return folder


def load_pipeline(folder: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def encoded(pipeline: QwenImagePipeline, prompts: list[str], guided: bool) -> PromptTable:
    """Embeddings by the pipeline's own encoder; it leaves the mask out where nothing is padded."""

    def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            embeds, mask = pipeline.encode_prompt(texts)
        return embeds, torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.bool()

    return PromptTable(*encode(prompts), *(encode([NEGATIVE]) if guided else ()))


def oracle(pipeline: QwenImagePipeline, config: DiffusionModelConfig, latents: Tensor, output_type: str, **text: Any):
    return pipeline(
        height=config.pipeline.height,
        width=config.pipeline.width,
        num_inference_steps=config.pipeline.num_inference_steps,
        true_cfg_scale=config.pipeline.true_cfg_scale,
        latents=latents,
        output_type=output_type,
        **text,
    ).images


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width"), [(16, 24), (24, 16)])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["padded", "single"])
@pytest.mark.parametrize("model", ["tiny_model", "shifted_model"])
def test_sampling_is_the_pipelines_own(
    model: str, prompts: list[str], height: int, width: int, scale: float, request: pytest.FixtureRequest
) -> None:
    """Bit for bit: latents and pictures, prompts of different lengths in one batch included."""
    folder = request.getfixturevalue(model)
    config = model_config(folder, height=height, width=width, num_inference_steps=3, true_cfg_scale=scale)
    pipeline = load_pipeline(folder)
    guided = scale > 1
    keys = noise_keys(len(prompts), 1)
    sampling = RolloutRequest(keys, encoded(pipeline, prompts, guided), torch.arange(len(prompts)), window=())
    start = draw(keys, INITIAL_NOISE, QwenImage.latent_shape(config), "cpu")
    scheduler = QwenImage.build_scheduler(config)
    transformer = QwenImage.load_transformer(config, torch.float32).eval()
    latents, trajectories = sample(
        QwenImage, transformer, scheduler, config, sampling, "cpu", initial_latents=start.clone()
    )
    assert trajectories is None
    text: dict[str, Any] = {"prompt": prompts}
    if guided:
        text["negative_prompt"] = [NEGATIVE] * len(prompts)
    assert torch.equal(latents, oracle(pipeline, config, start.clone(), "latent", **text))
    pictures = QwenImage.decode(QwenImage.load_vae(config), config, latents)
    expected = np.stack([np.asarray(image) for image in oracle(pipeline, config, start.clone(), "pil", **text)])
    assert expected.shape == (len(prompts), height, width, 3)
    assert expected.std() > 3  # a grey picture would prove nothing
    assert np.array_equal(pictures.numpy(), expected)


def test_encoding_is_the_pipelines_packing_of_the_vaes_latents(tiny_model: Path) -> None:
    """Bit for bit: diffusers' own picture processor and packing, and the inverse of the decoder's normalisation."""
    config = model_config(tiny_model)
    pipeline, vae = load_pipeline(tiny_model), QwenImage.load_vae(config)
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


def test_guidance_and_shift_change_the_picture(tiny_model: Path, shifted_model: Path) -> None:
    """Otherwise the comparison above would compare the same thing four times."""
    request = rollout_request(window=(), negative_length=4)
    configs = [model_config(tiny_model), model_config(tiny_model, true_cfg_scale=4.0), model_config(shifted_model)]
    plain, guided, shifted = (DiffusersRolloutEngine(config).generate(request)[0].float() for config in configs)
    assert (plain - guided).abs().max() > 3
    assert (plain - shifted).abs().max() > 3


def test_engine_draws_the_start_by_its_noise_keys(tiny_model: Path) -> None:
    config = model_config(tiny_model)
    engine, request = DiffusersRolloutEngine(config), rollout_request(window=())
    pictures, _ = engine.generate(request)
    start = draw(request.keys, INITIAL_NOISE, (24, 16), "cpu")
    scheduler = QwenImage.build_scheduler(config)
    latents, _ = sample(QwenImage, engine.transformer, scheduler, config, request, "cpu", initial_latents=start)
    assert torch.equal(pictures, engine.decode(latents))


def test_padding_does_not_change_a_prompts_picture(tiny_model: Path) -> None:
    """A prompt in a batch with longer ones, and alone: only the order of sums differs."""
    engine = DiffusersRolloutEngine(model_config(tiny_model))
    lengths = (5, 3, 7)
    padded = rollout_request(samples=1, lengths=lengths)
    _, whole = engine.generate(padded)
    for row, length in enumerate(lengths):
        table = prompt_table(lengths)
        own = PromptTable(table.prompt_embeds[row : row + 1, :length], table.prompt_embeds_mask[row : row + 1, :length])
        _, alone = engine.generate(RolloutRequest(padded.keys[row : row + 1], own, torch.tensor([0]), padded.window))
        assert torch.allclose(alone.latents[0], whole.latents[row], rtol=0, atol=1e-5)
        assert torch.allclose(alone.log_probs[0], whole.log_probs[row], rtol=0, atol=1e-5)


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


@pytest.mark.parametrize(("height", "width"), [(18, 24), (16, 26)])
def test_picture_that_does_not_divide_into_patches(tiny_model: Path, height: int, width: int) -> None:
    with pytest.raises(ValueError, match=rf"height {height} and pipeline.width {width} must be multiples of 4"):
        QwenImage.latent_shape(model_config(tiny_model, height=height, width=width))


def test_guidance_without_a_negative_prompt(tiny_model: Path) -> None:
    engine = DiffusersRolloutEngine(model_config(tiny_model, true_cfg_scale=2.0))
    with pytest.raises(ValueError, match="true_cfg_scale > 1 needs negative_prompt_embeds"):
        engine.generate(rollout_request())


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


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for registry in (models.base._ADAPTERS, models.base._PIPELINES):
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

    with pytest.raises(ValueError, match=r"already registered: models\.qwen_image\.adapter\.QwenImage"):
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
