# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its machine's own memory: known before anything loads."""

import os

from models.cost.memory import GIB, Need
from tasks.config.tree import TrainConfig
from tasks.run.capacity import ENCODERS, Needs, checkpoint_bytes, encoder_bytes
from tasks.system.host_memory import all_bytes

CHECKPOINT_COPY, ASLEEP = "the checkpoint's copy", "the rollout's weights, asleep"
UPDATE, ROLLOUT = "the update", "the rollout"


def beyond_host(config: TrainConfig, kept: Need) -> str | None:
    """What a run would keep of its first machine's memory, which has no room for it; None where it has, or is not
    known."""
    there = host_gib(config)
    if there is None or kept.gib <= there:
        return None
    return f"would keep {kept.gib:.1f} GiB in the machine's memory, which has {there:.1f}"


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
