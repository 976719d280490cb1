# SPDX-License-Identifier: Apache-2.0
"""GenEval's checks: on boxes drawn by hand, and by a small random DETR and CLIP against direct forwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, CLIPModel, DetrForObjectDetection, DetrImageProcessorPil

from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, check_reward, get_reward
from tasks.rewards.geneval import GenEval, square_crop
from tasks.rewards.object_checks import COLORS, Box, best_boxes, overlap, relations, unmet_conditions, wanted_scene
from tests.support.tiny_judges import save_clip, save_detr

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 40, 60, 3), dtype=np.uint8)
IMAGES[1] //= 8  # a dark one, and one of one colour: a random CLIP takes all noise for the same
IMAGES[2, ..., :2] = 255
DOG, REMOTE = {"class": "dog", "count": 1}, {"class": "tv remote", "count": 1}


def prompt(*include: dict, tag: str = "two_object", exclude: tuple[dict, ...] = ()) -> Prompt:
    fields = {"tag": tag, "include": list(include)} | ({"exclude": list(exclude)} if exclude else {})
    return Prompt("uid", "a photo", None, fields, "")


def square(x: float, y: float, score: float = 0.95, size: float = 10) -> Box:
    """Around a centre."""
    return Box(x - size / 2, y - size / 2, x + size / 2, y + size / 2, score)


def unmet(asked: Prompt, found: dict, colors: dict | None = None) -> list[str | None]:
    return unmet_conditions(wanted_scene(asked, "geneval"), found, colors or {}, 0.1)


@pytest.fixture(scope="module")
def detr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_detr(tmp_path_factory.mktemp("detr"), "dog", "N/A", "remote")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        ((-30, 0), {"left of"}),
        ((30, 0), {"right of"}),
        ((0, -30), {"above"}),
        ((0, 30), {"below"}),
        ((30, 30), {"right of", "below"}),
        # Two boxes of 10 pixels: the first two pixels do not count, and what is left must be more than half the way.
        ((2, 0), set()),
        ((4, 0), set()),
        ((4.1, 0), {"right of"}),
        ((30, 12), {"right of"}),
        ((0, 0), set()),
    ],
)
def test_a_relation_is_where_the_centres_are_apart(offset: tuple[float, float], said: set[str]) -> None:
    assert relations(square(50 + offset[0], 50 + offset[1]), square(50, 50), 0.1) == said


def test_boxes_count_by_their_score_their_overlap_and_their_number() -> None:
    sure, half, far, weak = square(10, 10, 0.9), square(15, 10, 0.8), square(50, 50, 0.7), square(80, 80, 0.3)
    boxes = [weak, far, half, sure]
    assert overlap(sure, half) == pytest.approx(1 / 3)
    assert overlap(sure, far) == 0
    assert best_boxes(boxes, 0.3, 1.0, 16) == [sure, half, far]
    assert best_boxes(boxes, 0.2, 0.3, 16) == [sure, far, weak]
    assert best_boxes(boxes, 0.0, 1.0, 2) == [sure, half]


def test_a_count_holds_between_include_and_exclude() -> None:
    asked = prompt({"class": "dog", "count": 2}, tag="counting", exclude=({"class": "dog", "count": 3},))
    dogs = [square(10 * n, 10) for n in range(4)]
    assert unmet(asked, {"dog": dogs[:2]}) == [None, None]
    assert unmet(asked, {"dog": dogs[:3]}) == [None, "dog: 3, below 3"]
    # A picture with too few fulfils neither: an empty one would have half of the share.
    assert unmet(asked, {"dog": dogs[:1]}) == ["dog: 1, not 2", "dog: 1, below 3"]
    assert unmet(asked, {}) == ["dog: 0, not 2", "dog: 0, below 3"]
    other = prompt(DOG, exclude=({"class": "cat", "count": 1},))
    assert unmet(other, {"dog": dogs}) == [None, None]
    assert unmet(other, {"dog": dogs, "cat": dogs[:1]}) == [None, "cat: 1, below 1"]


def test_colors_and_positions_hold_for_the_surest_boxes() -> None:
    red, left = DOG | {"color": "red"}, DOG | {"position": ["left of", 0]}
    assert unmet(prompt(red), {"dog": [square(1, 1)]}, {0: ["red"]}) == [None, None]
    assert unmet(prompt(red), {"dog": [square(1, 1)]}, {0: ["blue"]}) == [None, "dog: blue, not red"]
    assert unmet(prompt(red), {}, {0: []}) == ["dog: 0, not 1", "dog: nothing, not red"]
    asked, remote = prompt(REMOTE, left), square(50, 50)
    assert unmet(asked, {"tv remote": [remote], "dog": [square(10, 50)]}) == [None, None, None]
    wrong = [None, None, "dog: not left of tv remote"]
    assert unmet(asked, {"tv remote": [remote], "dog": [square(90, 50), square(10, 50, 0.5)]}) == wrong
    assert unmet(asked, {"dog": [square(10, 50)]}) == ["tv remote: 0, not 1", *wrong[1:]]


def test_a_crop_is_a_square_with_the_box_in_its_middle() -> None:
    crop = square_crop(IMAGES[0], Box(10.2, 5, 18, 7.5, 1))
    assert crop.shape == (8, 8, 3)
    assert (crop[2:5] == IMAGES[0, 5:8, 10:18]).all()
    assert (crop[[0, 1, 5, 6, 7]] == 128).all()
    assert (square_crop(IMAGES[0], Box(60, 40, 60, 40, 1)) == IMAGES[0, 39:, 59:]).all()


@torch.no_grad()
def test_boxes_and_colors_are_those_of_direct_forwards(detr: Path, clip: Path) -> None:
    model, processor = DetrForObjectDetection.from_pretrained(detr).eval(), DetrImageProcessorPil.from_pretrained(detr)
    reward = get_reward("geneval", model=str(detr), clip=str(clip), threshold=0.0, counting_threshold=0.5)
    assert isinstance(reward, GenEval)
    colorist, texts = CLIPModel.from_pretrained(clip).eval(), AutoProcessor.from_pretrained(clip)
    templates = ("a photo of a {} dog", "a photo of a {}-colored dog", "a photo of a {} object")
    counts, told = [], []
    for image, found in zip(IMAGES, reward.detect(IMAGES), strict=True):
        output = model(**processor(images=[image], return_tensors="pt"))
        scores, labels = output.logits[0].softmax(-1)[:, :-1].max(-1)
        across, down, width, height = (output.pred_boxes[0] * torch.tensor([60, 40, 60, 40])).T
        corners = torch.stack([across - width / 2, down - height / 2, across + width / 2, down + height / 2], 1)
        corners = corners.clamp(min=0).minimum(torch.tensor([60, 40, 60, 40]))
        for number, label in enumerate(("dog", "N/A", "remote")):
            expected = torch.cat([corners, scores[:, None]], 1)[labels == number]
            assert np.array(found.get(label, np.zeros((0, 5)))) == pytest.approx(expected.numpy(), abs=1e-4)
        assert np.ptp(corners.numpy(), axis=0).max() > 1, "objects stand apart"
        dogs = sorted(found["dog"], key=lambda box: -box.score)
        counts.append(len(dogs))
        inputs = texts(
            text=[text.format(color) for text in templates for color in COLORS],
            images=[square_crop(image, dogs[0])],
            padding=True,
            truncation=True,
            max_length=20,
            return_tensors="pt",
        )
        answer = colorist(**inputs)
        likeness = torch.nn.functional.normalize(answer.text_embeds.unflatten(0, (3, -1)).mean(0), dim=-1)
        told.append(COLORS[int((likeness @ answer.image_embeds[0]).argmax())])
    assert len(set(told)) > 1, "of several colors"
    assert any(0 < count < 8 for count in counts), "not all objects are of one class"
    # The reward says of each picture what its boxes and crops say.
    red = [prompt(DOG | {"color": told[0]}, tag="colors")] * 3
    result = reward(IMAGES, red)
    assert result.scores.tolist() == [float(color == told[0]) for color in told]
    assert result.details["correct_colors"] == result.details["correct"] == [int(score) for score in result.scores]
    means = answer.text_embeds.unflatten(0, (3, -1))
    assert reward._colors["dog"] == pytest.approx(torch.nn.functional.normalize(means.mean(0), dim=-1), abs=1e-5)
    assert reward._colors["dog"] != pytest.approx(means[0], abs=1e-3), "one of the three texts says something else"
    # A prompt with the tag `counting` wants surer boxes; GenEval's words are taken for COCO's.
    many = [{"class": "dog", "count": 9}]
    both = [prompt(*many, REMOTE), prompt(*many, tag="counting")]
    result = get_reward("geneval", model=str(detr), threshold=0.0, counting_threshold=1.0, scoring="share")(
        IMAGES[[0, 0]], both
    )
    remotes = len(reward.detect(IMAGES[:1])[0].get("remote", ()))
    assert result.details["found"] == [f"{counts[0]} dog, {remotes} tv remote", "0 dog"]
    assert result.scores.tolist() == [0.5 * (remotes > 0), 0]
    assert result.details["correct_counting"] == [None, 0]


def test_what_cannot_be_checked_is_missing_with_its_reason(detr: Path) -> None:
    reward = get_reward("geneval", model=str(detr))
    result = reward(IMAGES, [prompt(DOG), prompt({"class": "couch", "count": 1}), prompt(DOG | {"color": "red"})])
    assert np.isnan(result.scores).tolist() == [False, True, True]
    assert result.details["error"] == [
        None,
        "the detector has no label for the class 'couch'",
        "a color is asked for, and the option clip is missing",
    ]
    reward.model.class_labels_classifier.bias.data[0] = torch.nan
    result = reward(IMAGES[:1], [prompt(DOG)])
    assert np.isnan(result.scores).all()
    assert result.details["error"] == ["what the detector says is not finite"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scoring": "soft"}, "scoring must be 'strict' or 'share', not 'soft'"),
        ({"threshold": 30}, "threshold must be from 0 to 1, not 30"),
        ({"position_threshold": 1}, "position_threshold must be from 0 to below 1, not 1"),
        ({"max_objects": 0}, "max_objects must be a whole number from 1, not 0"),
        ({"classes": {"couch": "sofa"}}, r"classes names 'sofa', which is no label in the id2label of \S+config.json"),
        ({"clip": "openai/clip-vit-large-patch14"}, "it is a hub id, and clip_revision is missing"),
    ],
)
def test_unusable_options_are_refused_before_anything_is_loaded(detr: Path, options: dict, said: str) -> None:
    with pytest.raises(RewardError, match=f"reward 'geneval': .*{said}"):
        check_reward("geneval", model=str(detr), **options)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (prompt(), "is not GenEval's: `include` must list at least one object"),
        (prompt({"count": 1}), "an entry must be like {class: dog, count: 1}, not {'count': 1}"),
        (prompt({"class": "dog", "count": 0}), "the count of 'dog' must be a whole number from 1, not 0"),
        (prompt(DOG | {"color": "grey"}), "the color of 'dog' must be one of red, .*, not 'grey'"),
        (prompt(DOG | {"position": ["near", 0]}), r"the position of 'dog' must be a relation .*, not \['near', 0\]"),
        (prompt(DOG | {"position": ["above", 0]}), "the position of 'dog' must name another entry of `include`"),
        (prompt(DOG, exclude=(DOG | {"color": "red"},)), "an entry of `exclude` can have a class and a count only"),
        (prompt(DOG | {"color": "red"}), "1 of 2 prompts ask for a color, 'a photo' for example, and clip is missing"),
        (prompt({"class": "dog", "count": 17}), "more objects of a class than max_objects, 16: raise it"),
        (prompt({"class": "couch", "count": 1}), "the prompts ask for 'couch', which the id2label of .* does not have"),
    ],
)
def test_prompts_that_cannot_be_scored_are_refused_before_anything_is_loaded(
    detr: Path, asked: Prompt, said: str
) -> None:
    options = {"model": str(detr)}
    GenEval.check_prompts("geneval", options, [prompt(DOG, REMOTE)])
    with pytest.raises(RewardError, match=said):
        GenEval.check_prompts("geneval", options, [prompt(DOG), asked])


def test_the_metadata_may_come_through_parquet_and_extra_info() -> None:
    """Parquet fills in the keys that other rows have."""
    row = {"class": "dog", "count": 2, "color": None, "position": None}
    plain = wanted_scene(prompt(row), "geneval")
    assert plain == wanted_scene(prompt({"class": "dog", "count": 2.0}), "geneval")
    inner = Prompt("uid", "a photo", None, {"extra_info": {"tag": "two_object", "include": [row]}}, "")
    assert wanted_scene(inner, "geneval") == plain
