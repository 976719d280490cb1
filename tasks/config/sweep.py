# SPDX-License-Identifier: Apache-2.0
"""What a sweep tries: fields of a config and their values."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from models.config.bounds import (
    MOST_ITERATIONS,
    MOST_NUMPY_SEED,
    MOST_PROCESSES,
    MetricName,
    PositiveRealNumber,
    PositiveWholeNumber,
    RealNumber,
    WholeNumber,
)
from models.config.section import Section
from tasks.config.added_rewards import why_added_by_mistake
from tasks.config.errors import ConfigError
from tasks.config.overrides import Entries, flat
from tasks.config.presets import tree_of
from tasks.config.tree import TrainConfig
from tasks.config.unread import why_unread
from tasks.system.credentials import refuse_secret_options

if TYPE_CHECKING:
    import optuna

MOST_RUNS = MOST_GRID_POINTS = 10_000
"""Of a sweep. More points of a grid would fill the study's file before the first run starts."""


class Dimension(Section):
    """The values of one field: a list, or a range."""

    choices: list[str | bool | WholeNumber | RealNumber | None] | None = Field(
        None, min_length=1, description="These values."
    )
    low: WholeNumber | RealNumber | None = Field(
        None, description="Smallest value; two whole numbers make a range of them."
    )
    high: WholeNumber | RealNumber | None = Field(None, description="Largest value, included.")
    step: PositiveWholeNumber | PositiveRealNumber | None = Field(
        None, description="Distance of the values; a grid over a range needs it."
    )
    log: bool = Field(False, description="Draw the logarithm evenly.")

    @model_validator(mode="after")
    def _list_or_range(self) -> Self:
        if (self.low is None) != (self.high is None) or (self.choices is None) == (self.low is None):
            raise ValueError("a dimension is either choices, or low and high")
        if self.choices is not None:
            return self
        low, high = self._range()
        if not low < high or (self.log and (low <= 0 or self.step is not None)):
            raise ValueError("low must be below high; log needs low above 0 and no step")
        return self

    def _range(self) -> tuple[int | float, int | float]:
        if self.low is None or self.high is None:
            raise ValueError("choices are no range: they have neither low nor high")
        return self.low, self.high

    def suggest(self, trial: "optuna.trial.BaseTrial", name: str) -> Any:
        """Optuna's choice."""
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)
        low, high = self._range()
        if isinstance(low, int) and isinstance(high, int) and isinstance(self.step, int | None):
            return trial.suggest_int(name, low, high, log=self.log, step=self.step or 1)
        return trial.suggest_float(name, float(low), float(high), log=self.log, step=self.step)

    def ends(self) -> list[Any]:
        """All choices, or the smallest and the largest value."""
        return [self.low, self.high] if self.choices is None else list(self.choices)

    def grid(self) -> list[Any]:
        """Every value.

        Raises:
            ConfigError: a range without a step has no grid.
        """
        if self.choices is not None:
            return list(self.choices)
        (low, _), step = self._range(), self._grid_step()
        return [low + number * step for number in range(self.grid_size())]

    def grid_size(self) -> int:
        """How many values the grid has. Raises what `grid` raises."""
        if self.choices is not None:
            return len(self.choices)
        low, high = self._range()
        return int(min((high - low) / self._grid_step(), 1e18) + 1e-9) + 1

    def _grid_step(self) -> int | float:
        if self.step is None:
            raise ConfigError("sampler grid needs choices, or a step with low and high")
        return self.step


class SweepConfig(Section):
    """Which runs are tried, and how."""

    name: str = Field(
        "sweep",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        max_length=100,
        description="A sweep of the same name is continued. It names a folder, so it begins with no dot or dash.",
    )
    space: dict[str, Dimension] = Field(min_length=1, description="Config field, as a.b.c, to its values.")
    sampler: Literal["grid", "random", "tpe"] = Field("tpe", description="How values are chosen.")
    pruner: Literal["median", "none"] = Field(
        "median", description="median stops a run whose metric is below the median of the runs before it."
    )
    startup_trials: int = Field(5, ge=1, le=MOST_RUNS, description="Runs before tpe models and median stops anything.")
    warmup_steps: int = Field(
        0, ge=0, le=MOST_ITERATIONS, description="Iterations of a run in which it is not stopped."
    )
    trials: int = Field(20, ge=1, le=MOST_RUNS, description="Runs in all; a grid has as many as it has points.")
    parallel: int = Field(1, ge=1, le=MOST_PROCESSES, description="Runs at a time.")
    metric: MetricName = Field(
        "val/reward/mean", description="What is compared, after every validation and at the end."
    )
    direction: Literal["maximize", "minimize"] = Field("maximize", description="Which way is better.")
    seed: int = Field(0, ge=0, le=MOST_NUMPY_SEED, description="Of random and tpe.")

    @model_validator(mode="after")
    def _no_choice_is_a_secret(self) -> Self:
        """The study's file and MLflow get each, and an error of one that no config takes repeats it."""
        refuse_secret_options({path: dimension.ends() for path, dimension in self.space.items()}, "search.space")
        return self


