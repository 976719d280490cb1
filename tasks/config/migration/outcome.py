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
class Number:
    """What a field's value must be, that rules count with.

    Attributes:
        least: the smallest that there is.
        whole: no fraction.
        optional: null is what the field is if it is left out.
        most: beyond what any run has, and yet soon counted.
    """

    least: int
    whole: bool = True
    optional: bool = False
    most: int = 10_000_000

    def holds(self, value: Any) -> bool:
        """Is this such a number?"""
        kinds = (int,) if self.whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a {'whole ' if self.whole else ''}number from {self.least} to {self.most}"


@dataclass(frozen=True)
class System:
    """What is known of another system's fields.

    Attributes:
        rules: of one field each; a field without one that is called the same here is taken as it is.
        sections: of whole sections, by how a path begins, for what has none of its own.
        defaults: what a silence of theirs means where it is not our default, a value or what makes it of all that is
            given; None where nothing is to be written.
        numbers: of the fields that rules count with; a value that is none is told and goes into no other field.
    """

    rules: Mapping[str, Rule]
    sections: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    numbers: Mapping[str, Number]

    def unusable(self, path: str, value: Any) -> Elsewhere | Problem | None:
        """Why a value is no number where rules count with one; asked before any rule."""
        number = self.numbers.get(path)
        if number is None or number.holds(value):
            return None
        if value is None and number.optional:
            return Elsewhere("null is what it is there if it is left out")
        return Problem(f"{path} is {value!r} and should be {number}")


def renamed(*paths: str, note: str = "", convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The same value under other names."""
    return lambda path, value, given: Taken({to: convert(value) for to in paths}, note)


def only(*values: Any, why: str, wrong: str) -> Rule:
    """A rule of a field that is not here: these values say what is so anyhow, others are a problem."""
    return lambda path, value, given: (
        Elsewhere(why) if value in values else Problem(f"{path} is {value!r}, but {wrong}")
    )
