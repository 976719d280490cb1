# SPDX-License-Identifier: Apache-2.0
"""Does the picture show so many objects of that colour and shape? Decided by exact rules, with no model to fool.

For plain objects on a plain background, as synthetic training pictures show them.
"""

import colorsys
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

NUMBERS = ("a", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
HUES = ((15, "red"), (45, "orange"), (70, "yellow"), (165, "green"), (200, "cyan"), (260, "blue"), (345, "purple"))
"""Upper ends of the hues of each colour, in degrees; above the last it is red again."""
COLOURS = ("black", "grey", "white", *(name for _, name in HUES))
SHAPES = ("circle", "square", "triangle")
FILLED = {"triangle": (0.40, 0.64), "circle": (0.64, 0.855), "square": (0.855, 1.01)}
"""Share of its smallest turned rectangle that a shape fills: 1/2, pi/4 and 1, up to the roughness of pixels."""
LONGEST = 1.4
PHRASE = re.compile(rf"\b(an|\d+|{'|'.join(NUMBERS)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})s?\b")


@dataclass(frozen=True)
class Scene:
    """So many objects of one kind."""

    count: int
    colour: str
    shape: str


@register_reward("shapes")
class ShapesReward(Reward):
    """max(0, 1 - (|right - count| + others) / count), in [0, 1]: `right` objects of the kind asked for, `others` not.

    1 only for exactly the scene that was asked for. What was asked for is the prompt's metadata `count`, `colour` and
    `shape`, or else stands once in its text: "three red circles". `COLOURS` and `SHAPES` are those that are known. The
    details are `found`, what the picture shows, and `exact`, 1 if it is what was asked for. Objects of 14 pixels and
    more are told apart however they are turned; of smaller ones a turned square may pass for a circle.
    """

    version = "1"
    bounds = (0.0, 1.0)

    def __init__(self, *, contrast: Annotated[int, Field(ge=1, le=255)] = 40, min_pixels: PositiveInt = 12):
        """
        Args:
            contrast: least difference from the background, in any channel (0 to 255), of an object's pixels.
            min_pixels: smaller spots are noise.
        """
        self._contrast, self._min_pixels = contrast, min_pixels

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt asks for a scene."""
        for prompt in prompts:
            wanted_scene(prompt)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Look at every image; raises RewardError for a prompt that asks for no scene."""
        wanted = [wanted_scene(prompt) for prompt in prompts]
        found = [objects(image, self._contrast, self._min_pixels) for image in images]
        scores = [_score(have, want) for have, want in zip(found, wanted, strict=True)]
        texts = [
            ", ".join(f"{n} {colour} {shape}" for (colour, shape), n in sorted(Counter(have).items())) for have in found
        ]
        exact = [int(score == 1) for score in scores]
        return RewardResult(np.array(scores, dtype=np.float32), {"found": texts, "exact": exact})


def wanted_scene(prompt: ScoredPrompt) -> Scene:
    """What a prompt asks for, by its metadata or else by its words.

    Raises:
        RewardError: it names no count, colour or shape that is known, or two of them.
    """
    fields = ("count", "colour", "shape")
    text = prompt.prompt.lower().replace("gray", "grey")
    found = [tuple(prompt.metadata[f] for f in fields)] if set(fields) <= set(prompt.metadata) else PHRASE.findall(text)
    if len(found) == 1:
        number, colour, shape = found[0]
        count = _count(number)
        if count > 0 and colour in COLOURS and shape in SHAPES:
            return Scene(count, colour, shape)
    raise RewardError(
        f"shapes: the prompt {prompt.prompt!r} with metadata {dict(prompt.metadata)} must name one count, one "
        f"colour ({', '.join(COLOURS)}) and one shape ({', '.join(SHAPES)}), as in 'three red circles'"
    )


def objects(image: np.ndarray, contrast: int, min_pixels: int) -> list[tuple[str, str]]:
    """(colour, shape) of each connected region of a uint8 image [H, W, 3] that stands out from its background.

    The background is the median colour of the image's border. A shape that is none of `SHAPES` is "other".
    """
    import cv2

    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    apart = np.abs(image.astype(np.float32) - np.median(border, axis=0).astype(np.float32))
    distance = np.maximum(np.maximum(apart[..., 0], apart[..., 1]), apart[..., 2])
    count, labels = cv2.connectedComponents((distance > contrast).astype(np.uint8), connectivity=8)
    regions = [labels == number for number in range(1, count)]
    return [(_colour(image[r]), _shape(r)) for r in regions if r.sum() >= min_pixels]


def _colour(pixels: np.ndarray) -> str:
    hue, saturation, value = colorsys.rgb_to_hsv(*(np.median(pixels, axis=0) / 255))
    if saturation < 0.25 or value < 0.15:
        return "black" if value < 0.25 else "white" if value > 0.8 else "grey"
    degrees = 360 * hue
    return next((name for end, name in HUES if degrees < end), "red")


def _shape(region: np.ndarray) -> str:
    import cv2

    rows, columns = np.nonzero(region)
    centres = np.stack([columns, rows], 1).astype(np.float32)
    # A rectangle around the pixels' centres lacks half a pixel on each side.
    width, height = (side + 1 for side in cv2.minAreaRect(centres)[1])
    if max(width, height) > LONGEST * min(width, height):
        return "other"
    filled = region.sum() / (width * height)
    return next((name for name, (low, high) in FILLED.items() if low <= filled < high), "other")


def _score(found: Sequence[tuple[str, str]], wanted: Scene) -> float:
    count, colour, shape = astuple(wanted)
    right = sum(kind == (colour, shape) for kind in found)
    return max(0.0, 1 - (abs(right - count) + len(found) - right) / count)


def _count(number: Any) -> int:
    """A whole number in figures, also as 3.0, or in words; 0 for anything else, which metadata may hold."""
    if isinstance(number, float) and number.is_integer():
        return int(number)
    if isinstance(number, int) or (isinstance(number, str) and number.isdecimal()):
        return int(number)
    return 1 if number in ("a", "an") else NUMBERS.index(number) if number in NUMBERS else 0
