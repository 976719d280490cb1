# SPDX-License-Identifier: Apache-2.0
"""The one configuration tree of a run: its sections, checked together, how they are changed, and the run they name."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from tasks.config.agreement import check_agreement
from tasks.config.data import FILES
from tasks.config.errors import ConfigError, described
from tasks.config.identity import shaping
from tasks.config.overrides import Entries, FormOf, flat, merged, optional, set_fields, whole, without
from tasks.config.presets import absent, decided_by_name, preset, tree_of
from tasks.config.sections import RunSections

REWARDS = "reward.functions"
"""What changes replace as a whole."""


class TrainConfig(RunSections):
    """Everything a training run depends on."""

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
        config = handler(merged(tree_of(named), given, cls))
        for path in absent(named, given):
            *parents, leaf = path.split(".")
            functools.reduce(getattr, parents, config).model_fields_set.discard(leaf)
        return config

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_agreement(self)
        return self

    @property
    def run_name(self) -> str:
        """experiment_name and a digest of everything that shapes the result: a changed config is another run."""
        return f"{self.trainer.experiment_name}-{self.digest()}"

    @property
    def run_dir(self) -> Path:
        """Folder of this run's checkpoints and records."""
        return self.trainer.default_local_dir / self.run_name

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
            return TrainConfig.model_validate(merged(kept, given, TrainConfig))
        except ValidationError as error:
            raise ConfigError(described(error, TrainConfig)) from error

    def at_paths(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of the fields at these dotted paths, for `with_changes`.

        That replaces `reward.functions` and mappings of free names, while a path to a field of one reward, or to one
        option, means this alone: the others are in the changes as they are here.
        """
        return self.completed(tree_of(values, Entries))

    def completed(self, changes: dict[str, Any], given: dict[str, Any] | None = None) -> dict[str, Any]:
        """These changes, in which a mapping of free names of which they name entries alone has the others as well, as
        they are here, or in the changes that are `given` before them."""
        first = given or {}
        kept, _ = self._beside(merged(first, changes, TrainConfig))
        here = merged({"reward": {"functions": self.rewards()}}, kept, TrainConfig)
        return whole(changes, merged(here, first, TrainConfig), TrainConfig)

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
