# SPDX-License-Identifier: Apache-2.0
"""Models of published shape with random weights stand for loaded ones."""

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch

from benchmarks import drawn_checkpoint
from benchmarks.real_size import transformer
from models.families.stable_diffusion_3 import StableDiffusion3
from models.families.z_image import ZImage
from models.weights.stored import file_shapes
from tests.support.helpers import PROMPTS
from tests.support.published_models import MODELS

SMALL = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 8,
    "caption_projection_dim": 16,
    "in_channels": 4,
    "joint_attention_dim": 16,
    "num_attention_heads": 2,
    "num_layers": 1,
    "out_channels": 4,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}


def test_stored_buffers_are_in_the_format_in_which_loading_gives_them(tmp_path: Path) -> None:
    """The trainer holds them so; a rollout with others is another model."""
    (tmp_path / "drawn" / "transformer").mkdir(parents=True)
    (tmp_path / "drawn" / "transformer" / "config.json").write_text(json.dumps(SMALL))
    drawn = transformer(tmp_path / "drawn", torch.bfloat16, "cpu")
    drawn.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    loaded = type(drawn).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)  # type: ignore[attr-defined]
    formats = [{name: buffer.dtype for name, buffer in module.named_buffers()} for module in (drawn, loaded)]
    assert formats[0]
    assert formats[0] == formats[1]


BILLIONS = {  # of the published models' parts
    "sd3.5-medium": {"text_encoder": 0.124, "text_encoder_2": 0.695, "text_encoder_3": 4.762, "vae": 0.084},
    "flux.1-dev": {"text_encoder": 0.123, "text_encoder_2": 4.762, "vae": 0.084},
    "flux.2-klein-base-4b": {"text_encoder": 4.022, "vae": 0.084046115},
    "qwen-image": {"text_encoder": 8.292, "vae": 0.127},
    "z-image": {"text_encoder": 4.022, "vae": 0.084},
    "wan2.2-ti2v-5b": {"text_encoder": 5.681, "vae": 0.705},
}


@pytest.mark.parametrize("model", BILLIONS)
def test_drawn_parts_have_the_published_sizes(model: str) -> None:
    found = {}
    for name, build in drawn_checkpoint.parts(model).items():
        with torch.device("meta"):
            found[name] = sum(parameter.numel() for parameter in build().parameters()) / 1e9
    assert found == pytest.approx(BILLIONS[model] | {"transformer": MODELS[model].billions}, rel=0.01)


def test_a_drawn_folder_is_a_pipeline_that_encodes_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a size that a test can hold; the second call draws the same weights."""
    width = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    clip = ("CLIPTextModelWithProjection", width | {"projection_dim": 8, "vocab_size": 256})
    t5 = ("T5EncoderModel", drawn_checkpoint.T5_XXL | {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2})
    monkeypatch.setitem(
        drawn_checkpoint.TEXTS, "sd3.5-medium", {"text_encoder": clip, "text_encoder_2": clip, "text_encoder_3": t5}
    )
    monkeypatch.setattr(drawn_checkpoint, "KL_VAE", drawn_checkpoint.KL_VAE | {"block_out_channels": (32,) * 4})
    small = replace(MODELS["sd3.5-medium"], transformer=SMALL | {"in_channels": 16, "out_channels": 16})
    monkeypatch.setitem(MODELS, "sd3.5-medium", small)
    for folder in ("one", "two"):
        assert set(drawn_checkpoint.write("sd3.5-medium", tmp_path / folder, PROMPTS, "cpu")) == {
            "text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"
        }  # fmt: skip
    weights = [next((tmp_path / folder / "vae").glob("*.safetensors")).read_bytes() for folder in ("one", "two")]
    assert weights[0] == weights[1]
    whole = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "one")
    assert all(whole.components[name] is not None for name in ("transformer", "vae", "scheduler", "tokenizer_3"))
    text = StableDiffusion3.load_text_pipeline(tmp_path / "one")
    encoded = StableDiffusion3.encode_prompts(text, PROMPTS, 24)
    assert encoded["prompt_embeds"].shape == (len(PROMPTS), 77 + 24, 16)
    assert len(encoded["prompt_embeds"].unique(dim=0)) == len(set(PROMPTS)), "each prompt has its own"
    assert max(StableDiffusion3.prompt_lengths(text, PROMPTS)) <= 24
    assert not list(tmp_path.glob(".*"))


def test_the_text_side_may_be_drawn_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn_checkpoint.QWEN3_4B | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40_000}
    monkeypatch.setitem(drawn_checkpoint.TEXTS, "z-image", {"text_encoder": ("Qwen3ForCausalLM", text | heads)})
    assert set(drawn_checkpoint.write("z-image", tmp_path / "text", PROMPTS, "cpu", ("text",))) == {"text_encoder"}
    stored = file_shapes(tmp_path / "text/text_encoder/model.safetensors", "the text encoder")
    assert {name.partition(".")[0] for name in stored} == {"model"}, "as published"
    encoded = ZImage.encode_prompts(ZImage.load_text_pipeline(tmp_path / "text"), PROMPTS, 64)
    assert encoded["prompt_embeds"].shape[::2] == (len(PROMPTS), 16)
