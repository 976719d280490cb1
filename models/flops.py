"""Floating-point operations of a denoiser's forward, from its config alone: what a step must cost.

Matrix products and attention are counted, two operations for a multiplication with its addition, as torch's
FlopCounterMode counts them. The formulas leave LoRA out, which adds 1 % to Stable Diffusion 3.5 at rank 32 and 3 % to
Qwen-Image at 64; `PolicyFlops` has it, from a pass over the real module.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from models.algorithms.losses import (
    EMA_VELOCITY,
    OLD_VELOCITY,
    REF_MEAN,
    REF_VELOCITY,
    TEACHER_MEAN,
    TEACHER_VELOCITY,
    DiffusionLossFn,
)
from models.base import DiffusionModelBase, DiffusionModelConfig
from models.latents import component_config, pipeline_config
from models.meta_pass import PassCost

if TYPE_CHECKING:
    from models.actor_config import DiffusionActorConfig

Config = Mapping[str, Any]
TIME_CHANNELS = 256
"""Sines and cosines of a timestep, in all of these architectures."""
Z_IMAGE_MULTIPLE = 32
"""Z-Image fills image and caption up to a multiple of this."""
ONE_LENGTH = ("ZImageTransformer2DModel",)
"""Here both halves of guidance are one batch, whose texts are filled up to the longest."""


class Batch(NamedTuple):
    """Samples that are computed together.

    Attributes:
        samples: how many.
        text_tokens: of each sample, padding that the denoiser sees included.
        negative_tokens: of the negative prompt; 0 without guidance.
    """

    samples: int
    text_tokens: int
    negative_tokens: int = 0


@dataclass(frozen=True)
class PolicyFlops:
    """Operations of rollout and update.

    The formulas say how they depend on the length of the text, and one pass over the real module what LoRA, guidance,
    the backward and gradient checkpointing make of them.

    Attributes:
        model_config: of the rollout.
        cost: of some samples.
        text: the samples and the text that it was measured with.
    """

    model_config: DiffusionModelConfig
    cost: PassCost
    text: Batch

    def rollout(self, batches: Sequence[Batch]) -> float:
        """Of all denoising steps; decoding is not counted."""
        steps = self.model_config.pipeline.num_inference_steps
        share = self.cost.sampling_flops / self._measured
        return steps * share * sum(batch.samples * self._step(batch) for batch in batches)

    def update(
        self,
        batches: Sequence[Batch],
        trained: float,
        policy: float,
        others: float,
        *,
        recorded: float = 0.0,
        recompute: bool = False,
    ) -> float:
        """Of all forward and backward passes.

        Args:
            batches: what is trained on.
            trained: samples times timesteps that were trained on, over all ranks and epochs.
            policy: samples times timesteps that older weights of the policy saw without gradient.
            others: the same of reference and teacher, which have no LoRA in use.
            recorded: those of `trained` whose half of the guidance without the prompt came with the samples.
            recompute: count what gradient checkpointing computes again, too. The usual MFU leaves it out.
        """
        samples = sum(batch.samples for batch in batches)
        step = sum(batch.samples * self._step(batch) for batch in batches) / samples
        again = self.cost.recomputed_flops if recompute else 0.0
        own = trained * (self.cost.training_flops + again) + policy * self.cost.sampling_flops
        if recorded:
            own -= recorded * self.cost.sampling_flops * self._without_prompt
        return step * (own / self._measured + others)

    @property
    def _measured(self) -> float:
        return self.text.samples * self._step(self.text)

    @property
    def _without_prompt(self) -> float:
        """Share of a guided step."""
        forwards = step_forwards(self.model_config, self.text.text_tokens, self.text.negative_tokens)
        return forwards[1] / sum(forwards)

    def _step(self, batch: Batch) -> float:
        return step_flops(self.model_config, batch.text_tokens, batch.negative_tokens or None)


def has_formula(class_name: str) -> bool:
    """Can the operations of this transformer be counted?"""
    return class_name in _FORMULAS


def compared_passes(loss: DiffusionLossFn, actor_config: "DiffusionActorConfig") -> tuple[int, int]:
    """Forwards without gradient beside each trained one: by older weights of the policy, by reference and teacher.

    A loss of the reverse process has them in every epoch, one of the forward process once.
    """
    wanted = {*loss.required_data_keys}
    if actor_config.use_kl_loss:
        wanted.add(REF_MEAN if loss.process == "reverse" else REF_VELOCITY)
    older = wanted & {OLD_VELOCITY, EMA_VELOCITY}
    others = wanted & {REF_MEAN, TEACHER_MEAN, REF_VELOCITY, TEACHER_VELOCITY}
    return len(older), len(others)


def step_flops(model_config: DiffusionModelConfig, text_tokens: int, negative_tokens: int | None = None) -> float:
    """Operations of one denoising step of one sample; a guided step has two forwards.

    Args:
        model_config: the folder's config files are read, and the pipeline's size, frames and guidance.
        text_tokens: length of the sequence that the denoiser sees, its padding included.
        negative_tokens: of the negative prompt, read with guidance; None is as many as the prompt's.
    """
    return sum(step_forwards(model_config, text_tokens, negative_tokens))


def step_forwards(
    model_config: DiffusionModelConfig, text_tokens: int, negative_tokens: int | None = None
) -> list[float]:
    """`step_flops` by forwards: with the prompt and, if there is guidance, without it."""
    adapter = DiffusionModelBase.get_class(model_config)
    config = component_config(model_config.path, "transformer")
    tokens = image_tokens(config, adapter.latent_shape(model_config))
    timesteps = tokens if pipeline_config(model_config.path).get("expand_timesteps") else 1
    texts = [text_tokens]
    if adapter.is_guided(model_config.pipeline):
        texts.append(text_tokens if negative_tokens is None else negative_tokens)
    if config["_class_name"] in ONE_LENGTH:
        texts = [max(texts)] * len(texts)
    return [forward_flops(config, tokens, text, timesteps) for text in texts]


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