def with_search(search: SweepConfig, changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A search's fields with changes in place of theirs, unchecked; and dotted path -> value of what is lost by that of
    the dimensions that the changes name anew.

    A `space` that is given replaces the one before. Dotted paths below it, which are `Entries`, add or change one
    dimension: space.trainer.seed={choices: [1, 2]} all of it, space.trainer.seed.high=9 this field alone.
    """
    before = search.model_dump(exclude_unset=True)
    given, result = changes.get("space"), {**before, **changes}
    if not isinstance(given, dict):
        return result, {}
    result["space"] = space = _space(given, before["space"])
    here = {path: dimension for path, dimension in before["space"].items() if path in space}
    return result, {path: value for path, value in flat(here, "space").items() if path not in flat(space, "space")}


def _space(given: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Config field -> its dimension; a config field has points itself, as a path to a dimension's field has."""
    space = dict(before) if isinstance(given, Entries) else {}
    for path, value in _paths(given):
        dimension, _, field = path.rpartition(".")
        if isinstance(value, dict) or field not in Dimension.model_fields:
            space[path] = value
        elif isinstance(held := space.setdefault(dimension, {}), dict):  # else the check of the whole says what it is
            space[dimension] = held | {field: value}
    return space


def _paths(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of what the settings have given."""
    for name, value in tree.items():
        if isinstance(value, Entries):
            yield from _paths(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check_fields(config: TrainConfig, search: SweepConfig) -> None:
    """Every field exists, takes its first value, is read by some run and tells runs apart; a grid is small enough to be
    listed."""
    if search.sampler == "grid":
        points = math.prod(dimension.grid_size() for dimension in search.space.values())
        if points > MOST_GRID_POINTS:
            raise ConfigError(
                f"search.space is a grid of {float(points):.3g} points, at most {MOST_GRID_POINTS} are allowed: take "
                "larger steps or fewer fields, or set search.sampler to random or tpe, which search.trials bounds"
            )
    first = tree_of({path: dimension.ends()[0] for path, dimension in search.space.items()}, Entries)
    if (added := why_added_by_mistake(first, config.rewards())) is not None:
        raise ConfigError(f"search.space: {added}")
    for path, dimension in search.space.items():
        value = dimension.ends()[0]
        try:
            config.with_changes(config.at_paths({path: value}))
        except ValueError as error:
            raise ConfigError(f"search.space: {path} cannot be {value!r}: {error}") from error
    for path in search.space:
        why = _why_nothing_changes(config, search.space, path)
        if why is not None:
            raise ConfigError(f"search.space: {path} would change nothing, for {why}: leave it out")
    for path, dimension in search.space.items():
        if _names_one_run(config, path, dimension):
            raise ConfigError(
                f"search.space: {path} is no part of a run's name, so runs that differ in it alone are one, whose "
                "results each value would get: leave it out, and set it in a sweep with another search.name for each "
                "value"
            )


def _names_one_run(config: TrainConfig, path: str, dimension: Dimension) -> bool:
    """Is it the same run, by its name, whichever of its different values the field has?"""
    first, *others = dimension.ends()
    others = [value for value in others if value != first]
    try:
        named = {config.with_changes(config.at_paths({path: value})).run_name for value in (first, *others)}
    except ValueError:  # one of them needs another field
        return False
    return bool(others) and len(named) == 1


def _why_nothing_changes(config: TrainConfig, space: Mapping[str, Dimension], path: str) -> str | None:
    """Why none of the runs reads the field at this path; None where one may, with another field at any of its ends."""
    why = why_unread(config, path)
    for other, dimension in space.items() if why is not None else ():
        for value in dimension.ends():
            try:
                changed = config.with_changes(config.at_paths({other: value}))
            except ConfigError:  # it needs a third field, and may read this one
                return None
            if why_unread(changed, path) is None:
                return None
    return why
