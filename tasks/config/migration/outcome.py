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
