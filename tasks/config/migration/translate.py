# SPDX-License-Identifier: Apache-2.0
"""A run of VeRL-Omni as a recipe of this project, with a line about each of its overrides."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from tasks.config.errors import described, field_paths, near
from tasks.config.migration.rules import DEFAULTS, RULES, SECTIONS, Elsewhere, Given, Taken
from tasks.config.migration.script import UNKNOWN, Override
from tasks.config.presets import tree_of
from tasks.config.tree import TrainConfig
from tasks.config.unread import without_effect

Kind = Literal["taken", "renamed", "explained", "unknown"]


@dataclass(frozen=True)
class Line:
    """What became of one override: taken as it is, renamed (also: given in another form), explained, or unknown."""

    override: Override
    kind: Kind
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind:9} {self.override.path}={self.override.value}{f': {self.text}' if self.text else ''}"


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


def translate(overrides: Iterable[Override]) -> Translation:
    """VeRL-Omni's overrides as a config of ours. Nothing is left out without a line."""
    told: Given = {override.path: override.value for override in overrides}
    given: Given = {path: value for path, value in told.items() if UNKNOWN not in str(value) or _is_path(path)}
    fields = frozenset(field_paths(TrainConfig))
    settings: dict[str, Any] = {}
    lines = list[Line]()
    for path, value in told.items():
        if path not in given:
            lines.append(Line(Override(path, value), "explained", "another program says it: set it yourself"))
            continue
        kind, text, made = _become(path, value, given, fields)
        settings |= made
        lines.append(Line(Override(path, value), kind, text))
    theirs = {path: make(given) if callable(make) else make for path, make in DEFAULTS.items()}
    defaults = {path: value for path, value in theirs.items() if path not in settings and value is not None}
    config = tree_of(settings | defaults)
    problem = _problem(config)
    if problem is None:
        unread = without_effect(TrainConfig.model_validate(config))
        config = tree_of(settings | {path: value for path, value in defaults.items() if path not in unread})
    return Translation(config, lines, problem)


def _is_path(name: str) -> bool:
    """Of a file's place, its name is what counts."""
    return name.endswith(("path", "_dir", "_files"))


def _become(path: str, value: Any, given: Given, fields: frozenset[str]) -> tuple[Kind, str, dict[str, Any]]:
    rule = RULES.get(path)
    if rule is None and path in fields:
        return "taken", "", {path: value}
    if rule is None:
        rule = next((of for section, of in SECTIONS.items() if path.startswith(section)), None)
    made = rule(path, value, given) if callable(rule) else rule
    if isinstance(made, Elsewhere):
        return "explained", made.why, {}
    if isinstance(made, Taken):
        kind: Kind = "taken" if made.settings == {path: value} else "renamed"
        return kind, made.text(), made.settings
    return "unknown", f"this project has no such field{near(path, fields)}", {}


def _problem(config: dict[str, Any]) -> str | None:
    try:
        TrainConfig.model_validate(config)
    except ValidationError as error:
        return described(error, TrainConfig)
    except ValueError as error:
        return str(error)
    return None
