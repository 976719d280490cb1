# SPDX-License-Identifier: Apache-2.0
"""What GenEval's prompts ask of a picture's objects (arXiv 2310.11513), checked on boxes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COUNTING = "counting"
"""The tag whose objects a detector has to be surer of."""


class Box(NamedTuple):
    """An object that was found: its corners in pixels from the picture's upper left one, and the detector's score."""

    left: float
    top: float
    right: float
    bottom: float
    score: float


@dataclass(frozen=True)
class Wanted:
    """`count` objects of a class. Each may have to have a colour, and to stand in a relation to those of an entry."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True)
class Scene:
    """What must be in a picture, at least so often, and what must not be in it so often."""

    tag: str | None
    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...]

    @property
    def names(self) -> list[str]:
        """The classes, each once."""
        return list(dict.fromkeys(wanted.name for wanted in (*self.include, *self.exclude)))

    @property
    def has_colors(self) -> bool:
        """Is a colour asked for?"""
        return any(wanted.color for wanted in self.include)


def wanted_scene(prompt: ScoredPrompt, who: str) -> Scene:
    """What the prompt's metadata asks for: GenEval's keys `include`, `exclude` and `tag`, or those of `extra_info`.

    Args:
        prompt: of a sample.
        who: the reward, for the message.

    Raises:
        RewardError: there is no `include`, or an entry has another form than GenEval's.
    """
    fields: Any = prompt.metadata
    if "include" not in fields and isinstance(fields.get("extra_info"), Mapping):
        fields = fields["extra_info"]
    try:
        include = [_wanted(entry) for entry in fields.get("include") or ()]
        exclude = [_wanted(entry) for entry in fields.get("exclude") or ()]
        if not include:
            raise ValueError("`include` must list at least one object")
        for number, wanted in enumerate(include):
            if wanted.position and (not 0 <= wanted.position[1] < len(include) or wanted.position[1] == number):
                raise ValueError(f"the position of {wanted.name!r} must name another entry of `include`, from 0")
        if any(wanted.color or wanted.position for wanted in exclude):
            raise ValueError("an entry of `exclude` can have a class and a count only")
    except (TypeError, ValueError) as error:
        raise RewardError(f"{who}: the metadata of the prompt {prompt.prompt!r} is not GenEval's: {error}") from error
    return Scene(fields.get("tag"), tuple(include), tuple(exclude))


def _wanted(entry: Any) -> Wanted:
    """An entry; raises ValueError. A key without a value is one that parquet fills in."""
    given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else {}
    name, count, color, position = (given.get(key) for key in ("class", "count", "color", "position"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"an entry must be like {{class: dog, count: 1}}, not {entry!r}")
    if isinstance(count, bool) or not isinstance(count, int | float) or count % 1 != 0 or count < 1:
        raise ValueError(f"the count of {name!r} must be a whole number from 1, not {count!r}")
    if color is not None and color not in COLORS:
        raise ValueError(f"the color of {name!r} must be one of {', '.join(COLORS)}, not {color!r}")
    return Wanted(name, int(count), color, None if position is None else _position(name, position))


def _position(name: str, position: Any) -> tuple[str, int]:
    match position:
        case [str(relation), int(entry)] if relation in RELATIONS and not isinstance(entry, bool):
            return relation, entry
    raise ValueError(
        f"the position of {name!r} must be a relation ({', '.join(RELATIONS)}) and the number of an entry, not "
        f"{position!r}"
    )


def best_boxes(boxes: Iterable[Box], threshold: float, nms_threshold: float, most: int) -> list[Box]:
    """The boxes above `threshold`, the surest first.

    Args:
        boxes: of one class.
        threshold: a score must be above it.
        nms_threshold: a box whose intersection over union with a surer one is above it is left out; 1 keeps all.
        most: how many are kept.
    """
    kept: list[Box] = []
    for box in sorted((box for box in boxes if box.score > threshold), key=lambda box: -box.score):
        if len(kept) < most and all(overlap(box, other) <= nms_threshold for other in kept):
            kept.append(box)
    return kept


def overlap(a: Box, b: Box) -> float:
    """Intersection over union, 0 for boxes without an area."""
    width, height = min(a.right, b.right) - max(a.left, b.left), min(a.bottom, b.bottom) - max(a.top, b.top)
    shared = max(width, 0) * max(height, 0)
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (a, b)]
    return shared / (sum(areas) - shared) if shared else 0.0


def relations(a: Box, b: Box, position_threshold: float) -> set[str]:
    """Where `a` stands, seen from `b`: none, one or two of `RELATIONS`.

    On each axis the offset of the centres counts as far as it exceeds position_threshold x (size of a + size of b).
    A relation holds where what is left of it is more than half of the distance of the centres.
    """
    across = (a.left + a.right - b.left - b.right) / 2
    down = (a.top + a.bottom - b.top - b.bottom) / 2
    widths, heights = a.right - a.left + b.right - b.left, a.bottom - a.top + b.bottom - b.top
    half = math.hypot(across, down) / 2
    x, y = abs(across) - position_threshold * widths, abs(down) - position_threshold * heights
    found = set()
    if x > half:
        found.add("left of" if across < 0 else "right of")
    if y > half:
        found.add("above" if down < 0 else "below")
    return found


def unmet_conditions(
    scene: Scene,
    found: Mapping[str, Sequence[Box]],
    colors: Mapping[int, Sequence[str]],
    position_threshold: float,
) -> list[str | None]:
    """A line for each condition of the scene: None where it is fulfilled, else what is wrong.

    An entry of `include` is a condition on its count, and one more each for its color and its position, which hold for
    its `count` surest boxes, or do not hold where there are fewer. An entry of `exclude` is one condition; if its class
    is included as well, that entry's count must hold, so that no empty picture fulfils it.

    Args:
        scene: of the prompt.
        found: class -> its boxes, the surest first.
        colors: number of an entry of `include` that has a color -> the colors of its `count` surest boxes.
        position_threshold: see `relations`.
    """
    lines: list[str | None] = []
    chosen = [list(found.get(wanted.name, ()))[: wanted.count] for wanted in scene.include]
    enough = [len(boxes) == wanted.count for boxes, wanted in zip(chosen, scene.include, strict=True)]
    for number, wanted in enumerate(scene.include):
        complete = enough[number]
        lines.append(None if complete else f"{wanted.name}: {len(chosen[number])}, not {wanted.count}")
        if wanted.color:
            wrong = [color for color in colors.get(number, ()) if color != wanted.color]
            right = complete and not wrong
            lines.append(None if right else f"{wanted.name}: {', '.join(wrong) or 'nothing'}, not {wanted.color}")
        if wanted.position:
            relation, other = wanted.position
            stands = (
                complete
                and enough[other]
                and all(relation in relations(a, b, position_threshold) for a in chosen[number] for b in chosen[other])
            )
            lines.append(None if stands else f"{wanted.name}: not {relation} {scene.include[other].name}")
    for barred in scene.exclude:
        there = len(found.get(barred.name, ()))
        short = any(w.name == barred.name and not e for w, e in zip(scene.include, enough, strict=True))
        lines.append(None if there < barred.count and not short else f"{barred.name}: {there}, below {barred.count}")
    return lines
