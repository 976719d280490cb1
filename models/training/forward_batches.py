# SPDX-License-Identifier: Apache-2.0
"""From finished samples to what a loss of the forward process trains on."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from models.algorithms.losses import REF_VELOCITY, VELOCITIES
from models.samples.trajectories import FinishedLatents
from models.training.micro_batches import ActorBatch, PreparedBatch, micro_batch_of
from models.training.noised import NoisedLatents, noise_latents
from models.training.policy import PolicyForward

if TYPE_CHECKING:
    from models.config.actor import ForwardProcessConfig


def noised_batch(engine: PolicyForward, batch: ActorBatch, config: "ForwardProcessConfig", size: int) -> PreparedBatch:
    """What the loss chooses of a batch's samples, noised, with the velocities that it compares with.

    Every rank makes this call, and every rank gets as many pieces: one that has fewer samples than others gets idle
    ones, which are computed (the collectives need all ranks) and weighted 0.

    Args:
        batch: finished samples with their advantages.
        config: noise levels.
        size: most samples in a piece, each with its `levels_per_pass` rows; pairs stay together.
    """
    unit = 2 if engine.loss_fn.paired else 1
    finished = FinishedLatents.join([cast(FinishedLatents, samples) for samples, _ in batch.parts])
    advantages = torch.cat([row for _, row in batch.parts])
    chosen = engine.loss_fn.prepare_actor_batch(finished, advantages, engine.actor_config)
    idle = finished.scored(torch.arange(unit) % len(finished), torch.full_like(advantages, torch.nan))
    cuts = torch.arange(len(chosen)).split(max(size // unit * unit, unit)) if len(chosen) else ()
    parts = [chosen.rows(index) for index in cuts]
    most = _over_ranks(len(parts), dist.ReduceOp.MAX, engine.device)
    sharing = engine.actor_config.fsdp_config.ulysses_sequence_parallel_size  # ranks that have the same samples
    counted = _over_ranks(len(chosen), dist.ReduceOp.SUM, engine.device) // sharing
    parts += [idle] * (most - len(parts))
    together = engine.actor_config.levels_per_pass
    pieces = [noise_latents(part, engine.scheduler.sigmas, config, engine.loss_fn.paired) for part in parts]
    pieces = _compared(engine, [piece.together(together) for piece in pieces])
    return PreparedBatch([(piece, piece.advantages) for piece in pieces], counted * together)


def _compared(engine: PolicyForward, pieces: list[NoisedLatents]) -> list[NoisedLatents]:
    """The pieces with the velocities that the loss declares."""
    wanted = {*engine.loss_fn.required_data_keys} | ({REF_VELOCITY} if engine.actor_config.use_kl_loss else set())
    for key in VELOCITIES:
        if key in wanted:
            with engine.holding_weights_of(key):
                found: list[dict[str, Any]] = [{key: _velocities(engine, key, piece)} for piece in pieces]
            pieces = [replace(piece, **velocity) for piece, velocity in zip(pieces, found, strict=True)]
    return pieces


def _velocities(engine: PolicyForward, key: str, piece: NoisedLatents) -> Tensor:
    """[B, K, ...] on the CPU."""
    on_device, of_level = piece.to(engine.device), []
    for level in range(piece.steps):
        micro_batch, _ = micro_batch_of(on_device.step(level), piece.advantages, engine.device)
        of_level.append(engine.predicted(key, micro_batch))
    return torch.stack(of_level, 1).cpu()  # one wait for the GPU, not one a level


def _over_ranks(number: int, operation: Any, device: str) -> int:
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, operation)
    return int(tensor)
