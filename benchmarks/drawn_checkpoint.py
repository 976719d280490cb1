# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of published shape with random weights, for machines to which nothing can be downloaded.

    python -m benchmarks.drawn_checkpoint sd3.5-medium data/stable_diffusion_3_5 --device cuda

The folder is what `hf download` would leave: diffusers' layout, the published configs, shards of bf16,
text encoders of their real size. Two things are not as published. The weights are noise, so pictures are. And the
tokenizers have the prompts' own letters and words for a vocabulary, because the published files cannot be had here;
the encoders' tables of embeddings have their published size all the same.
"""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import diffusers
import torch
import transformers
import typer
from torch import nn

from benchmarks.real_size import KL_VAE, SEED, drawn
from models.tiny_qwen_image.build import train_tokenizer
from tasks.data.prompts import load_prompts
from tasks.system.files import put_in_place
from tests.support.published_models import MODELS

CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "hidden_act": "gelu",
}
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN2_5_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                      "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TEXTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    # model -> component -> class of transformers, its published config
    "sd3.5-medium": {
        "text_encoder": ("CLIPTextModelWithProjection", CLIP_L | {"projection_dim": 768}),
        "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G | {"projection_dim": 1280}),
        "text_encoder_3": ("T5EncoderModel", T5_XXL),
    },
    "flux.1-dev": {
        "text_encoder": ("CLIPTextModel", CLIP_L | {"projection_dim": 768}),
        "text_encoder_2": ("T5EncoderModel", T5_XXL),
    },
    "qwen-image": {"text_encoder": ("Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL_7B)},
    "flux.2-klein-base-4b": {"text_encoder": ("Qwen3ForCausalLM", QWEN3_4B)},
    "z-image": {"text_encoder": ("Qwen3ForCausalLM", QWEN3_4B)},
    "wan2.2-ti2v-5b": {"text_encoder": ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384})},
}
CALLED = {("z-image", "text_encoder"): "Qwen3Model"}
"""What model_index.json calls a component, where its files have the names of another class."""
WAN_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
VAES: dict[str, tuple[str, dict[str, Any]]] = {
    "flux.2-klein-base-4b": ("AutoencoderKLFlux2", {}),
    "qwen-image": ("AutoencoderKLQwenImage", {}),
    "wan2.2-ti2v-5b": ("AutoencoderKLWan", WAN_VAE),
}
SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "wan2.2-ti2v-5b": (
        diffusers.UniPCMultistepScheduler,
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    )
}
CLIP_LENGTH = 77


def parts(model: str) -> dict[str, Callable[[], nn.Module]]:
    """The networks of a model, by component: each call makes one, on torch's default device and in its format."""
    published = MODELS[model]
    config = {key: value for key, value in published.transformer.items() if not key.startswith("_")}
    vae, settings = VAES.get(model, ("AutoencoderKL", KL_VAE))
    found: dict[str, Callable[[], nn.Module]] = {
        name: lambda kind=kind, config=config: text_encoder(kind, config)
        for name, (kind, config) in TEXTS[model].items()
    }
    return found | {
        "transformer": lambda: getattr(diffusers, published.transformer["_class_name"])(**config),
        "vae": lambda: getattr(diffusers, vae)(**settings),
    }


def text_encoder(kind: str, config: dict[str, Any]) -> nn.Module:
    """An encoder of transformers by the name of its class."""
    network = getattr(transformers, kind)
    return network(network.config_class(**config))


