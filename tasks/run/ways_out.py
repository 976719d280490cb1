# SPDX-License-Identifier: Apache-2.0
"""The settings with which an update that has no room on its GPU has some: each is counted again before it is advised.

What leaves the GPU for the machine's memory has to have room there, too. Activations are the one thing that is not
counted again, which takes a pass over the model: what makes them fewer is advised where without any the rest fits.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from models.config.section import AUTO
from models.cost.memory import GIB, Need
from tasks.config.tree import TrainConfig
from tasks.run.capacity import ENCODERS, Model, Needs, in_format, update_of_rank
from tasks.run.host_capacity import beyond_host, host_need

MOST_GPUS = 4096
"""Up to which a number is looked for."""
FSDP = "actor.fsdp_config"
SHARD, OFFLOADS = "shard_gradients", ("optimizer_offload", "param_offload")


def ways_out(config: TrainConfig, needed: Needs, there: float) -> str:
    """What makes an update that does not fit a GPU of `there` GiB do so: settings, other weights, or more GPUs.

    Where no setting does, it says so, with the number of GPUs that would do; and what keeps the trainer from offloading
    where that is the machine's memory.
    """
    room = _Room(config, needed, there)
    settings, refused = room.settings()
    ways = [*room.rewards_elsewhere(), *room.fewer_activations(needed.update), *settings, *room.other_weights()]
    more = room.more_gpus()
    why = "" if settings or refused is None else f"; {refused}"
    if ways:
        return ", or ".join([*ways, *([more] if more else [])]) + why
    if more:
        return f"no setting makes it fit on so many{why}; {more}"
    return f"neither settings nor more GPUs make it fit{why}: take larger GPUs, or a smaller model"


def beyond_memory(config: TrainConfig, needed: Needs, there: float, encoders: float = 0.0) -> str | None:
    """What a run on a GPU of `there` GiB would keep of its machine's memory, as of `beyond_host`; a sleep that is auto
    comes where update and rollout have no room beside each other.

    Args:
        encoders: bytes of text encoders that are to be there, too.
    """
    if config.actor_rollout_ref.rollout.enable_sleep_mode == AUTO:
        both = needed.update.gib + (0.0 if needed.rollout is None else needed.rollout.gib)
        config = config.settled({"actor_rollout_ref": {"rollout": {"enable_sleep_mode": both > there}}})
    kept = host_need(config, needed)
    return beyond_host(config, kept.with_resident(ENCODERS, encoders) if encoders else kept)


class _Room:
    """A GPU of so many GiB, for which one config after another is counted."""

    def __init__(self, config: TrainConfig, needed: Needs, there: float):
        self.config, self.needed, self.there = config, needed, there
        self.actor = config.actor_rollout_ref.actor

    def fewer_activations(self, update: Need) -> list[str]:
        """The settings for that; none where the update would not fit without any."""
        actor, ways = self.actor, list[str]()
        if not self._fits_without_activations(update):
            return []
        if actor.micro_batch > 1:
            ways.append(f"lower actor.ppo_micro_batch_size_per_gpu, now {actor.micro_batch}")
        if actor.levels_per_pass > 1:
            ways.append(f"lower actor.levels_per_pass, now {actor.levels_per_pass}")
        if not actor.fsdp_config.gradient_checkpointing:
            ways.append(f"set {FSDP}.gradient_checkpointing to true")
        return ways

    def rewards_elsewhere(self) -> list[str]:
        """That, where it suffices."""
        rest = self.needed.update.gib - self.needed.rewards / GIB
        entries = self.config.reward.functions.items()
        placed = [f"reward.functions.{label}.placement" for label, entry in entries if entry.is_colocated]
        return [f"set {' and '.join(placed)} to separate"] if placed and rest <= self.there else []

    def settings(self) -> tuple[list[str], str | None]:
        """(the fewest settings of the trainer that suffice, a text for each choice of so many; why the machine has no
        room for one that offloads, where that is so)."""
        refused: str | None = None
        for number in (1, 2, 3):
            found = []
            for chosen in combinations(self._left(), number):
                way, lacking = self._tried(chosen)
                found += [] if way is None else [way]
                refused = refused or lacking
            if found:
                return found, refused
        return [], refused

    def other_weights(self) -> Iterator[str]:
        """LoRA and bf16."""
        model, cost = self.needed.model
        lora = with_lora(self.needed.model)
        if not model.trains_lora and self._fits_without_activations(self._update(self.config, lora)):
            yield "train LoRA with model.lora_rank"
        rounded = Model(in_format(model, "bfloat16"), cost)
        if model.model.dtype == "float32" and self._fits_without_activations(self._update(self.config, rounded)):
            yield "set model.dtype to bfloat16"

    def more_gpus(self) -> str | None:
        """The least number of them that suffices, with gradients divided or activations fewer only where it must be."""
        trainer = self.config.trainer
        now = f"trainer.n_gpus_per_node, now {trainer.n_gpus_per_node}"
        now += f", times trainer.nnodes, now {trainer.nnodes}" if trainer.nnodes > 1 else ""
        for may_have_fewer in (False, True):
            for chosen in ((), (SHARD,)) if self._may_shard else ((),):
                ranks, besides = self._least_gpus(self._changed(chosen), may_have_fewer)
                if ranks is not None:
                    return " and ".join([f"train on {ranks} GPUs or more ({now})", *_set_to_true(chosen), *besides])
        return None

    def _least_gpus(self, config: TrainConfig, may_have_fewer: bool) -> tuple[int | None, list[str]]:
        """(the least number of GPUs on which that config suffices, what has to be done besides: nothing, but where
        activations may be fewer; None and nothing where no number does)."""

        def besides(ranks: int) -> list[str] | None:
            lacking = self._completed(self._update(config, ranks=ranks))
            return None if lacking and not may_have_fewer else lacking

        more = range(self.config.trainer.world_size + 1, MOST_GPUS + 1)
        place = bisect_left(more, True, key=lambda ranks: besides(ranks) is not None)
        return (more[place], besides(more[place]) or []) if place < len(more) else (None, [])

    def _tried(self, chosen: Sequence[str]) -> tuple[str | None, str | None]:
        """(a text of these settings where they suffice, why the machine has no room for them)."""
        changed = self._changed(chosen)
        lacking = self._completed(self._update(changed))
        if lacking is None:
            return None, None
        parts = [*_set_to_true(chosen), *lacking]
        if not {*chosen} & {*OFFLOADS}:
            return " and ".join(parts), None
        beyond = self._beyond_host(changed)
        if beyond and changed.trainer.async_checkpoint:
            changed = changed.settled({"trainer": {"async_checkpoint": False}})
            beyond = self._beyond_host(changed)
            parts.append("set trainer.async_checkpoint to false")
        if beyond is None:
            return " and ".join(parts), None
        return None, f"{FSDP}.{chosen[-1]} {beyond}"

    def _left(self) -> list[str]:
        """The settings that are not yet as they need least."""
        fsdp = self.actor.fsdp_config
        left = [SHARD] if self._may_shard else []
        left += [] if fsdp.reshard_after_forward else ["reshard_after_forward"]
        if not fsdp.param_offload:
            left += [name for name in OFFLOADS if not getattr(fsdp, name)]
        return left

    @property
    def _may_shard(self) -> bool:
        """LoRA's gradients are few."""
        return not self.actor.fsdp_config.shard_gradients and not self.needed.model.config.trains_lora

    def _changed(self, chosen: Sequence[str]) -> TrainConfig:
        return self.config.settled({"actor_rollout_ref": {"actor": {"fsdp_config": dict.fromkeys(chosen, True)}}})

    def _update(self, config: TrainConfig, model: Model | None = None, ranks: int | None = None) -> Need:
        """What it holds with that config, text encoders and rewards that stay beside it included."""
        update = update_of_rank(config, model or self.needed.model, ranks)
        return self.needed._replace(update=update).beside_what_stays(config).update

    def _beyond_host(self, config: TrainConfig) -> str | None:
        return beyond_memory(config, self.needed._replace(update=self._update(config)), self.there)

    def _completed(self, update: Need) -> list[str] | None:
        """What has to be done besides for it to fit: nothing, or one thing for fewer activations, if that alone would
        not do; None: no such thing suffices."""
        if update.gib <= self.there:
            return []
        alone = self._fits_without_activations(self.needed.update)
        return None if alone else self.fewer_activations(update)[:1] or None

    def _fits_without_activations(self, update: Need) -> bool:
        activations = sum(size for name, size in update.passing.items() if name.startswith("activations"))
        return update.gib - activations / GIB < self.there


def with_lora(model: Model) -> Model:
    """The same with its weights frozen beside LoRA's, which are too few to count."""
    config, cost = model
    frozen = replace(cost, frozen=cost.parameters, trained=0, trained_blocks=(0, 0))
    return Model(replace(config, model=config.model.model_copy(update={"lora_rank": 1})), frozen)


def _set_to_true(names: Sequence[str]) -> list[str]:
    return [f"set {' and '.join(f'{FSDP}.{name}' for name in names)} to true"] if names else []
