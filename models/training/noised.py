# SPDX-License-Identifier: Apache-2.0
"""Finished samples, noised again: what the losses of the forward process train on."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.algorithms.losses import EMA_VELOCITY, OLD_VELOCITY, REF_VELOCITY, TEACHER_VELOCITY
from models.samples.trajectories import FinishedLatents, Samples
from models.schedulers.noise_keys import (
    FORWARD_LEVELS,
    FORWARD_NOISE,
    NoiseKey,
    copy_without_waiting,
    distinct,
    draw,
    generators,
)

if TYPE_CHECKING:
    from models.config.actor import ForwardProcessConfig


@dataclass(frozen=True)
class NoisedLatents(Samples):
    """B finished samples with K noise levels each; fp32, on the CPU until a micro-batch is computed.

    Attributes:
        latents: [B, ...], x0.
        advantages: [B].
        noise: [B, K, ...], e.
        sigmas: [B, K], t.
        old_velocity, ema_velocity, ref_velocity, teacher_velocity: [B, K, ...], see `VELOCITIES`; None where the loss
            does not ask for them.
    """

    latents: Tensor
    advantages: Tensor
    noise: Tensor
    sigmas: Tensor
    old_velocity: Tensor | None = None
    ema_velocity: Tensor | None = None
    ref_velocity: Tensor | None = None
    teacher_velocity: Tensor | None = None

    @property
    def steps(self) -> int:
        """K."""
        return self.sigmas.shape[1]

    def step(self, number: int) -> "NoisedLatents":
        """Level `number` alone: noise [B, 1, ...] and so on."""
        one: dict[str, Any] = {name: tensor[:, number : number + 1] for name, tensor in self.levelwise().items()}
        return replace(self, **one)

    def together(self, count: int) -> "NoisedLatents":
        """The same samples with `count` of their K levels as rows of their own: count B rows of K / count levels each,
        all samples at one level after the other, so that a pair stays together."""
        if count == 1:
            return self

        def as_rows(tensor: Tensor) -> Tensor:
            apart = tensor.unflatten(1, (-1, count)).movedim(2, 0)  # [count, B, K / count, ...]
            return apart.flatten(0, 1).contiguous()

        again = torch.arange(len(self)).repeat(count)
        of_levels: dict[str, Any] = {name: as_rows(tensor) for name, tensor in self.levelwise().items()}
        return replace(self.rows(again), **of_levels)

    def levelwise(self) -> dict[str, Tensor]:
        """Name -> tensor of what there is for each level: `sigmas` [B, K], the others [B, K, ...]."""
        names = ("noise", "sigmas", OLD_VELOCITY, EMA_VELOCITY, REF_VELOCITY, TEACHER_VELOCITY)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def noise_latents(
    samples: FinishedLatents, schedule: Tensor, config: "ForwardProcessConfig", paired: bool
) -> NoisedLatents:
    """Draw levels and noise for samples that a loss has chosen.

    Every draw has a key, so the same samples are noised alike on any number of ranks and after a resume. The two
    samples of a pair share theirs, the better one's. With `share_noise_in_group` all samples of a prompt share the
    levels and the noise of a key that names the prompt alone (V-GRPO, arXiv 2604.23380): no sample of the group, on
    whatever rank it is, has to know another.

    Args:
        samples: on any device, where what is drawn for them goes, too; what samples share goes there once.
        schedule: [N+1], the rollout's sigmas from pure noise to 0.
        config: which levels and how many.
        paired: are rows 2i and 2i+1 a pair?
    """
    keys = [samples.keys[i - i % 2] for i in range(len(samples))] if paired else list(samples.keys)
    if config.share_noise_in_group:
        keys = [key.of_group() for key in keys]
    count, device = config.levels_per_sample(len(schedule) - 1), samples.latents.device
    own, place = distinct(keys)
    of_levels = [draw(own, FORWARD_NOISE - level, samples.latents.shape[1:], "cpu") for level in range(count)]
    once = torch.stack(of_levels, 1), _levels(own, count, schedule.cpu(), config)
    noise, sigmas = (copy_without_waiting(tensor, device) for tensor in once)
    if place is not None:
        noise, sigmas = noise[place.to(device)], sigmas[place.to(device)]
    return NoisedLatents(
        keys=samples.keys,
        prompts=samples.prompts,
        prompt_index=samples.prompt_index,
        latents=samples.latents,
        advantages=advantages_of(samples),
        noise=noise,
        sigmas=sigmas,
    )


def advantages_of(chosen: FinishedLatents) -> Tensor:
    """[B], which the loss has left with the samples that it chose."""
    assert chosen.advantages is not None, "the loss's prepare_actor_batch leaves the advantages with the samples"
    return chosen.advantages


def _levels(keys: list[NoiseKey], count: int, schedule: Tensor, config: "ForwardProcessConfig") -> Tensor:
    """[B, count] noise levels t.

    stratified cuts the schedule into `count` parts of equal length, up to one level, and draws one level of each:
    V-GRPO (arXiv 2604.23380). Where the lengths differ by one, a level of a shorter part comes up more often.
    """
    drawn = generators(keys, FORWARD_LEVELS)
    if config.timestep_sampling == "logit_normal":
        # k t / (1 + (k-1) t) is a step of log k between the logits.
        shift = math.log(config.logit_normal_shift)
        return torch.stack([(torch.randn(count, generator=generator) + shift).sigmoid() for generator in drawn])
    candidates = schedule[: config.share_of(len(schedule) - 1)].float()
    if config.timestep_sampling == "stratified":
        parts = candidates.tensor_split(count)
        picked = [[part[torch.randint(len(part), (1,), generator=g)] for part in parts] for g in drawn]
        return torch.stack([torch.cat(of_sample) for of_sample in picked])
    return torch.stack([candidates[torch.randperm(len(candidates), generator=g)[:count]] for g in drawn])


def add_noise(clean: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """x_t = (1-t) x0 + t e, the forward process of rectified flow; `sigmas` [B] are t, the others [B, ...]."""
    t = sigmas.view(-1, *[1] * (clean.ndim - 1))
    return (1 - t) * clean + t * noise
