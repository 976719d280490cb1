# SPDX-License-Identifier: Apache-2.0
"""Models of published size with random weights: drawn on the device, so that nothing of 40 GB is written or read."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import component_config
from models.weights.trainable import keep_formats
from tests.support.published_models import MODELS

SEED = 0
KL_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""Of Stable Diffusion 3.5; FLUX.1's and Z-Image's have its shape."""


def write_configs(model: str, folder: Path) -> None:
    """A folder in diffusers format with every config and no weight, of a model of `tests.support.published_models`."""
    published = MODELS[model]
    decoder = vae(published.architecture, "meta")
    parts = {
        "transformer/config.json": published.transformer,
        "vae/config.json": dict(decoder.config) | {"_class_name": type(decoder).__name__},
        "scheduler/scheduler_config.json": published.scheduler | {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        "model_index.json": {"_class_name": published.architecture} | dict(published.index),
    }
    for name, content in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def write_model(model: str, folder: Path) -> None:
    """The folder of a model as `write_configs` makes it, or of `tiny` the tiny Qwen-Image with its weights; one that is
    there stays."""
    if (folder / "model_index.json").is_file():
        return
    if model == "tiny":
        from tests.support.tiny_models import FAMILIES

        FAMILIES["qwen_image"].save(folder)
    else:
        write_configs(model, folder)


def transformer(folder: str | Path, dtype: torch.dtype, device: str) -> nn.Module:
    """The denoiser of the folder's config; the same weights at every call on the same device. Its stored buffers are in
    the format in which loading it gives them: the constructor makes some of them in fp32."""
    settings = component_config(str(folder), "transformer")
    kind = getattr(diffusers, settings["_class_name"])
    module = drawn(lambda: kind(**{k: v for k, v in settings.items() if not k.startswith("_")}), dtype, device)
    keep_formats(module, dtype)
    return module


def vae(architecture: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A decoder of the architecture's published size."""
    if architecture == "QwenImagePipeline":
        return drawn(diffusers.AutoencoderKLQwenImage, dtype, device)
    return drawn(lambda: diffusers.AutoencoderKL(**KL_VAE), dtype, device)


def use_random_weights(adapter: type[DiffusionModelBase], device: str) -> None:
    """From now on this process's engines draw the family's weights instead of reading them."""

    def load_transformer(model_config: DiffusionModelConfig, dtype: torch.dtype) -> nn.Module:
        return transformer(model_config.path, dtype, device)

    def load_vae(model_config: DiffusionModelConfig) -> nn.Module:
        return vae(model_config.architecture, device, model_config.dtype).eval().requires_grad_(False)

    adapter.load_transformer, adapter.load_vae = staticmethod(load_transformer), staticmethod(load_vae)  # type: ignore


def drawn(build: Any, dtype: torch.dtype, device: str, seed: int = SEED) -> Any:
    """What `build` makes, with random weights in this format on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            return build()
    finally:
        torch.set_default_dtype(before)
