# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a denoiser's forward, from its config alone: what a step must cost.

Matrix products and attention are counted, two operations for a multiplication with its addition, as torch's
FlopCounterMode counts them. The adapters' formulas leave LoRA out, which adds 1 % to Stable Diffusion 3.5 at rank 32
and 3 % to Qwen-Image at 64; `PolicyFlops` has it, from a pass over the real module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from models.algorithms.losses import (
    EMA_VELOCITY,
    OLD_VELOCITY,
    REF_MEAN,
    REF_VELOCITY,
    TEACHER_MEAN,
    TEACHER_VELOCITY,
    DiffusionLossFn,
)
from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import pipeline_config, transformer_config
from models.families.operations import Config

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig


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
        """The FLOP of all denoising steps; decoding is not counted."""
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
        """The FLOP of all forward and backward passes.

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


def has_formula(model_config: DiffusionModelConfig) -> bool:
    """Can the operations of this model's transformer be counted?"""
    adapter, config = DiffusionModelBase.get_class(model_config), transformer_config(model_config)
    return adapter.multiplications(config, 1, 1, 1) is not None


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
    config = transformer_config(model_config)
    tokens = image_tokens(config, adapter.latent_shape(model_config))
    timesteps = tokens if pipeline_config(model_config.path).get("expand_timesteps") else 1
    texts = [text_tokens]
    if adapter.is_guided(model_config.pipeline):
        texts.append(text_tokens if negative_tokens is None else negative_tokens)
    if adapter.one_text_length:
        texts = [max(texts)] * len(texts)
    return [forward_flops(adapter, config, tokens, text, timesteps) for text in texts]


def image_tokens(config: Config, latent_shape: tuple[int, ...]) -> int:
    """Tokens of a latent: [S, C] is packed already, [C, ..., h, w] is cut into the transformer's patches."""
    if len(latent_shape) == 2:
        return latent_shape[0]
    patch = config["patch_size"] if "patch_size" in config else config["all_patch_size"][0]
    sides = [1, patch, patch] if isinstance(patch, int) else patch
    lengths = latent_shape[1:]
    return math.prod(length // side for length, side in zip(lengths, sides[-len(lengths) :], strict=True))


def forward_flops(
    adapter: type[DiffusionModelBase], config: Config, image_tokens: int, text_tokens: int, timesteps: int = 1
) -> float:
    """Operations of one forward of one sample.

    Args:
        adapter: of the model's family.
        config: the transformer's config.json.
        image_tokens: of one sample.
        text_tokens: of one sample, padding that the denoiser sees included.
        timesteps: how many timesteps are embedded: one, or one for each image token.

    Raises:
        ValueError: the family has no formula.
    """
    count = adapter.multiplications(config, image_tokens, text_tokens, timesteps)
    if count is None:
        raise ValueError(f"{adapter.__qualname__} has no formula for the operations of {config['_class_name']!r}")
    return 2.0 * count
