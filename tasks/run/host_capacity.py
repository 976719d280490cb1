# SPDX-License-Identifier: Apache-2.0
"""Whether what a run keeps in its machine's own memory has room there: known before anything loads.

Where there is none left Linux ends a process by SIGKILL, of its own choice: the run would die at its first checkpoint.
"""

import logging
import os

from models.cost.memory import GIB, OFFLOADED, OFFLOADED_MOMENTS, Need
from tasks.config.tree import TrainConfig
from tasks.run.capacity import ENCODERS, DoesNotFit, Needs, checkpoint_bytes, encoder_bytes
from tasks.system.host_memory import all_bytes, free_bytes

log = logging.getLogger(__name__)
SMALL = 0.05
"""Share of what is lacking: a setting that gives back less is no way out."""
CHECKPOINT_COPY, ASLEEP = "the checkpoint's copy", "the rollout's weights, asleep"
UPDATE, ROLLOUT = "the update", "the rollout"


def check_host(config: TrainConfig, needs: Needs) -> Need | None:
    """What the run keeps of its first machine's memory; None where that machine's memory is not known.

    Args:
        needs: of a rank and of a rollout worker.

    Raises:
        DoesNotFit: it is more than the machine, or this process's container, has.
    """
    there = host_gib(config)
    if there is None:
        return None
    needed = host_need(config, needs)
    lacking = host_shortfall(config, needed, there)
    if lacking is not None:
        raise DoesNotFit(f"the run {lacking}")
    return needed


def beyond_host(config: TrainConfig, kept: Need) -> str | None:
    """What a run would keep of its first machine's memory, which has no room for it; None where it has, or is not
    known."""
    there = host_gib(config)
    if there is None or kept.gib <= there:
        return None
    return f"would keep {kept.gib:.1f} GiB in the machine's memory, which has {there:.1f}"


def warn_of_little_memory(config: TrainConfig, needed: Need) -> None:
    """Warn where other programs leave too little of this machine's memory. To be called before the run's actors begin,
    whose own it would be afterwards."""
    lacking = host_shortfall(config, needed, free_bytes() / GIB)
    if lacking is not None:
        log.warning("other programs use memory of this machine, and the run %s; or end them", lacking)


def host_gib(config: TrainConfig) -> float | None:
    """All memory of the run's first machine; None where the run joins a cluster and its config does not say."""
    if config.trainer.host_memory_gib is not None:
        return config.trainer.host_memory_gib
    return None if os.environ.get("RAY_ADDRESS") else all_bytes() / GIB


def host_need(config: TrainConfig, needed: Needs) -> Need:
    """What the run keeps of its first machine's memory from its first checkpoint on.

    Not counted, as it is not known: rewards, samples on their way, Python and its libraries in every process.

    Args:
        needed: of a rank and of a rollout worker.
    """
    trainer, encoder = config.trainer, config.data.encoders
    ranks = trainer.n_gpus_per_node
    kept = {name: ranks * size for name, size in needed.update.on_host.items()}
    if trainer.async_checkpoint:
        kept[CHECKPOINT_COPY] = checkpoint_bytes(config, needed.model.cost) * ranks / trainer.world_size
    kept |= _of_models(config, needed)
    if encoder is not None and (encoder.sleeps or encoder.device == "cpu") and trainer.nnodes == 1:
        kept[ENCODERS] = encoder_bytes(config)
    return Need(kept, {})


def _of_models(config: TrainConfig, needed: Needs) -> dict[str, float]:
    """On the CPU update and rollout; else what of the rollout goes to the host as it sleeps."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ranks = trainer.n_gpus_per_node
    if trainer.device == "cpu":
        workers = -(-rollout.num_actors // trainer.nnodes)
        sampling = 0.0 if needed.rollout is None else workers * needed.rollout.gib * GIB
        return {UPDATE: ranks * needed.update.gib * GIB, ROLLOUT: sampling}
    if needed.rollout is None or not rollout.sleeps:
        return {}
    weights = dict(needed.rollout.resident)
    if rollout.name == "diffusers" and not config.actor_rollout_ref.model.trains_lora:
        del weights["weights"]  # stay behind: a sync brings the new ones as the rollout wakes
    return {ASLEEP: ranks * sum(weights.values())}


def host_shortfall(config: TrainConfig, needed: Need, there: float) -> str | None:
    """What has no room in `there` GiB of a machine and which settings are left to change it; None where all has."""
    if needed.gib <= there:
        return None
    return (
        f"keeps {needed.gib:.1f} GiB in its machine's memory ({needed.sentence()}) but there are {there:.1f}: "
        f"{_advice(config, needed, there)}"
    )


def _advice(config: TrainConfig, needed: Need, there: float) -> str:
    """The settings that are left to make it less, the one that gives most back first."""
    settings, kept = config.actor_rollout_ref, needed.resident
    ways = {
        CHECKPOINT_COPY: "set trainer.async_checkpoint to false",
        OFFLOADED: "set actor.fsdp_config.param_offload to false",
        ASLEEP: "set rollout.enable_sleep_mode to false",
        UPDATE: f"lower actor.ppo_micro_batch_size_per_gpu, now {settings.actor.micro_batch}",
        ROLLOUT: f"lower rollout.micro_batch_size, now {settings.rollout.micro_batch_size}",
    }
    if settings.actor.fsdp_config.optimizer_offload:
        ways[OFFLOADED_MOMENTS] = "set actor.fsdp_config.optimizer_offload to false"
    if config.data.encoders is not None and config.data.encoders.device == "cpu" and config.trainer.device == "cuda":
        ways[ENCODERS] = "set data.text_encoder.device to cuda"
    largest_first = sorted(ways, key=lambda name: -kept.get(name, 0.0))
    least = SMALL * (needed.gib - there) * GIB
    chosen = [ways[name] for name in largest_first if kept.get(name, 0.0) > least]
    if not settings.model.trains_lora:
        chosen.append("train LoRA with model.lora_rank")
    chosen.append(f"raise trainer.nnodes, now {config.trainer.nnodes}")
    return ", or ".join(chosen)