def tokenizers(model: str, prompts: list[str]) -> dict[str, Any]:
    """The model's tokenizers, which know these prompts: CLIP's letter by letter, T5's and Qwen's by words."""
    from tests.support.tiny_models import CHAT, clip_tokenizer, t5_tokenizer

    def clip() -> Any:
        lower = {letter for prompt in prompts for letter in prompt.lower() if not letter.isspace()}
        return clip_tokenizer(sorted(lower), CLIP_LENGTH)

    def t5() -> Any:
        return t5_tokenizer(
            prompts, sorted({letter for prompt in prompts for letter in prompt if not letter.isspace()})
        )

    def qwen() -> Any:
        tokenizer = train_tokenizer(prompts, 32768)
        tokenizer.chat_template = CHAT
        return tokenizer

    makers = {"CLIP": clip, "T5": t5, "UMT5": t5, "Qwen": qwen}
    return {
        name.replace("text_encoder", "tokenizer"): next(
            make() for begins, make in makers.items() if kind.startswith(begins)
        )
        for name, (kind, _) in TEXTS[model].items()
    }


def write(
    model: str, folder: Path, prompts: list[str], device: str, chosen: tuple[str, ...] = ("text", "image")
) -> dict[str, float]:
    """Write the folder beside its place and put it there when it is whole; seconds of each component.

    Args:
        chosen: "text" is the text encoders, "image" transformer and VAE; tokenizers and scheduler come along.
            Of a model that does not fit the disk at once the text side can be drawn, used and removed first.
    """
    with put_in_place(folder) as aside:
        return _write(model, aside, prompts, device, chosen)


def _write(model: str, aside: Path, prompts: list[str], device: str, chosen: tuple[str, ...]) -> dict[str, float]:
    published, seconds = MODELS[model], dict[str, float]()
    index: dict[str, Any] = {"_class_name": published.architecture, "_diffusers_version": diffusers.__version__}
    for name, tokenizer in tokenizers(model, prompts).items():
        tokenizer.save_pretrained(aside / name)
        index[name] = ["transformers", type(tokenizer).__name__]
    for number, (name, build) in enumerate(parts(model).items()):
        if ("text" if name.startswith("text") else "image") not in chosen:
            continue
        started = time.perf_counter()
        module = drawn(build, torch.bfloat16, device, SEED + number)
        module.save_pretrained(aside / name, max_shard_size="5GB")
        kind = CALLED.get((model, name), type(module).__name__)
        index[name] = ["transformers" if name.startswith("text") else "diffusers", kind]
        del module
        gc.collect()
        seconds[name] = time.perf_counter() - started
    scheduler, settings = SCHEDULERS.get(model, (diffusers.FlowMatchEulerDiscreteScheduler, {}))
    scheduler.from_config(published.scheduler | settings).save_pretrained(aside / "scheduler")
    index["scheduler"] = ["diffusers", scheduler.__name__]
    (aside / "model_index.json").write_text(json.dumps(index | dict(published.index), indent=2) + "\n")
    return seconds


def write_tiny(model: str, folder: Path) -> None:
    """A rehearsal's model: files, names and older forms of config as on the hub, on which any computer can train."""
    from tests.support.published_layout import LAYOUTS

    with put_in_place(folder) as aside:
        LAYOUTS[model].save(aside)
        LAYOUTS[model].publish(aside)


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(TEXTS)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    device: Annotated[str, typer.Option(help="Where the weights are drawn: cpu or cuda.")] = "cpu",
    prompts: Annotated[Path, typer.Option(help="Prompt table that the tokenizers shall know.")] = Path(
        "data/prompts.parquet"
    ),
    only: Annotated[str, typer.Option(help="text or image: one side alone.")] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="The hub's layout with a few thousand weights.")] = False,
) -> None:
    """Draw a model, and print how long each of its parts took."""
    if model not in TEXTS:
        raise typer.BadParameter(f"model is {model!r}; known: {', '.join(TEXTS)}")
    if tiny:
        return write_tiny(model, folder)
    texts = [prompt.prompt for prompt in load_prompts(prompts)]
    chosen = (only,) if only else ("text", "image")
    for name, seconds in write(model, folder, texts, device, chosen).items():
        size = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors")) / 2**30
        typer.echo(f"{name:16} {size:6.2f} GiB {seconds:6.1f} s")


if __name__ == "__main__":
    typer.run(main)
