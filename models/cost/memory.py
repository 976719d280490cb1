# SPDX-License-Identifier: Apache-2.0
"""What a rank's or a rollout worker's GPU must hold, before anything is loaded.

Only what is sure to be needed is counted: no CUDA context, no fragmentation, no buffers of NCCL. So a run that is said
not to fit does not, and one that just fits on paper may still run out.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelConfig
from models.families.latents import component_config
from models.runtime.compiled import COMPILED_DECODER

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

GIB = 2**30
MASTER_BYTES = 4
"""Trained weights, their gradients and AdamW's moments are fp32."""
ADAMW_MOMENTS = 2
OFFLOADED, OFFLOADED_MOMENTS = "offloaded weights", "offloaded AdamW"
FLOAT8_BYTES, SCALE_BYTES = 1, 4
"""Of a number in float8, and of the scale that each row of its matrix has."""

COMPILED = 0.75
"""Share of the activations that compiled blocks keep: 46.5 of 62.1 GiB, Stable Diffusion 3.5 medium on an H200."""


KEPT_BY_A_SAMPLER = 5.0
"""A worker's process holds so many times the activations that are counted: 25.1 GiB for 5.5 of Stable Diffusion 3.5
medium, batch 16, eager, on an H200. Its allocator keeps blocks for later, and convolutions take workspaces."""

KEPT_WHERE_COMPILED = {COMPILED_DECODER: 2.5, "AutoencoderKLQwenImage": 2.0}
"""By the VAE's class, where `model.compile` is on and the engine in-process: 14.6 GiB for 8.5 of Stable Diffusion 3.5
medium, batch 24, on an H100, and 16.3 where weights come by NCCL; 12.0 for 7.0 of Qwen-Image, batch 8, on H200s."""


@dataclass(frozen=True)
class Need:
    """Bytes by what they are for.

    Attributes:
        resident: what stays from one stage to the next.
        passing: what only this stage holds.
        on_host: what stays in the machine's memory in place of the GPU's.
    """

    resident: dict[str, float]
    passing: dict[str, float]
    on_host: dict[str, float] = field(default_factory=dict)

    @property
    def gib(self) -> float:
        """All of it but what is on the host."""
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
    single_pass: bool = False,
) -> Need:
    """One rank's update under FSDP2, by `fsdp2` or VeOmni; by another engine as by `fsdp2`.

    Args:
        cost: of a micro-batch, in the format that the trainer computes in, with or without gradient checkpointing.
        world_size: ranks that share the weights.
        copies: further sets of the trained weights: moving average, old policy.
        frozen_models: whole models besides the policy: a reference that is no switched-off LoRA, a teacher.
        single_pass: a rank makes one forward and backward pass in an optimiser step, and not several.
    """
    settings, dtype = actor_config.fsdp_config, model_config.model.dtype
    computed, reshards = settings.param_dtype or dtype, settings.reshard_after_forward
    held = "float32" if actor_config.shards_all_in_fp32 else dtype
    # What is frozen, on the device of every rank.
    whole = model_config.trains_lora and actor_config.keeps_frozen_whole(world_size, dtype)
    on_host = settings.param_offload  # FSDP2 then keeps shards, their gradients and what is made of them there
    shard = cost.trained * MASTER_BYTES / world_size
    trained = 0.0 if on_host else shard
    share = 1.0 if whole else 0.0 if on_host else 1 / world_size
    # FSDP2 computes with copies of what it has sharded; that LoRA's own weights are cast does not count.
    copy = 0 if whole else _bytes(computed)
    resident = {
        "weights": _frozen_bytes(cost, held, share) + trained,
        "AdamW": 0.0 if settings.optimizer_offload else ADAMW_MOMENTS * trained,
        "copies of the trained weights": copies * trained,
        "reference and teacher": frozen_models * cost.parameters * _bytes(held) * share,
        # The policy's are let go when its weights have changed, which these never do.
        "gathered reference and teacher": 0.0 if reshards else float(frozen_models * cost.parameters * copy),
    }
    part = (COMPILED if model_config.model.compile else 1) / settings.ulysses_sequence_parallel_size
    activations = cost.training_bytes * part
    # Between reductions FSDP2 adds up whole gradients, whatever the number of ranks.
    gradients = float(cost.trained * _bytes(settings.reduce_dtype))
    if actor_config.shares_in_one_group(world_size, dtype, model_config.trains_lora):
        # They are divided once the activations are gone, by a copy.
        gradients += max(0.0, gradients + trained - activations)
    elif single_pass:
        gradients = _reduced_by_block(cost, settings.reduce_dtype, shards=trained, activations=activations)
    elif settings.shard_gradients:  # the shards of earlier passes stay beside all activations
        gradients = trained + _reduced_by_block(cost, settings.reduce_dtype, shards=0.0, activations=activations)
    learning = {
        "gradients": gradients,
        "gathered weights": _gathered(cost, reshards) * copy,
        f"activations of {cost.samples} samples": activations,
    }
    comparing = {
        "gathered reference or teacher": _gathered_frozen(cost) * copy,
        f"activations of {cost.samples} samples": cost.sampling_bytes * part,
    }
    stepping = {"gradients": trained}
    if settings.optimizer_offload and not on_host:
        stepping["AdamW's moments, for its step"] = ADAMW_MOMENTS * trained
    # The one pass comes before the other, which finds its blocks let go.
    phases = [learning, stepping, *([comparing] if frozen_models and reshards else [])]
    away = dict[str, float]()
    if on_host:
        frozen = 0.0 if whole else (cost.frozen - cost.float8[0] + frozen_models * cost.parameters) * _bytes(held)
        away[OFFLOADED] = (2 + copies) * shard + frozen / world_size  # trained, their gradients, further sets
    if on_host or settings.optimizer_offload:
        away[OFFLOADED_MOMENTS] = ADAMW_MOMENTS * shard
    return Need(resident, max(phases, key=lambda phase: sum(phase.values())), away)


