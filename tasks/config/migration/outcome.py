# SPDX-License-Identifier: Apache-2.0
"""What may become of an override: it is set, something else does its work, or a recipe cannot be without it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Given: TypeAlias = Mapping[str, Any]
"""All overrides of a script whose values are known and of the right type: path -> value."""


@dataclass(frozen=True)
class Taken:
    """It is set here: by these dotted paths and values."""

    settings: dict[str, Any]
    note: str = ""

    def text(self) -> str:
        """What it became, and what else there is to know of it."""
        became = "here " + ", ".join(f"{path}={value}" for path, value in self.settings.items())
        return f"{became}; {self.note}" if self.note else became


@dataclass(frozen=True)
class Elsewhere:
    """Nothing is set: why, and what does its work here if anything does."""

    why: str


@dataclass(frozen=True)
class Problem:
    """The run would be another one than the script's: what is wrong, and what would be right.

    Attributes:
        settings: what is written all the same, so that a run of the recipe is refused and trains nothing else.
    """

    why: str
    settings: dict[str, Any] = field(default_factory=dict)


Outcome: TypeAlias = Taken | Elsewhere | Problem
Rule: TypeAlias = Elsewhere | Callable[[str, Any, Given], Outcome]


def folder_of(model: str) -> str | None:
    """Where a hub id's files are expected here; None for what is a place already."""
    if model.count("/") == 1 and not model.startswith(("$", ".", "/", "~")):
        return "data/" + model.rpartition("/")[2].lower().replace("-", "_")
    return None


@dataclass(frozen=True)
class System:
    """What is known of another system's fields.

    Attributes:
        rules: of one field each; a field without one that is called the same here is taken as it is.
        sections: of whole sections, by how a path begins, for what has none of its own.
        defaults: what a silence of theirs means where it is not our default, a value or what makes it of all that is
            given; None where nothing is to be written.
        unusable: why a value can be counted with by no rule, before any is asked.
    """

    rules: Mapping[str, Rule]
    sections: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    unusable: Callable[[str, Any], Elsewhere | Problem | None]


def renamed(*paths: str, note: str = "", convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The same value under other names."""
    return lambda path, value, given: Taken({to: convert(value) for to in paths}, note)


def only(*values: Any, why: str, wrong: str) -> Rule:
    """The rule of a field that is not here: these values say what is so anyhow."""
    return lambda path, value, given: (
        Elsewhere(why) if value in values else Problem(f"{path} is {value!r}, but {wrong}")
    )
