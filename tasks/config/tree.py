# SPDX-License-Identifier: Apache-2.0
"""The one configuration tree of a run: sections from every floor, and what only all of them together say.

Field names follow the reference system (VeRL-Omni), so its users find their knobs: `actor_rollout_ref.rollout.n`,
`actor_rollout_ref.actor.optim.lr`, `algorithm.adv_estimator`, `trainer.total_training_steps`. Every value has one
place; what the reference mirrors between sections stands once here.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from models.config.actor import DiffusionActorConfig
from models.config.model import ModelConfig
from models.config.section import NotShaping, Section
from tasks.config.agreement import check_agreement
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.config.data import FILES, DataConfig
from tasks.config.errors import ConfigError, described
from tasks.config.identity import paced_by_length, shaping
from tasks.config.overrides import FormOf, flat, merged, optional, set_fields, without
from tasks.config.presets import absent, decided_by_name, preset, tree_of
from tasks.config.reward import RewardConfig
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.tracking import TrackingConfig
from tasks.config.trainer import RayConfig, TrainerConfig

REWARDS = "reward.functions"
"""What changes replace as a whole."""


class ActorRolloutRefConfig(Section):
    """The policy: the model, how it is sampled and how it is updated."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model and which of its weights.")
    rollout: DiffusionRolloutConfig = Field(default_factory=DiffusionRolloutConfig, description="Sampling.")
    actor: DiffusionActorConfig = Field(default_factory=DiffusionActorConfig, description="The update.")


