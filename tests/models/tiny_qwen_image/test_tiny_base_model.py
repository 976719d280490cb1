# SPDX-License-Identifier: Apache-2.0
"""The tiny base model: tokenizer, pipeline, cheaper convolutions, and a pre-training that repeats itself."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from models.tiny_qwen_image import render
from models.tiny_qwen_image.build import PREFIX_TOKENS, PROMPT_TEMPLATE, build_pipeline, train_tokenizer
from models.tiny_qwen_image.flat_conv import flat_convolutions
from models.tiny_qwen_image.optimizers import orthogonalise, trapezoid
from models.tiny_qwen_image.pretrain import decode, draw_times, encode, pack_latents, pretrain
from models.tiny_qwen_image.settings import TinySettings
from models.tiny_qwen_image.sharding import ShardedBackward

PROMPTS = [f"the number {i:03d}" for i in range(100)]
SHORT = TinySettings(pictures=200, vae_steps=20, vae_batch=16, steps=20, batch=16, warmup_steps=5, report_every=1)


def quiet(stage: str, step: int, steps: int, values: dict[str, float]) -> None:
    """A progress function that says nothing."""


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    return build_pipeline(PROMPTS, SHORT)


def test_template_is_the_pipelines_own(pipeline: QwenImagePipeline) -> None:
    assert pipeline.prompt_template_encode == PROMPT_TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == PREFIX_TOKENS


@pytest.mark.parametrize("corpus", [[], PROMPTS, ["a photo of the background", "shape texture"] * 50])
def test_chat_prefix_is_34_tokens(corpus: list[str]) -> None:
    tokenizer = train_tokenizer(corpus, 4096)
    assert len(tokenizer(PROMPT_TEMPLATE.split("{}")[0]).input_ids) == 34


def test_each_digit_is_a_token(pipeline: QwenImagePipeline) -> None:
    assert [t.strip("Ġ") for t in pipeline.tokenizer.tokenize("the number 472")][-3:] == ["4", "7", "2"]


def test_only_the_transformer_and_vae_learn(pipeline: QwenImagePipeline) -> None:
    assert not any(p.requires_grad for p in pipeline.text_encoder.parameters())
    assert all(p.requires_grad for p in pipeline.transformer.parameters())


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_pipeline(PROMPTS[:3], SHORT)
    assert torch.equal(before, torch.get_rng_state())


def test_pipeline_saves_loads_and_samples(pipeline: QwenImagePipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    loaded = QwenImagePipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    pictures = [sample(p) for p in (pipeline, loaded)]
    assert pictures[0].shape == (2, SHORT.height, SHORT.width, 3)
    assert np.array_equal(pictures[0], pictures[1])


def sample(pipeline: QwenImagePipeline) -> np.ndarray:
    """Two uint8 pictures (2, height, width, 3) from fixed noise."""
    images = pipeline(
        PROMPTS[:2],
        height=SHORT.height,
        width=SHORT.width,
        num_inference_steps=2,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).images
    return np.stack([np.asarray(image) for image in images])


def test_flat_convolutions_give_the_stock_result_and_are_undone(pipeline: QwenImagePipeline) -> None:
    vae = pipeline.vae
    pixels = torch.rand(2, 3, SHORT.height, SHORT.width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        stock = vae.encode(pixels[:, :, None]).latent_dist.mean[:, :, 0]
        stock_pixels = vae.decode(stock[:, :, None]).sample[:, :, 0]
        with flat_convolutions(vae):
            assert "forward" in vars(vae.quant_conv)
            flat = encode(vae, pixels)
            flat_pixels = decode(vae, stock).clamp(-1, 1)
    assert (flat - stock).abs().max() < 1e-6
    assert (flat_pixels - stock_pixels).abs().max() < 1e-6
    assert not any("forward" in vars(module) for module in vae.modules())


def test_flat_convolutions_are_undone_after_an_error(pipeline: QwenImagePipeline) -> None:
    with pytest.raises(RuntimeError), flat_convolutions(pipeline.vae):
        raise RuntimeError
    assert not any("forward" in vars(module) for module in pipeline.vae.modules())


def test_shares_of_a_batch_add_up_to_the_whole() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    unused = torch.nn.Parameter(torch.ones(1))
    rows = torch.arange(21.0).reshape(7, 3)
    with ShardedBackward([weight, unused], threads=2) as backward:
        value = backward(lambda share: (rows[share] @ weight).square().mean(), len(rows))
    expected = torch.autograd.grad((rows @ weight).square().mean(), weight)[0]
    assert value == pytest.approx((rows @ weight).square().mean().item())
    assert weight.grad is not None
    assert torch.allclose(weight.grad, expected)
    assert unused.grad is None


def test_orthogonalise_flattens_the_singular_values() -> None:
    matrices = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_trapezoid_rises_stays_and_falls() -> None:
    rates = [trapezoid(step, 100, 10, 0.5) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[30] == 1.0
    assert rates[-1] == pytest.approx(0.02)


def test_times_lie_between_picture_and_noise() -> None:
    times = draw_times(SHORT, torch.Generator().manual_seed(0))
    assert times.shape == (SHORT.batch,)
    assert times.min() >= 0
    assert times.max() <= 1


def test_latents_are_packed_as_the_pipeline_packs_them() -> None:
    latents = torch.arange(2 * 4 * 12 * 24.0).reshape(2, *SHORT.latent_shape)
    unpacked = QwenImagePipeline._unpack_latents(pack_latents(latents), SHORT.height, SHORT.width, 2)
    assert torch.equal(unpacked[:, :, 0], latents)


@pytest.mark.slow  # nothing but `make data` pre-trains it
def test_pretraining_repeats_itself_and_learns(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {"vae": [], "transformer": []}

    def record(stage: str, step: int, steps: int, values: dict[str, float]) -> None:
        losses[stage].append(values["loss"])

    threads = torch.get_num_threads()
    pretrain(PROMPTS[:80], PROMPTS, SHORT, record).save_pretrained(tmp_path / "one")
    torch.rand(7)  # a different global state must not matter
    pretrain(PROMPTS[:80], PROMPTS, SHORT, quiet).save_pretrained(tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    for stage in losses.values():
        assert len(stage) == SHORT.steps
        assert np.mean(stage[-5:]) < 0.9 * np.mean(stage[:5])


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_held_out_prompts_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[str] = set()
    original = render.render_picture

    def spy(prompt: str, *rest: object) -> np.ndarray:
        drawn.add(prompt)
        return original(prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(render, "render_picture", spy)
    pretrain(PROMPTS[:80], PROMPTS, replace(SHORT, vae_steps=1, steps=1), quiet)
    assert drawn
    assert drawn <= set(PROMPTS[:80])
