# SPDX-License-Identifier: Apache-2.0
"""What a rank's or a rollout worker's GPU must hold, before anything is loaded.

Only what is sure to be needed is counted: no CUDA context, no fragmentation, no buffers of NCCL. So a run that is said
not to fit does not, and one that just fits on paper may still run out.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelConfig

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

GIB = 2**30
MASTER_BYTES = 4
"""Trained weights, their gradients and AdamW's moments are fp32."""
ADAMW_MOMENTS = 2

COMPILED = 0.75
"""Share of the activations that compiled blocks keep: 46.5 of 62.1 GiB, Stable Diffusion 3.5 medium on an H200."""


KEPT_BY_A_SAMPLER = 5.0
"""A worker's process holds so many times the activations that are counted: 25.1 GiB for 5.5 of Stable Diffusion 3.5
medium, batch 16, on an H200. Its allocator keeps blocks for later, and convolutions take workspaces."""


@dataclass(frozen=True)
class Need:
    """Bytes by what they are for.

    Attributes:
        resident: what stays from one stage to the next.
        passing: what only this stage holds.
    """

    resident: dict[str, float]
    passing: dict[str, float]

    @property
    def gib(self) -> float:
        """All of it."""
        return (sum(self.resident.values()) + sum(self.passing.values())) / GIB

    def with_kept(self, times: float) -> "Need":
        """The same, where a process keeps so many times what passes."""
        return replace(self, passing={name: times * size for name, size in self.passing.items()})

    def with_resident(self, name: str, size: float) -> "Need":
        """The same, where something else stays there, too."""
        return replace(self, resident=self.resident | {name: size})

    def sentence(self) -> str:
        """Its parts, the largest first."""
        parts = sorted((self.resident | self.passing).items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size / GIB >= 0.05)


def update_need(
    cost: PassCost,
    model_config: DiffusionModelConfig,
    actor_config: "DiffusionActorConfig",
    *,
    world_size: int,
    copies: int = 0,
    frozen_models: int = 0,
) -> Need:
    """One rank's update under FSDP2.

    Args:
        cost: of a micro-batch, in the format that the trainer computes in, with or without gradient checkpointing.
        world_size: ranks that share the weights.
        copies: further sets of the trained weights: moving average, old policy.
        frozen_models: whole models besides the policy: a reference that is no switched-off LoRA, a teacher.
    """
    settings, stored = actor_config.fsdp_config, _bytes(model_config.model.dtype)
    computed = _bytes(settings.param_dtype or model_config.model.dtype)
    # In float8 most of them lie whole on every rank, in half of what is counted here.
    float8 = model_config.model.frozen_dtype is not None
    whole = model_config.trains_lora and (float8 or not settings.shard_frozen)
    on_host = settings.param_offload  # FSDP2 then keeps shards, their gradients and what is made of them there
    trained = 0.0 if on_host else cost.trained * MASTER_BYTES / world_size
    frozen = 1.0 if whole else 0.0 if on_host else 1 / world_size
    resident = {
        "weights": cost.frozen * stored * frozen + trained,
        "AdamW": 0.0 if settings.optimizer_offload else ADAMW_MOMENTS * trained,
        "copies of the trained weights": copies * trained,
        "reference and teacher": 0.0 if on_host else frozen_models * cost.parameters * stored / world_size,
    }
    activations = cost.training_bytes * (COMPILED if model_config.model.compile else 1)
    # Between reductions FSDP2 adds up whole gradients, whatever the number of ranks.
    passing = {
        "gradients": cost.trained * _bytes(settings.reduce_dtype),
        "gathered weights": 0.0
        if whole
        else _gathered(cost, world_size, settings.reshard_after_forward, on_host) * computed,
        f"activations of {cost.samples} samples": activations / settings.ulysses_sequence_parallel_size,
    }
    return Need(resident, passing)


def rollout_need(
    cost: PassCost, model_config: DiffusionModelConfig, vae: tuple[int, int], samples: int, processes: int = 1
) -> Need:
    """One worker's process that samples and decodes so many at a time, by either engine.

    Args:
        cost: of some samples.
        vae: what `decoding_bytes` gives for so many.
        processes: that divide the transformer among them; what each of them holds whole of it is not counted.
    """
    lora = cost.trained if model_config.trains_lora else 0
    weights, decoding = vae
    return Need(
        {"weights": (cost.parameters + lora) * _bytes(model_config.model.dtype) / processes, "VAE": weights},
        {f"activations of {samples} samples": max(cost.sampling_bytes / cost.samples * samples / processes, decoding)},
    )


def _gathered(cost: PassCost, world_size: int, reshard: bool, on_host: bool) -> float:
    """Weights that stand whole beside their shards: the present block, the next one, and what is in no block."""
    largest, blocks = cost.blocks
    if world_size == 1 and cost.frozen and not on_host:
        return 0.0  # FSDP2 computes with the only shard itself; that LoRA's are cast does not count
    outside = cost.frozen + cost.trained - blocks
    return outside + (2 * largest if reshard else blocks)


def _bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
