# SPDX-License-Identifier: Apache-2.0
"""From finished samples to what a loss of the forward process trains on."""

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.algorithms.losses import EMA_VELOCITY, OLD_VELOCITY, REF_VELOCITY, VELOCITIES
from models.algorithms.old_policy import is_copied
from models.samples.trajectories import FinishedLatents
from models.training.micro_batches import ActorBatch, micro_batches_of
from models.training.noised import NoisedLatents, advantages_of, noise_latents
from models.training.policy import PolicyForward

if TYPE_CHECKING:
    from models.config.actor import ForwardProcessConfig


KEPT_ON_DEVICE = 1 << 26
"""Bytes of noise up to which a batch is made on the GPU and stays there, from the forward passes before the first
optimiser step to its own. To copy it on a CPU, and the way there and back, are among those things that the GPU of a
small model waits for."""


def noised_batch(
    engine: PolicyForward, batch: ActorBatch[FinishedLatents], config: "ForwardProcessConfig", size: int
) -> ActorBatch[NoisedLatents]:
    """What the loss chooses of a batch's samples, noised, with the velocities that it compares with.

    Every rank makes this call, and every rank gets as many pieces: one that has fewer samples than others gets idle
    ones, which are computed (the collectives need all ranks) and weighted 0. Where the model is compiled, so are the
    rows that fill a piece up to one of `piece_sizes`: code is compiled anew for each size that was not there before.

    Args:
        batch: finished samples with their advantages.
        config: noise levels.
        size: most samples in a piece, each with its `levels_per_pass` rows; pairs stay together.
    """
    unit = 2 if engine.loss_fn.paired else 1
    size = max(size // unit * unit, unit)
    finished = FinishedLatents.join([samples for samples, _ in batch.parts])
    advantages = torch.cat([row for _, row in batch.parts])
    chosen = engine.loss_fn.prepare_actor_batch(finished, advantages, engine.actor_config)
    idle = _weightless(chosen, finished, unit)
    cuts = torch.arange(len(chosen)).split(size) if len(chosen) else ()
    parts = [chosen.rows(index) for index in cuts]
    most = _over_ranks(len(parts), dist.ReduceOp.MAX, engine.device)
    sharing = engine.actor_config.fsdp_config.ulysses_sequence_parallel_size  # ranks that have the same samples
    counted = _over_ranks(len(chosen), dist.ReduceOp.SUM, engine.device) // sharing
    parts += [idle] * (most - len(parts))
    if engine.model_config.model.compile:
        groups = {key.prompt_uid for key in finished.keys}
        sizes = piece_sizes(2 * len(groups) if engine.loss_fn.paired else len(finished), size, unit)
        parts = [_filled(part, min(found for found in sizes if found >= len(part)), unit) for part in parts]
    together, schedule = engine.actor_config.levels_per_pass, engine.scheduler.sigmas
    rows = [advantages_of(part).repeat(together) for part in parts]
    levels = config.levels_per_sample(len(schedule) - 1)
    if levels * sum(part.latents.nbytes for part in parts) <= KEPT_ON_DEVICE:
        parts = [part.to(engine.device, waiting=False) for part in parts]
    pieces = [noise_latents(part, schedule, config, engine.loss_fn.paired).together(together) for part in parts]
    pieces = _compared(engine, pieces, rows, config)
    return ActorBatch(list(zip(pieces, rows, strict=True)), counted * together)


def _weightless(chosen: FinishedLatents, finished: FinishedLatents, count: int) -> FinishedLatents:
    """So many samples without an advantage and with finite velocities: 0 times one that is not finite would be NaN.

    Those that are chosen have them. Where none is, it may be by latents or text that are not finite: both are zeroed.
    """
    some = chosen if len(chosen) else finished
    idle = replace(some.rows(torch.arange(count) % len(some)), advantages=torch.full((count,), torch.nan))
    if len(chosen):
        return idle
    return replace(idle, latents=torch.zeros_like(idle.latents), prompts=idle.prompts.zeroed())


def piece_sizes(whole: int, size: int, unit: int) -> set[int]:
    """How many samples a compiled piece may have: what a batch of which none is left out is cut into, and the half, the
    quarter and the eighth of `size`.

    Args:
        whole: samples of such a batch.
        size: most in a piece, a multiple of `unit`.
        unit: of samples that stay together.
    """
    return {whole % size, *(size // part // unit * unit for part in (1, 2, 4, 8))} - {0}


def _filled(part: FinishedLatents, count: int, unit: int) -> FinishedLatents:
    """`part`, and its first samples again without an advantage until they are `count`."""
    again = torch.arange(count - len(part)) % unit
    rows = part.rows(torch.cat([torch.arange(len(part)), again]))
    return replace(rows, advantages=torch.cat([advantages_of(part), torch.full(again.shape, torch.nan)]))


def _compared(
    engine: PolicyForward, pieces: list[NoisedLatents], rows: list[Tensor], config: "ForwardProcessConfig"
) -> list[NoisedLatents]:
    """The pieces with the velocities that the loss declares, before an iteration's first optimiser step."""
    wanted = {*engine.loss_fn.required_data_keys} | ({REF_VELOCITY} if engine.actor_config.use_kl_loss else set())
    for key in VELOCITIES:
        if key in wanted:
            # An old policy that is a copy is the policy still: to put it in its place would change no weight, and have
            # FSDP gather them all again.
            there = key in (OLD_VELOCITY, EMA_VELOCITY) and is_copied(config)
            with nullcontext() if there else engine.holding_weights_of(key):
                found: list[dict[str, Any]] = [
                    {key: _velocities(engine, key, piece, row)} for piece, row in zip(pieces, rows, strict=True)
                ]
            pieces = [replace(piece, **velocity) for piece, velocity in zip(pieces, found, strict=True)]
    return pieces


def _velocities(engine: PolicyForward, key: str, piece: NoisedLatents, advantages: Tensor) -> Tensor:
    """[B, K, ...] where the piece is; `advantages` [B] are on the CPU."""
    of_level = []
    for micro_batch, _, _ in micro_batches_of(piece.to(engine.device), advantages, 1, engine.device):
        of_level.append(engine.predicted(key, micro_batch))
    return torch.stack(of_level, 1).to(piece.latents.device)  # at most one wait for the GPU, not one a level


def _over_ranks(number: int, operation: Any, device: str) -> int:
    if dist.get_world_size() == 1:  # to ask the GPU would be to wait for all that it computes
        return number
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, operation)
    return int(tensor)
