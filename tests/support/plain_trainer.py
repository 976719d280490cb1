# SPDX-License-Identifier: Apache-2.0
"""A reference trainer, written out: plain modules, plain autograd, torch's AdamW. No engine, no scheduler, no registry.

It starts where `helpers.model_config` does: four steps, s = 1, 3/4, 1/2, 1/4, and kernel `sde`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.config.actor import DiffusionActorConfig
from models.families.base import DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.samples.trajectories import Trajectories
from models.weights.trainable import make_trainable, trainable


@dataclass
class Replayed:
    """A window's step of all samples: log-probs [B], the step's Gaussian, and s - s'."""

    log_probs: Tensor
    mean: Tensor
    std: float
    length: float


def plain_module(config: DiffusionModelConfig) -> nn.Module:
    module = QwenImage.load_transformer(config, torch.float32)
    make_trainable(QwenImage, module, config)
    return module


def latents_around(paths: Trajectories, number: int) -> tuple[Tensor, Tensor]:
    """x before and after the window's step `number`: the path holds each visited place once."""
    visited = sorted({place for step in paths.window for place in (step, step + 1)})
    step = paths.window[number]
    return paths.latents[:, visited.index(step)], paths.latents[:, visited.index(step + 1)]


def plain_velocity(
    module: nn.Module, config: DiffusionModelConfig, paths: Trajectories, number: int, fixed_half: bool = False
) -> Tensor:
    table = paths.prompts

    def predict(embeds: Tensor, mask: Tensor) -> Tensor:
        return module(
            hidden_states=latents_around(paths, number)[0],
            timestep=paths.timesteps[:, number] / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, 4, 6)]] * len(paths),
            return_dict=False,
        )[0]

    conditional = predict(table.prompt_embeds[paths.prompt_index], table.prompt_embeds_mask[paths.prompt_index])
    if config.pipeline.true_cfg_scale == 1:
        return conditional
    assert table.negative_prompt_embeds is not None
    embeds = table.negative_prompt_embeds.expand(len(paths), -1, -1)
    unconditional = predict(embeds, torch.ones(embeds.shape[:2], dtype=torch.bool))
    if fixed_half:
        unconditional = unconditional.detach()
    guided = unconditional + config.pipeline.true_cfg_scale * (conditional - unconditional)
    return guided * conditional.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)


def plain_replay(
    module: nn.Module, config: DiffusionModelConfig, paths: Trajectories, number: int, fixed_half: bool = False
) -> Replayed:
    """Flow-GRPO's step from s to s' = s - 1/4."""
    step = paths.window[number]
    s, s_next = 1 - step / 4, 1 - (step + 1) / 4
    g = config.algo.noise_level * math.sqrt(s / (1 - (0.75 if s == 1 else s)))
    x, x_next = latents_around(paths, number)
    v = plain_velocity(module, config, paths, number, fixed_half)
    mean = x + v * (s_next - s) + g**2 / (2 * s) * (x + (1 - s) * v) * (s_next - s)
    std = g * math.sqrt(s - s_next)
    density = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return Replayed(density.mean((1, 2)), mean, std, s - s_next)


def plain_kl(own: Replayed, reference: Replayed) -> Tensor:
    return ((own.mean - reference.mean.detach()) ** 2 / (2 * own.std**2)).mean()


def plain_losses(actor: DiffusionActorConfig, own: Replayed, old: Replayed, advantages: Tensor) -> Tensor:
    """Each sample's policy loss, [B]."""
    settings = actor.diffusion_loss
    drift = ((own.mean - old.mean) ** 2).mean((1, 2)) / (2 * own.std**2)
    log_ratio = own.log_probs - old.log_probs
    if settings.loss_mode == "grpo_guard":
        log_ratio = (log_ratio + drift) * own.std
    ratio = torch.exp(log_ratio)
    if settings.loss_mode == "flow_dppo":
        far = drift.detach() >= settings.kl_mask_threshold
        outwards = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        return -advantages * ratio * ~(far & outwards)
    clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
    loss = -torch.minimum(advantages * ratio, advantages * clipped)
    return loss / own.length if settings.loss_mode == "grpo_guard" else loss


def plain_updates(
    config: DiffusionModelConfig,
    actor: DiffusionActorConfig,
    parts: Sequence[tuple[Trajectories, Tensor]],
    updates: int,
    rates: Sequence[float] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """(weights after, gradient norm of each update): no micro-batches, the mean over all samples and steps.

    `parts` are batches with their advantages; where a batch has weights, a NaN among them takes its step out of the
    mean. `rates` are the updates' learning rates, where these are not all the same. The old policy is the first one.
    """
    module, base = plain_module(config), QwenImage.load_transformer(config, torch.float32)
    parameters = list(trainable(module).values())
    optim = actor.optim
    optimizer = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    with torch.no_grad():
        old = [[plain_replay(module, config, paths, n) for n in range(len(paths.window))] for paths, _ in parts]
    for (paths, _), steps in zip(parts, old, strict=True):
        for number, step in enumerate(steps):
            step.log_probs = paths.log_probs[:, number]
    norms = []
    for update in range(updates):
        terms, count = [], 0
        for (paths, advantages), old_steps in zip(parts, old, strict=True):
            for number, old_step in enumerate(old_steps):
                own = plain_replay(module, config, paths, number, actor.guidance_gradient == "conditional")
                losses = plain_losses(actor, own, old_step, advantages)
                if paths.is_weights is not None:
                    weights = paths.is_weights[:, number]
                    losses = losses[~weights.isnan()] * weights[~weights.isnan()]
                terms.append(losses.sum())
                count += len(losses)
                if actor.use_kl_loss:
                    kl = plain_kl(own, plain_replay(base, config, paths, number))
                    terms.append(actor.kl_loss_coef * kl * len(paths))
        optimizer.zero_grad()
        (torch.stack(terms).sum() / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, optim.clip_grad).item())
        optimizer.param_groups[0]["lr"] = rates[update] if rates else optim.lr
        optimizer.step()
    return {name: p.detach() for name, p in trainable(module).items()}, norms