def rollout_need(
    cost: PassCost, model_config: DiffusionModelConfig, vae: tuple[int, int], samples: int, processes: int = 1
) -> Need:
    """One worker's process that samples and decodes so many at a time, by either engine.

    Args:
        cost: of some samples.
        vae: what `decoding_bytes` gives for so many.
        processes: that divide the transformer among them; what each of them holds whole of it is not counted.
    """
    lora, dtype = cost.trained if model_config.trains_lora else 0, model_config.model.dtype
    rounded, rows = cost.float8
    transformer = (cost.parameters + lora - rounded) * _bytes(dtype) + rounded * FLOAT8_BYTES + rows * SCALE_BYTES
    weights, decoding = vae
    return Need(
        {"weights": transformer / processes, "VAE": weights},
        {f"activations of {samples} samples": max(cost.sampling_bytes / cost.samples * samples / processes, decoding)},
    )


def kept_by_a_sampler(model_config: DiffusionModelConfig, engine: str) -> float:
    """So many times the activations that are counted, a worker of `rollout.name` `engine` holds."""
    vae = component_config(model_config.path, "vae")["_class_name"]
    is_compiled = engine == "diffusers" and model_config.model.compile
    return KEPT_WHERE_COMPILED.get(vae, KEPT_BY_A_SAMPLER) if is_compiled else KEPT_BY_A_SAMPLER


def _frozen_bytes(cost: PassCost, dtype: str, share: float) -> float:
    """Of frozen weights in `dtype`, of which a rank's GPU has this share, but of what is in float8 all: it and its
    scales lie whole on each."""
    rounded, rows = cost.float8
    return (cost.frozen - rounded) * _bytes(dtype) * share + rounded * FLOAT8_BYTES + rows * SCALE_BYTES


def _reduced_by_block(cost: PassCost, dtype: str, shards: float, activations: float) -> float:
    """Bytes of gradients in a step of one pass, as far as they come on top of the activations.

    FSDP2 divides a block's gradients among the ranks once its backward is done. Whole are those of the present block,
    beside what is in no block while the activations are all there, or beside the other blocks' shards when they are
    gone: the backward puts the ones in the place of the others, so the larger of the two is sure.

    Args:
        dtype: of the gradients that are reduced.
        shards: bytes of all shards of the gradients.
        activations: bytes that are counted beside.
    """
    largest, blocks = cost.trained_blocks
    outside = (cost.trained - blocks) * _bytes(dtype)
    others = shards * (1 - largest / cost.trained) if cost.trained else 0.0
    return largest * _bytes(dtype) + max(outside, others - activations)


def _gathered(cost: PassCost, reshard: bool) -> float:
    """Weights that stand whole beside their shards: the present block, the next one, and what is in no block."""
    largest, blocks = cost.blocks
    outside = cost.frozen - cost.float8[0] + cost.trained - blocks
    return outside + (2 * largest if reshard else blocks)


def _gathered_frozen(cost: PassCost) -> float:
    """The same of a frozen model whose blocks are let go after their forward."""
    largest, blocks = cost.frozen_blocks
    return cost.parameters - blocks + 2 * largest


def _bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
