"""Floating-point operations of a denoiser's forward, from its config alone: what a step must cost.

Matrix products and attention are counted, two operations for a multiplication with its addition, as torch's
FlopCounterMode counts them. LoRA is not in it: it adds 1 % to Stable Diffusion 3.5 at rank 32, 3 % to Qwen-Image at 64.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from models.base import DiffusionModelBase, DiffusionModelConfig
from models.latents import component_config, pipeline_config

Config = Mapping[str, Any]
TIME_CHANNELS = 256
"""Sines and cosines of a timestep, in all of these architectures."""
Z_IMAGE_MULTIPLE = 32
"""Z-Image fills image and caption up to a multiple of this."""


def step_flops(model_config: DiffusionModelConfig, text_tokens: int) -> float:
    """Operations of one denoising step of one sample; a guided step has two forwards.

    Args:
        model_config: the folder's config files are read, and the pipeline's size, frames and guidance.
        text_tokens: length of the sequence that the denoiser sees, its padding included.
    """
    adapter = DiffusionModelBase.get_class(model_config)
    config = component_config(model_config.path, "transformer")
    tokens = image_tokens(config, adapter.latent_shape(model_config))
    timesteps = tokens if pipeline_config(model_config.path).get("expand_timesteps") else 1
    forwards = 2 if adapter.is_guided(model_config.pipeline) else 1
    return forwards * forward_flops(config, tokens, text_tokens, timesteps)


def image_tokens(config: Config, latent_shape: tuple[int, ...]) -> int:
    """Tokens of a latent: [S, C] is packed already, [C, ..., h, w] is cut into the transformer's patches."""
    if len(latent_shape) == 2:
        return latent_shape[0]
    patch = config["patch_size"] if "patch_size" in config else config["all_patch_size"][0]
    sides = [1, patch, patch] if isinstance(patch, int) else patch
    lengths = latent_shape[1:]
    return math.prod(length // side for length, side in zip(lengths, sides[-len(lengths) :], strict=True))


def forward_flops(config: Config, image_tokens: int, text_tokens: int, timesteps: int = 1) -> float:
    """Operations of one forward of one sample.

    Args:
        config: the transformer's config.json; `_class_name` says which architecture it is.
        image_tokens: of one sample.
        text_tokens: of one sample, padding that the denoiser sees included.
        timesteps: how many timesteps are embedded: one, or one for each image token.

    Raises:
        ValueError: no formula for this transformer.
    """
    count = _FORMULAS.get(config["_class_name"])
    if count is None:
        known = ", ".join(sorted(_FORMULAS))
        raise ValueError(f"no formula for the operations of {config['_class_name']!r}; there are formulas for {known}")
    return 2.0 * count(config, image_tokens, text_tokens, timesteps)


def _width(config: Config) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _attention(queries: int, keys: int, width: int) -> int:
    """Scores and their weighted sum."""
    return 2 * queries * keys * width


def _embedded(inputs: int, width: int) -> int:
    """One vector through two layers, to the model's width."""
    return inputs * width + width**2


def _double_block(width: int, image: int, text: int) -> int:
    """Two streams with weights of their own (projections, MLP, modulation) that attend to each other."""
    return (4 + 8) * width**2 * (image + text) + 12 * width**2 + _attention(image + text, image + text, width)


def _stable_diffusion_3(config: Config, image: int, text: int, timesteps: int) -> int:
    width, patch = _width(config), config["patch_size"] ** 2
    embedders = patch * config["in_channels"] * width * image + config["joint_attention_dim"] * width * text
    time = _embedded(TIME_CHANNELS, width) + _embedded(config["pooled_projection_dim"], width)
    blocks = config["num_layers"] * _double_block(width, image, text)
    second = 4 * width**2 * image + 3 * width**2 + _attention(image, image, width)
    # The last block's text has no output: no projection, no MLP, and two of the six modulations.
    unused = (1 + 8) * width**2 * text + 4 * width**2
    out = 2 * width**2 + width * patch * config["out_channels"] * image
    return embedders + time + blocks + len(config["dual_attention_layers"]) * second - unused + out


def _qwen_image(config: Config, image: int, text: int, timesteps: int) -> int:
    width = _width(config)
    embedders = config["in_channels"] * width * image + config["joint_attention_dim"] * width * text
    blocks = config["num_layers"] * _double_block(width, image, text)
    out = 2 * width**2 + width * config["patch_size"] ** 2 * config["out_channels"] * image
    return embedders + _embedded(TIME_CHANNELS, width) + blocks + out


def _flux(config: Config, image: int, text: int, timesteps: int) -> int:
    width, both = _width(config), image + text
    embedders = config["in_channels"] * width * image + config["joint_attention_dim"] * width * text
    scalars = 2 if config["guidance_embeds"] else 1
    time = scalars * _embedded(TIME_CHANNELS, width) + _embedded(config["pooled_projection_dim"], width)
    double = config["num_layers"] * _double_block(width, image, text)
    # Queries, keys, values and MLP side by side, joined by one output projection of width 5.
    single = config["num_single_layers"] * (
        (3 + 4 + 5) * width**2 * both + 3 * width**2 + _attention(both, both, width)
    )
    out = 2 * width**2 + width * config["in_channels"] * image
    return embedders + time + double + single + out


def _z_image(config: Config, image: int, text: int, timesteps: int) -> int:
    width, channels = config["dim"], config["all_patch_size"][0] ** 2 * config["in_channels"]
    image, text = (math.ceil(tokens / Z_IMAGE_MULTIPLE) * Z_IMAGE_MULTIPLE for tokens in (image, text))
    narrow = min(width, 256)  # of the modulation's input

    def block(tokens: int) -> int:
        return (4 * width**2 + 3 * width * int(width / 3 * 8)) * tokens + _attention(tokens, tokens, width)

    embedders = channels * width * image + config["cap_feat_dim"] * width * text
    time = TIME_CHANNELS * 1024 + 1024 * narrow
    refiners = config["n_refiner_layers"] * (block(image) + block(text) + 4 * narrow * width)
    layers = config["n_layers"] * (block(image + text) + 4 * narrow * width)
    return embedders + time + refiners + layers + narrow * width + width * channels * (image + text)


def _wan(config: Config, image: int, text: int, timesteps: int) -> int:
    width, patch = _width(config), math.prod(config["patch_size"])
    embedders = patch * config["in_channels"] * width * image + _embedded(config["text_dim"], width) * text
    time = (_embedded(config["freq_dim"], width) + 6 * width**2) * timesteps
    own = 4 * width**2 * image + _attention(image, image, width)
    cross = 2 * width**2 * (image + text) + _attention(image, text, width)
    blocks = config["num_layers"] * (own + cross + 2 * width * config["ffn_dim"] * image)
    return embedders + time + blocks + width * patch * config["out_channels"] * image


_FORMULAS: dict[str, Callable[[Config, int, int, int], int]] = {
    "SD3Transformer2DModel": _stable_diffusion_3,
    "QwenImageTransformer2DModel": _qwen_image,
    "FluxTransformer2DModel": _flux,
    "ZImageTransformer2DModel": _z_image,
    "WanTransformer3DModel": _wan,
}
