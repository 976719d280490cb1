# SPDX-License-Identifier: Apache-2.0
"""What a trainer rank keeps in its machine's memory, beside a GPU, before anything is loaded.

Only what is sure to be needed is counted, as of a GPU: no Python, no libraries, none of the room that torch adds to a
piece of locked memory.
"""

from typing import TYPE_CHECKING

import torch

from models.cost.memory import ADAMW_MOMENTS, MASTER_BYTES
from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelConfig

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

OFFLOADED, MOMENTS, CHECKPOINT_COPY = "offloaded weights", "offloaded AdamW", "the checkpoint's copy"


def saved_bytes(cost: PassCost, copies: int) -> int:
    """The bytes of all ranks' state, as a checkpoint has it: the trained weights, AdamW's moments, and `copies` further
    sets of the weights, all in fp32."""
    return cost.trained * MASTER_BYTES * (1 + ADAMW_MOMENTS + copies)


def rank_on_host(
    cost: PassCost,
    model_config: DiffusionModelConfig,
    actor_config: "DiffusionActorConfig",
    *,
    world_size: int,
    copies: int = 0,
    frozen_models: int = 0,
) -> dict[str, float]:
    """Bytes of one rank's shards that FSDP2 keeps on the host, by what they are; they are on no GPU.

    Args:
        world_size, copies, frozen_models: as of `models.cost.memory.update_need`.
    """
    settings, dtype = actor_config.fsdp_config, model_config.model.dtype
    trained = cost.trained * MASTER_BYTES / world_size
    kept = dict[str, float]()
    if settings.param_offload:
        whole = model_config.trains_lora and settings.keeps_frozen_whole(world_size, dtype)  # they stay on each GPU
        frozen = cost.frozen - cost.float8[0] + frozen_models * cost.parameters
        gradients_and_copies = (1 + copies) * trained
        shards = 0.0 if whole else frozen * getattr(torch, dtype).itemsize / world_size
        kept[OFFLOADED] = trained + gradients_and_copies + shards
    if settings.param_offload or settings.optimizer_offload:
        kept[MOMENTS] = ADAMW_MOMENTS * trained
    return kept