class TrainConfig(Section):
    """Everything a training run depends on."""

    data: DataConfig = Field(default_factory=DataConfig, description="The data set.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(
        default_factory=ActorRolloutRefConfig, description="The policy: model, rollout, update."
    )
    algorithm: DiffusionAlgoConfig = Field(
        default_factory=DiffusionAlgoConfig, description="Its name, advantages and rollout correction."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Rewards.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The loop.")
    ray_init: NotShaping[RayConfig] = Field(default_factory=RayConfig, description="The cluster.")
    tracking: NotShaping[TrackingConfig] = Field(default_factory=TrackingConfig, description="Where MLflow is.")

    _asked: "TrainConfig | None" = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _named_algorithm(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in what `algorithm.name` stands for, once, where the field is not given.

        A field so filled does not count as set: `with_changes` to another name takes that one's value.
        """
        given = set_fields(values)
        if not isinstance(given, dict):
            return handler(values)
        named = preset(given)
        config = handler(merged(tree_of(named), given))
        for path in absent(named, given):
            *parents, leaf = path.split(".")
            functools.reduce(getattr, parents, config).model_fields_set.discard(leaf)
        return config

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_agreement(self)
        return self

    @property
    def data_ranks(self) -> int:
        """Trainer ranks with samples of their own; those that share the tokens of a sample count once."""
        return self.trainer.world_size // self.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size

    @property
    def is_online(self) -> bool:
        """Does a run of training start rollout and reward?"""
        return self.algorithm.sample_source == "online"

    @property
    def records_unconditional(self) -> bool:
        """Does the update take the rollout's half of the guidance without the prompt as it is?

        Not where they were made ahead, from older weights than those of the update, nor where the trainer computes the
        old log-probs itself: with both halves its own, which the first update must repeat.
        """
        constant = self.actor_rollout_ref.actor.guidance_gradient == "conditional"
        bypasses = self.algorithm.rollout_correction.bypass_mode
        return constant and bypasses and not self.trainer.one_step_off_policy

    @property
    def shares_gpus(self) -> bool:
        """Do trainer and rollout take turns on the same GPUs?"""
        return self.trainer.device == "cuda" and self.actor_rollout_ref.rollout.placement == "colocated"

    @property
    def gpus(self) -> float:
        """GPUs that a run of training takes."""
        return self.gpus_needed()

    def gpus_needed(self, trains: bool = True) -> float:
        """GPUs of ranks, rollout workers, rewards and text encoders; without `trains`, of a validation alone."""
        rollout, on_cuda = self.actor_rollout_ref.rollout, self.trainer.device == "cuda"
        holds = self.holds_places(trains)
        ranks = float(self.trainer.world_size) if holds and on_cuda else 0.0
        encoders = 0.0 if self.data.encoders is None else self.data.encoders.own_gpus
        if trains and not self.is_online:
            return ranks + encoders
        workers = rollout.num_actors * rollout.gpus_per_worker if on_cuda else 0.0
        models = ranks if holds and self.shares_gpus else ranks + workers
        return models + self.reward.num_gpus + encoders

    def holds_places(self, trains: bool) -> bool:
        """Are the places of the trainer's ranks held? In a validation for text encoders that are to be on one alone."""
        return trains or (self.data.encoders is not None and self.data.encoders.is_colocated)

    @property
    def rollout_devices(self) -> float:
        """GPUs that sample, or on the CPU the rollout's processes."""
        rollout = self.actor_rollout_ref.rollout
        on_cpu = self.trainer.device == "cpu"
        shares = rollout.processes_per_worker if on_cpu or self.shares_gpus else rollout.gpus_per_worker
        return rollout.num_actors * shares

    @property
    def run_name(self) -> str:
        """experiment_name and a digest of everything that shapes the result: a changed config is another run."""
        return f"{self.trainer.experiment_name}-{self.digest()}"

    @property
    def run_dir(self) -> Path:
        """Folder of this run's checkpoints and records."""
        return self.trainer.default_local_dir / self.run_name

    @property
    def paced_by_length(self) -> str | None:
        """The setting by which a longer run is not the same at its beginning, if there is one."""
        policy = self.actor_rollout_ref
        return paced_by_length(policy.rollout.algo.sde_window_mode, policy.actor.optim)

    @property
    def planned_optimizer_steps(self) -> int:
        """Of the whole run, if no mini-batch drops out."""
        actor = self.actor_rollout_ref.actor
        iteration = self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
        return iteration * self.trainer.total_training_steps

    @property
    def scheduled_actor(self) -> DiffusionActorConfig:
        """`actor_rollout_ref.actor` as the trainer's ranks get it: a schedule knows how many steps it spans."""
        actor = self.actor_rollout_ref.actor
        return actor.model_copy(update={"optim": actor.optim.spanning(self.planned_optimizer_steps)})

    def data_read(self) -> list[Path]:
        """The files and folders that a run reads."""
        model = self.actor_rollout_ref.model
        start = [] if model.initial_weights is None else [Path(model.initial_weights)]
        pairs = [] if self.is_online else [self.data.pairs]
        embeddings = [self.data.embeddings] if isinstance(self.data.embeddings, Path) else []
        return [self.data.prompts, *embeddings, Path(model.path), *start, *pairs]

    def digest(self) -> str:
        """8 hex digits over the settings that shape the weights: all but those marked `NotShaping`.

        Where a run computes, writes and tracks, how often it measures and how long it goes on do not count: such a
        run may continue elsewhere, or for longer. (How long counts where something paces itself by it.) An algorithm's
        name and the same fields written out are one run. What is auto counts as auto, on every machine and after it was
        found out: see `settled`.
        """
        if self._asked is not None:
            return self._asked.digest()
        counted = shaping(self)
        if self.paced_by_length is not None:
            counted["trainer"]["total_training_steps"] = self.trainer.total_training_steps
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:8]

    def with_changes(self, changes: BaseModel | dict[str, Any] | None) -> "TrainConfig":
        """This config with some fields replaced, checked as a whole.

        Another `algorithm.name` is that algorithm as published: what this config says of kernel, window, loss and the
        rest of `decided_by_name` stays behind, see `left_behind`; what the changes say of them counts.

        Args:
            changes: nested mapping of fields, or a `TrainOverrides`, of which the fields that were set count.

        Raises:
            ConfigError: the result is no config; what is wrong of it, in a sentence.
        """
        if changes is None:
            return self
        given = _mapping(changes)
        kept, _ = self._beside(given)
        try:
            return TrainConfig.model_validate(merged(kept, given))
        except ValidationError as error:
            raise ConfigError(described(error, TrainConfig)) from error

    def at_paths(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of the fields at these dotted paths, for `with_changes`.

        That replaces `reward.functions`, while a path to a field of one reward means this field alone: the reward's
        others, and the other rewards, are in the changes as they are here.
        """
        changes = tree_of(values)
        if any(path.startswith(f"{REWARDS}.") for path in values):
            changes["reward"]["functions"] = merged(self.rewards(), changes["reward"]["functions"])
        return changes

    def rewards(self) -> dict[str, Any]:
        """`reward.functions` as plain mappings of the fields that were set."""
        return {label: set_fields(entry) for label, entry in self.reward.functions.items()}

    def lost_of_rewards(self, changes: BaseModel | dict[str, Any] | None) -> dict[str, Any]:
        """Dotted path -> value of what this config gives for a reward that `with_changes` names anew, and these changes
        do not say: `reward.functions` is replaced as a whole."""
        new = _mapping(changes or {}).get("reward", {}).get("functions")
        if not isinstance(new, Mapping):
            return {}
        here = {label: entry for label, entry in self.rewards().items() if label in new}
        return {path: value for path, value in flat(here, REWARDS).items() if path not in flat(new, REWARDS)}

    @property
    def asked(self) -> "TrainConfig":
        """This config with auto where somebody has written it."""
        return self._asked or self

    def settled(self, found: Mapping[str, Any]) -> "TrainConfig":
        """This config with values in place of auto; it names the same run.

        Args:
            found: nested mapping of those fields.

        Raises:
            ConfigError: the values do not go with the rest.
        """
        result = self.with_changes(dict(found))
        result._asked = self.asked
        return result

    def left_behind(self, changes: BaseModel | dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
        """Dotted path -> (value here, value there) of the fields that this config gives and that `with_changes` takes
        from another algorithm's name instead."""
        given = _mapping(changes or {})
        _, taken = self._beside(given)
        there, own = flat(self.with_changes(given).model_dump()), flat(given)
        values = {path: (value, there.get(path)) for path, value in taken.items() if path not in own}
        return {path: pair for path, pair in values.items() if pair[0] != pair[1]}

    def _beside(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What these changes leave of the fields that are set here, and what another algorithm's name takes away."""
        here, algorithm = self.model_dump(exclude_unset=True), given.get("algorithm")
        data = given.get("data")
        if isinstance(data, Mapping) and data.get("name", self.data.name) != self.data.name:
            here, _ = without(here, [f"data.{field}" for field in FILES])
        name = algorithm.get("name", self.algorithm.name) if isinstance(algorithm, Mapping) else self.algorithm.name
        if not isinstance(name, str):  # which the check of the whole says
            return here, {}
        return (here, {}) if name == self.algorithm.name else without(here, decided_by_name(name))


def _mapping(changes: Any) -> dict[str, Any]:
    """The fields that changes set. Raises ConfigError where they are no mapping of fields."""
    given = set_fields(changes)
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"the changes are {given!r:.60}; they should be a mapping of the sections "
            f"{', '.join(TrainConfig.model_fields)}"
        )
    return given


if TYPE_CHECKING:  # a type checker takes no class that a call has made

    class TrainOverrides(BaseModel):
        """Changes to a recipe: any part of the tree, the rest left out."""

else:
    TrainOverrides = optional(TrainConfig)
    """Changes to a recipe: any part of the tree, the rest left out."""

Recipe: TypeAlias = Annotated[TrainConfig, FormOf(TrainOverrides)]
"""A config as a flow takes it: its form has the fields that a recipe sets, and the others empty."""

NO_OVERRIDES = TrainOverrides()
"""What a form begins with: a section of its own, and not null."""
