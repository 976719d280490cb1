# SPDX-License-Identifier: Apache-2.0
"""Brightness, and the checker of colours, shapes and counts against pictures drawn by PIL."""

import math

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, get_reward
from tasks.rewards.shapes import COLOURS, SHAPES, Scene, objects, wanted_scene

RGB = {
    "black": (20, 20, 20),
    "grey": (128, 128, 128),
    "white": (250, 250, 250),
    "red": (220, 40, 40),
    "orange": (240, 140, 20),
    "yellow": (240, 220, 40),
    "green": (40, 170, 60),
    "cyan": (40, 200, 210),
    "blue": (40, 80, 220),
    "purple": (150, 50, 190),
}
PAPER = (190, 175, 150)


def prompt_of(text: str, **metadata) -> Prompt:
    return Prompt("uid", text, None, metadata, "")


def drawn(*things: tuple[str, str, tuple[int, int], float], radius: int = 12, paper=PAPER) -> np.ndarray:
    """Things (colour, shape, centre, degrees turned) on paper: uint8 [96, 128, 3]."""
    picture = Image.new("RGB", (128, 96), paper)
    draw = ImageDraw.Draw(picture)
    for colour, shape, (x, y), turned in things:
        if shape == "circle":
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=RGB[colour])
            continue
        corners = {"triangle": 3, "square": 4}[shape]
        angles = [math.radians(turned + 360 * k / corners) for k in range(corners)]
        draw.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=RGB[colour])
    return np.asarray(picture)


def test_brightness_is_mean_luma():
    images = np.zeros((3, 4, 6, 3), np.uint8)
    images[1] = 255
    images[2, :, :3, 1] = 255  # half of it green
    found = get_reward("brightness")(images, [prompt_of("p")] * 3).scores
    assert found == pytest.approx([0, 1, 0.587 / 2], rel=1e-6)


def test_every_colour_and_shape_is_told_apart_however_it_is_turned():
    assert set(RGB) == set(COLOURS)
    for colour in COLOURS:
        for shape in SHAPES:
            for turned in range(0, 120, 10):
                for radius in (10, 12, 25):
                    picture = drawn((colour, shape, (60, 50), turned), radius=radius)
                    assert objects(picture, 40, 12) == [(colour, shape)], (colour, shape, turned, radius)


def test_the_score_counts_what_is_right_and_what_is_too_much():
    red = [("red", "circle", (20 + 40 * i, 30), 0.0) for i in range(3)]
    blue = ("blue", "square", (60, 75), 10.0)
    images = np.stack([drawn(*red), drawn(*red[:2]), drawn(*red, blue), drawn(blue), drawn(), drawn(*red[:1], blue)])
    wanted = [prompt_of("three red circles")] * 5 + [prompt_of("a red circle")]
    result = get_reward("shapes")(images, wanted)
    assert result.scores == pytest.approx([1, 2 / 3, 2 / 3, 0, 0, 0])
    assert result.details["exact"] == [1, 0, 0, 0, 0, 0]
    assert result.details["found"][2] == "1 blue square, 3 red circle"
    two = get_reward("shapes")(images[1:2], [prompt_of("p", count=2, colour="red", shape="circle")])
    assert two.scores.tolist() == [1]


def test_specks_and_faint_marks_are_not_objects():
    picture = drawn(("green", "square", (60, 50), 0.0)).copy()
    picture[5:8, 5:8] = 0
    picture[80:95, 5:25] = np.array(PAPER) + 30
    assert objects(picture, 40, 12) == [("green", "square")]
    assert len(objects(picture, 40, 9)) == 2
    assert len(objects(picture, 20, 12)) == 2
    line = drawn()
    line = line.copy()
    line[40:44, 10:110] = 0
    assert objects(line, 40, 12) == [("black", "other")]


@pytest.mark.parametrize(
    ("text", "scene"),
    [
        ("three red circles", Scene(3, "red", "circle")),
        ("A photo of 12 gray squares.", Scene(12, "grey", "square")),
        ("one Purple triangle", Scene(1, "purple", "triangle")),
    ],
)
def test_the_wanted_scene_stands_in_the_prompt(text, scene):
    assert wanted_scene(prompt_of(text)) == scene


def test_a_count_of_the_metadata_is_a_whole_number_however_a_table_keeps_it():
    """A column of numbers in which one is missing is of floats to pandas."""
    asked = {"colour": "red", "shape": "circle"}
    for count in (3, 3.0, "3", "three"):
        assert wanted_scene(prompt_of("circles", count=count, **asked)) == Scene(3, "red", "circle")
    for count in (None, 2.5, float("nan"), float("inf"), "\u00b2", [3], {}, 0, -1.0):
        with pytest.raises(RewardError, match="must name one count"):
            wanted_scene(prompt_of("circles", count=count, **asked))


@pytest.mark.parametrize("text", ["red circles", "three circles", "three red dogs", "two red and blue circles"])
def test_a_prompt_without_a_scene_is_an_error_and_no_zero(text):
    with pytest.raises(RewardError, match=f"the prompt '{text}' .* must name one count, one colour"):
        get_reward("shapes")(drawn()[None], [prompt_of(text)])
    with pytest.raises(RewardError, match="contrast is 0; it should be greater than or equal to 1"):
        get_reward("shapes", contrast=0)
