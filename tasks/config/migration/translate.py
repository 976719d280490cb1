# SPDX-License-Identifier: Apache-2.0
"""A run of VeRL-Omni as a recipe of this project, with a line about each of its overrides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import ValidationError

from tasks.config.errors import described, field_paths, near
from tasks.config.migration.outcome import Elsewhere, Given, Outcome, Problem, System, Taken
from tasks.config.migration.python_config import CALLED, COMPUTED
from tasks.config.migration.rewards import untrained
from tasks.config.migration.rules import VERL_OMNI
from tasks.config.migration.script import UNFILLED, UNKNOWN, Override
from tasks.config.presets import tree_of
from tasks.config.tree import TrainConfig
from tasks.config.unread import without_effect

Kind = Literal["taken", "renamed", "explained", "unknown", "problem"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Line:
    """What became of one override: taken as it is, renamed (also: given in another form), explained, unknown, or a
    problem, without whose solution the run is another one."""

    override: Override
    kind: Kind
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind:9} {self.override}{f': {self.text}' if self.text else ''}"


@dataclass(frozen=True)
class Translation:
    """A recipe and how it came about.

    Attributes:
        config: the recipe's `config`, with the reference's defaults where they differ from ours, nothing is given, and
            the run reads them.
        lines: one for each override, in the order given.
        problem: why the config is not valid yet; None where it is.
    """

    config: dict[str, Any]
    lines: list[Line]
    problem: str | None

    def count(self, kind: Kind) -> int:
        """Overrides of which this became."""
        return sum(line.kind == kind for line in self.lines)


def translate(overrides: Iterable[Override], system: System = VERL_OMNI) -> Translation:
    """A system's overrides as a config of ours. Nothing is left out without a line."""
    told = {override.path: override for override in overrides}
    fields = frozenset(field_paths(TrainConfig))
    refused = {
        path: refusal for path, one in told.items() if (refusal := _refusal(path, one.value, told, fields, system))
    }
    given: Given = {path: one.value for path, one in told.items() if path not in refused}
    outcomes = {
        path: refused.get(path) or _become(path, one.value, given, fields, system) for path, one in told.items()
    }
    settings: dict[str, Any] = {}
    for outcome in outcomes.values():
        settings |= outcome.settings if isinstance(outcome, Taken | Problem) else {}
    lines = [Line(told[path], *_said(path, told[path].value, outcome, fields)) for path, outcome in outcomes.items()]
    theirs = {path: make(given) if callable(make) else make for path, make in system.defaults.items()}
    defaults = {path: value for path, value in theirs.items() if path not in settings and value is not None}
    config = tree_of(settings | defaults)
    problems = [outcome.why for outcome in outcomes.values() if isinstance(outcome, Problem)]
    invalid = _problem(config)
    if invalid is None and not problems:
        unread = without_effect(TrainConfig.model_validate(config))
        config = tree_of(settings | {path: value for path, value in defaults.items() if path not in unread})
    problem = "; ".join([*problems, *([invalid] if invalid else [])]) or untrained(told, config)
    return Translation(config, lines, problem)


def _refusal(
    path: str, value: Any, told: Mapping[str, Override], fields: frozenset[str], system: System
) -> Elsewhere | Problem | None:
    """Why nothing can be made of a value, whatever the rule of its field."""
    if UNKNOWN in str(value) and not _is_path(path):
        return Elsewhere("another program says it: set it yourself")
    if value is COMPUTED and path.endswith(CALLED):
        return Elsewhere("it is not read: set what it sets yourself")
    if COMPUTED in str(value):
        return Elsewhere("the file computes it: set it yourself")
    if UNFILLED.search(str(value)) and not _is_path(path):
        return Elsewhere("set elsewhere: set it yourself")
    has_parts = any(field.startswith(f"{path}.") for field in fields) and path not in system.rules
    if has_parts and (value is not None or any(other.startswith(f"{path}.") for other in (*told, *system.defaults))):
        return Problem(f"{path} is a section, to which {value!r} is given: give its fields one by one")
    return system.unusable(path, value)


def _is_path(name: str) -> bool:
    """Of a file's place, its name is what counts."""
    return name.endswith(("path", "_dir", "_files"))


def _become(path: str, value: Any, given: Given, fields: frozenset[str], system: System) -> Outcome | None:
    """None where no rule knows the field."""
    rule = system.rules.get(path)
    if rule is None and path in fields:
        return Taken({path: value})
    if rule is None:
        rule = next((of for section, of in system.sections.items() if path.startswith(section)), None)
    return rule(path, value, given) if callable(rule) else rule


def _said(path: str, value: Any, outcome: Outcome | None, fields: frozenset[str]) -> tuple[Kind, str]:
    if isinstance(outcome, Elsewhere):
        return "explained", outcome.why
    if isinstance(outcome, Problem):
        return "problem", outcome.why
    if isinstance(outcome, Taken):
        unfilled = UNFILLED.search(str(list(outcome.settings.values())))
        note = f"{unfilled[0]} in it is not filled in here: write what it stands for" if unfilled else ""
        if outcome.settings == {path: value}:
            return "taken", "; ".join(filter(None, (outcome.text() if outcome.note else "", note)))
        return "renamed", "; ".join(filter(None, (outcome.text(), note)))
    if path.startswith("-"):
        return "unknown", "a flag of theirs; of a configuration file that it names no value is read: give them"
    if path.startswith("~"):
        return "unknown", "nothing is taken away here: leave the field out"
    if "/" in path or "@" in path:
        return "unknown", "it names one of their configuration files, of which no value is read: give them"
    return "unknown", f"this project has no such field{near(path, fields)}"


def _problem(config: dict[str, Any]) -> str | None:
    try:
        TrainConfig.model_validate(config)
    except ValidationError as error:
        return described(error, TrainConfig)
    except ValueError as error:
        return str(error)
    return None
