# SPDX-License-Identifier: Apache-2.0
"""A reference trainer for losses of the forward process: plain modules, plain autograd, one pass over all samples.

Like `plain_trainer` it knows no engine, no micro-batch and no registry; it starts where `helpers.model_config` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.config.actor import DiffusionActorConfig
from models.families.base import DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.samples.trajectories import FinishedLatents, PromptTable
from models.weights.trainable import trainable
from tests.support.plain_trainer import plain_module


@dataclass
class Noised:
    """Samples with their K levels: x0, e and t flat over samples and levels [B K, ...], A [B K]."""

    levels: int
    table: PromptTable
    rows: Tensor
    clean: Tensor
    noise: Tensor
    t: Tensor
    advantages: Tensor

    @property
    def noisy(self) -> Tensor:
        t = self.t.view(-1, 1, 1)
        return (1 - t) * self.clean + t * self.noise


def noised(samples: FinishedLatents, advantages: Tensor, levels: Tensor) -> Noised:
    """By the documented draws: the noise of level k of a sample is step -3 - k of its key.

    Args:
        levels: [B, K].
    """
    pairs = [(i, k) for i in range(len(samples)) for k in range(levels.shape[1])]
    noise = [
        torch.randn(samples.latents.shape[1:], generator=torch.Generator().manual_seed(samples.keys[i].seed_of(-3 - k)))
        for i, k in pairs
    ]
    index = torch.tensor([i for i, _ in pairs])
    return Noised(
        levels=levels.shape[1],
        table=samples.prompts,
        rows=samples.prompt_index[index],
        clean=samples.latents[index],
        noise=torch.stack(noise),
        t=levels.flatten(),
        advantages=advantages[index],
    )


def predicted(module: nn.Module, data: Noised) -> Tensor:
    """The module's velocity at all of `data`."""
    return module(
        hidden_states=data.noisy,
        timestep=data.t,
        encoder_hidden_states=data.table.prompt_embeds[data.rows],
        encoder_hidden_states_mask=data.table.prompt_embeds_mask[data.rows],
        img_shapes=[[(1, 4, 6)]] * len(data.rows),
        return_dict=False,
    )[0]


def matching_error(weighting: str, v: Tensor, data: Noised) -> Tensor:
    """[B K]: -lp, for the weightings uniform, t and adaptive."""
    if weighting == "adaptive":
        off = data.noisy - data.t.view(-1, 1, 1) * v - data.clean
        return (off**2).mean((1, 2)) / off.detach().abs().mean((1, 2)).clamp_min(1e-5)
    weight = data.t if weighting == "t" else 1.0
    return weight * ((v - (data.noise - data.clean)) ** 2).mean((1, 2))


def plain_loss(actor: DiffusionActorConfig, v: Tensor, others: dict[str, Tensor], data: Noised) -> Tensor:
    """Scalar; `others` are the velocities compared with: old, ema, ref, teacher."""
    settings, target = actor.diffusion_loss, data.noise - data.clean
    if settings.loss_mode == "distill_fm_mse":
        return ((v - others["teacher"]) ** 2).mean()
    if settings.loss_mode == "dpo":
        gain = ((others["ref"] - target) ** 2).mean((1, 2)) - ((v - target) ** 2).mean((1, 2))
        gain = gain.view(-1, 2, data.levels)
        inside = settings.dpo_beta / 2 * (gain[:, 0] - gain[:, 1])
        return torch.log1p(torch.exp(-inside)).mean()
    c = settings.adv_clip_max
    scaled = data.advantages.clamp(-c, c) / c
    if settings.loss_mode == "awm":
        log_ratio = matching_error(settings.awm_weighting, others["old"], data) - matching_error(
            settings.awm_weighting, v, data
        )
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
        return (
            -torch.minimum(scaled * ratio, scaled * clipped).mean()
            + settings.awm_ema_coef * ((v - others["ema"]) ** 2).mean()
        )
    assert settings.loss_mode == "diffusion_nft"
    b, t, total = settings.nft_beta, data.t.view(-1, 1, 1), torch.zeros(())
    for side, share in ((1, (1 + scaled) / 2), (-1, (1 - scaled) / 2)):
        mixed = others["old"] + side * b * (v - others["old"])
        off = data.noisy - t * mixed - data.clean
        weight = off.detach().abs().mean((1, 2), keepdim=True).clamp_min(1e-5)
        total = total + c * (share * (off**2 / weight).mean((1, 2)) / b).mean()
    return total


@dataclass
class PlainResult:
    """After each iteration: trained weights, the slower copy of them, and the mean gradient norm."""

    weights: list[dict[str, Tensor]]
    old: list[dict[str, Tensor]]
    norms: list[float]


def plain_iterations(
    config: DiffusionModelConfig,
    actor: DiffusionActorConfig,
    iterations: Sequence[Sequence[Noised]],
    decays: Sequence[float | None],
    epochs: int = 1,
    teacher: nn.Module | None = None,
) -> PlainResult:
    """Each iteration: velocities of all mini-batches first, then `epochs` passes of one optimiser step each, then the
    slower copy moves by its decay (None: not in this iteration)."""
    module, base = plain_module(config), QwenImage.load_transformer(config, torch.float32)
    slower = plain_module(config)
    parameters, optim = list(trainable(module).values()), actor.optim
    optimizer = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    sampled_by_slower = actor.diffusion_loss.loss_mode == "diffusion_nft"
    result = PlainResult([], [], [])
    for mini_batches, decay in zip(iterations, decays, strict=True):
        models = {"old": slower if sampled_by_slower else module, "ema": slower, "ref": base, "teacher": teacher}
        with torch.no_grad():
            others: list[dict[str, Any]] = [
                {name: predicted(model, data) for name, model in models.items() if model is not None}
                for data in mini_batches
            ]
        norms = []
        for data, compared in list(zip(mini_batches, others, strict=True)) * epochs:
            v = predicted(module, data)
            loss = plain_loss(actor, v, compared, data)
            if actor.use_kl_loss:
                loss = loss + actor.kl_loss_coef * ((v - compared["ref"]) ** 2).mean()
            loss = loss + actor.matching_loss_coef * ((v - (data.noise - data.clean)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, optim.clip_grad).item())
            optimizer.step()
        if decay is not None:
            with torch.no_grad():
                for behind, ahead in zip(trainable(slower).values(), parameters, strict=True):
                    behind.copy_(decay * behind + (1 - decay) * ahead)
        result.weights.append({name: p.detach().clone() for name, p in trainable(module).items()})
        result.old.append({name: p.detach().clone() for name, p in trainable(slower).items()})
        result.norms.append(sum(norms) / len(norms))
    return result


def with_pairs_noise(samples: FinishedLatents) -> FinishedLatents:
    """Rows 2i+1 under the keys of rows 2i, which a pair draws its noise by."""
    return replace(samples, keys=tuple(samples.keys[i - i % 2] for i in range(len(samples))))
