# SPDX-License-Identifier: Apache-2.0
"""Whether what a run keeps in its machine's own memory has room there, told with what would give it room.

Where there is none left Linux ends a process by SIGKILL, of its own choice: the run would die at its first checkpoint.
What is advised was counted again, also on the GPU, to which it may go back.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from models.cost.memory import GIB
from tasks.config.tree import TrainConfig
from tasks.run.capacity import DoesNotFit, Model, Needs, colocated_encoders, update_of_rank
from tasks.run.gpu_capacity import gpu_gib, shortfall
from tasks.run.host_capacity import host_gib, host_need
from tasks.run.ways_out import with_lora
from tasks.system.host_memory import free_bytes

log = logging.getLogger(__name__)
MOST_MACHINES = 512
"""Up to which a number is looked for."""


def check_host(config: TrainConfig, needed: Needs) -> Needs | None:
    """What has room on the run's first machine; None where that machine's memory is not known.

    Args:
        needed: of a rank and of a rollout worker.

    Raises:
        DoesNotFit: the run keeps more there than the machine, or this process's container, has.
    """
    there = host_gib(config)
    if there is None:
        return None
    lacking = host_shortfall(config, needed, there)
    if lacking is not None:
        raise DoesNotFit(f"the run {lacking}")
    return needed


def warn_of_little_memory(config: TrainConfig, needed: Needs) -> None:
    """Warn where other programs leave too little of this machine's memory. To be called before the run's actors begin,
    whose own it would be afterwards."""
    lacking = host_shortfall(config, needed, free_bytes() / GIB)
    if lacking is not None:
        log.warning("other programs use memory of this machine, and the run %s; or end them", lacking)


def host_shortfall(config: TrainConfig, needed: Needs, there: float) -> str | None:
    """What has no room in `there` GiB of a machine and what would change it; None where all has."""
    kept = host_need(config, needed)
    if kept.gib <= there:
        return None
    ways = ", or ".join(_Machine(config, needed, there).ways_out())
    return (
        f"keeps {kept.gib:.1f} GiB in its machine's memory ({kept.sentence()}) but there are {there:.1f}: "
        f"{ways or 'neither settings nor more machines make it fit: take one with more, or a smaller model'}"
    )


class _Machine:
    """One with so many GiB of memory, for which one config after another is counted."""

    def __init__(self, config: TrainConfig, needed: Needs, there: float):
        self.config, self.needed, self.there = config, needed, there
        self.gpu = gpu_gib(config) if config.trainer.device == "cuda" else None

    def ways_out(self) -> Iterator[str]:
        """Each of which suffices by itself."""
        yield from self.settings()
        lora = {"actor_rollout_ref": {"model": {"lora_rank": 1}}}
        if not self.needed.model.config.trains_lora and self._suffice([lora], with_lora(self.needed.model)):
            yield "train LoRA with model.lora_rank"
        more = range(self.config.trainer.nnodes + 1, MOST_MACHINES + 1)
        place = bisect_left(more, True, key=lambda machines: self._has_room(*self._on(machines)))
        if place < len(more):
            yield f"train on {more[place]} machines or more (trainer.nnodes, now {self.config.trainer.nnodes})"

    def settings(self) -> list[str]:
        """The fewest settings that suffice, a text for each choice of so many."""
        left = self._left()
        for number in range(1, len(left) + 1):
            chosen = [names for names in combinations(left, number) if self._suffice([left[name] for name in names])]
            if chosen:
                return [" and ".join(names) for names in chosen]
        return []

    def _left(self) -> dict[str, Any]:
        """Text -> change of each setting that may keep less there; of fewer activations, the stage's name."""
        trainer, policy = self.config.trainer, self.config.actor_rollout_ref
        fsdp, encoder = policy.actor.fsdp_config, self.config.data.encoders
        left: dict[str, Any] = {}
        if trainer.async_checkpoint:
            left["set trainer.async_checkpoint to false"] = {"trainer": {"async_checkpoint": False}}
        for name in ("param_offload", "optimizer_offload"):
            if getattr(fsdp, name):
                change = {"actor_rollout_ref": {"actor": {"fsdp_config": {name: False}}}}
                left[f"set actor.fsdp_config.{name} to false"] = change
        if policy.rollout.sleeps:
            awake = {"actor_rollout_ref": {"rollout": {"enable_sleep_mode": False}}}
            left["set rollout.enable_sleep_mode to false"] = awake
        if encoder is not None and encoder.device == "cpu" and trainer.device == "cuda":
            left["set data.text_encoder.device to cuda"] = {"data": {"text_encoder": {"device": "cuda"}}}
        return left | self._fewer_activations()

    def _fewer_activations(self) -> dict[str, Any]:
        """On the CPU. How many less is not counted, which takes a pass over the model: advised is what without any
        would suffice."""
        if self.config.trainer.device != "cpu":
            return {}
        policy = self.config.actor_rollout_ref
        sizes = (
            ("actor.ppo_micro_batch_size_per_gpu", policy.actor.micro_batch, "update"),
            ("rollout.micro_batch_size", policy.rollout.micro_batch_size, "rollout"),
        )
        return {f"lower {name}, now {size}": stage for name, size, stage in sizes if size != 1}

    def _suffice(self, changes: Sequence[Any], model: Model | None = None) -> bool:
        """Do they, with that model?"""
        config = self.config
        for change in (change for change in changes if not isinstance(change, str)):
            config = config.settled(change)
        needed = self._counted(config, model or self.needed.model)
        for stage in (change for change in changes if isinstance(change, str)):
            if (one := getattr(needed, stage)) is not None:
                needed = needed._replace(**{stage: replace(one, passing={})})
        return self._has_room(config, needed)

    def _on(self, machines: int) -> tuple[TrainConfig, Needs]:
        """That many, whatever else would have to change for it."""
        trainer = self.config.trainer.model_copy(update={"nnodes": machines})
        config = self.config.model_copy(update={"trainer": trainer})
        return config, self._counted(config, self.needed.model)

    def _counted(self, config: TrainConfig, model: Model) -> Needs:
        update, encoders = update_of_rank(config, model), colocated_encoders(config)
        return self.needed._replace(update=update, model=model, encoders=encoders)

    def _has_room(self, config: TrainConfig, needed: Needs) -> bool:
        """On the machine, and on its GPUs where they are known."""
        fits = self.gpu is None or shortfall(config, needed, self.gpu) is None
        return fits and host_need(config, needed).gib <= self.there
