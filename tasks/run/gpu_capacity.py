# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits its GPUs: known before anything loads, and told with the settings that would change it."""

import logging
import os
from typing import Any

import torch

from models.cost.memory import GIB, Need
from models.cost.meta_pass import PassCost
from models.families.base import DiffusionModelConfig
from tasks.actors.cluster import require_gpus
from tasks.config.tree import TrainConfig
from tasks.run.capacity import ENCODERS, DoesNotFit, Needs, needs, samplers_on_a_gpu
from tasks.run.ways_out import beyond_memory, ways_out
from tasks.system.gpu_memory import InUse, gpu_memory_in_use

log = logging.getLogger(__name__)


def check_fits(config: TrainConfig, model_config: DiffusionModelConfig, cost: PassCost) -> Needs | None:
    """What a run on CUDA needs of a GPU; None where there is none to compare it with.

    Raises:
        DoesNotFit: its update or rollout needs more than a GPU has.
    """
    if config.trainer.device != "cuda":
        return None
    there = gpu_gib(config)
    if there is None:
        log.warning("the driver sees no GPU and trainer.gpu_memory_gib is null: whether the run fits is not checked")
        return None
    needed = needs(config, model_config, cost)
    lacking = shortfall(config, needed, there)
    if lacking is not None:
        raise DoesNotFit(lacking)
    return needed


def check_own_gpus(gpus: float) -> None:
    """A cluster that is started here, for want of a RAY_ADDRESS, has the GPUs that the driver sees.

    Raises:
        ClusterError: they are fewer than a run needs.
    """
    if "RAY_ADDRESS" not in os.environ:
        require_gpus(gpus, len(_visible_gpus()), "the Ray cluster that is started here would have")


def warn_of_others(config: TrainConfig, needed: Needs) -> None:
    """Warn of each GPU of the driver's on which other programs leave too little for the run.

    No error: they may end before the memory is needed, and Ray may choose another GPU. To be called when the run has
    its turn and none of its actors has begun, else its own are among the others.
    """
    there = gpu_gib(config)
    if there is None:
        return
    for gpu in gpu_memory_in_use([str(properties.uuid) for properties in _visible_gpus()]):
        told = beside_others(config, needed, gpu, there)
        if told is not None:
            log.warning(told)


def beside_others(config: TrainConfig, needed: Needs, gpu: InUse, there: float) -> str | None:
    """What does not fit beside other programs into a GPU of `there` GiB, and what would be right; None if all fits."""
    lacking = shortfall(config, needed, max(there - gpu.gib, 0.0))
    if lacking is None:
        return None
    return (
        f"other programs have {gpu.gib:.1f} GiB of GPU {gpu.number} in use, of {there:.1f}, and {lacking}; or end "
        "them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )


def shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    """What does not fit into a GPU of `there` GiB and which settings are left to change it; None where all fits."""
    return _encoding_shortfall(config, needs, there) or _stages_shortfall(
        config, needs.beside_what_stays(config), there
    )


def _encoding_shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    """Prompts are encoded beside the trainer's weights, rewards, and, where it is there too, the rollout's, awake."""
    beside = dict(needs.beside_what_stays(config).update.resident)
    if needs.rollout is not None and config.shares_gpus:
        beside["the rollout's weights"] = sum(needs.rollout.resident.values())
    together = Need(beside | {ENCODERS: needs.encoders}, {})
    if not needs.encoders or together.gib <= there:
        return None
    beyond = beyond_memory(config, needs, there, needs.encoders)
    return (
        f"encoding prompts needs {together.gib:.1f} GiB on the first GPU ({together.sentence()}) but there are "
        f"{there:.1f}: set data.text_encoder.placement to separate"
        + (f"; its device cpu {beyond}" if beyond else ", or its device to cpu")
    )


def _stages_shortfall(config: TrainConfig, needs: Needs, there: float) -> str | None:
    update, rollout = needs.update, needs.rollout
    if update.gib > there:
        return (
            f"the update needs {update.gib:.1f} GiB on each GPU ({update.sentence()}) but there are {there:.1f}: "
            f"{ways_out(config, needs, there)}"
        )
    if rollout is None:
        return None
    settings = config.actor_rollout_ref.rollout
    if config.shares_gpus and settings.enable_sleep_mode is False and update.gib + rollout.gib > there:
        asleep = config.settled({"actor_rollout_ref": {"rollout": {"enable_sleep_mode": True}}})
        beyond = beyond_memory(asleep, needs, there)
        return (
            f"update and rollout need {update.gib + rollout.gib:.1f} GiB together on each GPU ({update.sentence()}; "
            f"{rollout.sentence()}) but there are {there:.1f}, and rollout.enable_sleep_mode is false: "
            + (f"true {beyond}; set rollout.placement to separate" if beyond else "set it to true")
        )
    beside, why = 0.0, ""
    if config.shares_gpus:
        beside, why = sum(update.resident.values()) / GIB, " beside the trainer's weights"
    needed = beside + samplers_on_a_gpu(config) * rollout.gib
    if needed <= there:
        return None
    return (
        f"the rollout needs {needed:.1f} GiB on each GPU{why} ({rollout.sentence()} for each worker) but there are "
        f"{there:.1f}: lower rollout.micro_batch_size, now {settings.micro_batch_size}, "
        + ("set rollout.placement to separate" if config.shares_gpus else "or raise rollout.num_gpus_per_actor")
    )


def gpu_gib(config: TrainConfig) -> float | None:
    """All of a GPU's memory: what others hold of it now, they may have given back when this run's turn comes."""
    if config.trainer.gpu_memory_gib is not None:
        return config.trainer.gpu_memory_gib
    return min((properties.total_memory / GIB for properties in _visible_gpus()), default=None)


def _visible_gpus() -> list[Any]:
    """torch's properties of those that the driver sees."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
