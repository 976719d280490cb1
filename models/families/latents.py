# SPDX-License-Identifier: Apache-2.0
"""What families share around the denoiser: config files, the grid of latent patches, packing, and the way to pixels."""

import functools
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.config.view import DiffusionModelConfig


@functools.lru_cache(maxsize=64)
def component_config(path: str, component: str) -> dict[str, Any]:
    """The config of one component of a folder, with what its file leaves out as its class in diffusers has it.

    Published files often hold only the fields that a class had when they were written. Cached, since every forward asks
    for it.
    """
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return filled_config(Path(path) / component / name)


def filled_config(file: Path) -> dict[str, Any]:
    """A config file as it is now, with what it leaves out as its class in diffusers has it."""
    written = json.loads(file.read_text())
    return {**_class_defaults(written.get("_class_name", "")), **written}


@functools.cache
def _class_defaults(name: str) -> Mapping[str, Any]:
    """Defaults of a class of diffusers by its name; none where diffusers has no such class."""
    found = getattr(importlib.import_module("diffusers"), name, None) if name else None
    parameters = inspect.signature(found).parameters if inspect.isclass(found) else {}
    return {key: value.default for key, value in parameters.items() if value.default is not value.empty}


@functools.lru_cache(maxsize=64)
def pipeline_config(path: str) -> dict[str, Any]:
    """model_index.json of a folder."""
    return json.loads((Path(path) / "model_index.json").read_text())


def transformer_config(model_config: "DiffusionModelConfig") -> dict[str, Any]:
    """`component_config` of the denoiser, from where the model's settings say that it is."""
    folder = Path(model_config.config_path)
    return component_config(str(folder.parent), folder.name)


def text_width(model_config: "DiffusionModelConfig") -> int | None:
    """Numbers in each of the text's vectors that the transformer takes; None where its config does not say so."""
    config = transformer_config(model_config)
    names = ("joint_attention_dim", "cap_feat_dim", "text_dim")  # as diffusers' architectures name it
    return next((config[name] for name in names if name in config), None)


def latent_grid(model_config: "DiffusionModelConfig", vae_factor: int, patch: int) -> tuple[int, int]:
    """Rows and columns of the VAE's latent, of which the denoiser takes `patch` by `patch` at once.

    Raises:
        ValueError: height or width is no multiple of vae_factor * patch.
    """
    multiple = vae_factor * patch
    height, width = model_config.pipeline.height, model_config.pipeline.width
    if height % multiple or width % multiple:
        raise ValueError(f"pipeline.height {height} and pipeline.width {width} must be multiples of {multiple}")
    return height // vae_factor, width // vae_factor


def kl_vae_factor(path: str) -> int:
    """How much smaller than the picture the latent of diffusers' `AutoencoderKL` is, a side."""
    return 2 ** (len(component_config(path, "vae")["block_out_channels"]) - 1)


def vae_factor(path: str) -> int:
    """How much smaller than the picture the latent of a folder's VAE is, a side."""
    config = component_config(path, "vae")
    if "scale_factor_spatial" in config:
        return config["scale_factor_spatial"]
    if "temperal_downsample" in config:  # diffusers' own spelling
        return 2 ** len(config["temperal_downsample"])
    return kl_vae_factor(path)


def unpack_latents(latents: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens of 2x2 latent pixels [B, rows/2 * columns/2, 4C] to a latent [B, C, rows, columns]."""
    batch, _, channels = latents.shape
    grid = latents.view(batch, rows // 2, columns // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(batch, channels // 4, rows, columns)


def pack_latents(latents: Tensor) -> Tensor:
    """The inverse of `unpack_latents`: a latent [B, C, rows, columns] to tokens [B, rows/2 * columns/2, 4C]."""
    batch, channels, rows, columns = latents.shape
    grid = latents.view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch, rows // 2 * (columns // 2), channels * 4)


def unscaled(vae: Any, latents: Tensor) -> Tensor:
    """The VAE's own latent [B, ...], of the given shape, where it is normalised by one factor and, unless that is null,
    one shift."""
    latents = latents.to(next(vae.parameters()).dtype)
    latents = latents / vae.config.scaling_factor
    return latents if vae.config.shift_factor is None else latents + vae.config.shift_factor


def scaled(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `unscaled`, [B, ...] fp32."""
    return (latents.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def destandardised(vae: Any, latents: Tensor) -> Tensor:
    """The VAE's own latent [B, C, F, h, w] where it is normalised by a mean and a deviation of each channel."""
    latents = latents.to(next(vae.parameters()).dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    # Divided by the reciprocal, as the pipelines do, so that the last bit agrees with them.
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return latents / inverse_std + mean


def standardised(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `destandardised`, [B, C, F, h, w] fp32."""
    latents = latents.float()
    mean, std = (
        torch.tensor(numbers).view(1, -1, 1, 1, 1).to(latents)
        for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std


def pixels_of(vae: Any, images: Tensor) -> Tensor:
    """Pictures [B, ..., H, W, 3], uint8, as the encoder takes them: [B, 3, ..., H, W] in [-1, 1]."""
    return images.movedim(-1, 1).to(next(vae.parameters())) / 127.5 - 1


def to_uint8(decoded: Tensor) -> Tensor:
    """A decoder's output [B, 3, ..., H, W] in [-1, 1] to pictures [B, ..., H, W, 3], uint8; NaN becomes black.

    Raises:
        ValueError: it is pictures already.
    """
    if not decoded.is_floating_point():
        raise ValueError(
            f"a family's decode returns what its decoder says, floats in [-1, 1], and not {decoded.dtype}: leave "
            "to_uint8 out of it"
        )
    unit = (decoded * 0.5 + 0.5).clamp(0, 1).movedim(1, -1).float()
    return (unit * 255).round().to(torch.uint8)
