# SPDX-License-Identifier: Apache-2.0
"""GenEval's checks of a picture's objects (arXiv 2310.11513), by a detector and a CLIP model of transformers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Required, Unpack, get_args

import numpy as np

from tasks.rewards.base import RewardResult, register_reward
from tasks.rewards.clip import ClipScore
from tasks.rewards.errors import RewardError
from tasks.rewards.object_checks import (
    COLORS,
    COUNTING,
    TAGS,
    Box,
    Scene,
    best_boxes,
    unmet_conditions,
    wanted_scene,
)
from tasks.rewards.pretrained import REVISIONS, PretrainedOptions, PretrainedReward
from tasks.rewards.scored_prompt import ScoredPrompt

if TYPE_CHECKING:
    from torch import Tensor

Scoring = Literal["strict", "share"]
COCO_WORDS = {"computer mouse": "mouse", "computer keyboard": "keyboard", "tv remote": "remote"}
"""GenEval's words -> COCO's, where a detector does not have GenEval's."""
COLOR_PROMPTS = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
"""GenEval's; a colour is the mean of their embeddings."""
GREY = 128
"""Of the bars that make a crop a square, which CLIP's processor would else cut to one."""


class DetectorOptions(PretrainedOptions, total=False):
    """Options of an `ObjectDetector` that its subclasses hand on; it says what they are."""

    model: Required[str]
    threshold: float
    counting_threshold: float
    max_objects: int
    nms_threshold: float
    classes: Mapping[str, str] | None


class MissingScore(Exception):
    """Why one picture cannot be scored."""


@dataclass(frozen=True)
class _Color:
    """A question to CLIP, in the form that it takes prompts."""

    prompt: str
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ObjectDetector(PretrainedReward):
    """A model for object detection, such as DETR or RT-DETR, whose `id2label` names its classes."""

    architecture = "AutoModelForObjectDetection"

    def __init__(
        self,
        *,
        model: str,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        nms_threshold: float = 1.0,
        classes: Mapping[str, str] | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> None:
        """Load the model.

        Args:
            model, options: see `PretrainedReward`.
            threshold: score above which an object counts as found.
            counting_threshold: that of prompts with the tag `counting`.
            max_objects: of a class, the surest ones.
            nms_threshold: intersection over union above which the less sure of two boxes of a class is left out; 1
                keeps all.
            classes: class of the data set -> label of the detector, where the words differ.
        """
        super().__init__(model=model, **options)
        self._labels = {int(number): str(label) for number, label in self.model.config.id2label.items()}
        self._classes = dict(classes or {})
        self._thresholds, self._overlap, self._most = (threshold, counting_threshold), nms_threshold, max_objects
        self.version += f" threshold={threshold},{counting_threshold} nms={nms_threshold} most={max_objects}"
        self.version += f" classes={sorted(self._classes.items())}" if self._classes else ""

    def load_processor(self, source: str, revision: str | None) -> Any:
        """The one that computes the same with and without torchvision."""
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(source, revision=revision, backend="pil")

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """Thresholds are shares, and classes lead to labels that a folder's detector has."""
        super().check_options(name, options)
        for key in ("threshold", "counting_threshold", "nms_threshold"):
            if key in options and not (_is_number(options[key]) and 0 <= options[key] <= 1):
                raise RewardError(f"reward {name!r}: {key} must be from 0 to 1, not {options[key]!r}")
        most, classes = options.get("max_objects", 1), options.get("classes")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise RewardError(f"reward {name!r}: max_objects must be a whole number from 1, not {most!r}")
        if classes is not None and not (
            isinstance(classes, Mapping) and all(isinstance(label, str) for label in classes.values())
        ):
            raise RewardError(f"reward {name!r}: classes must map the data set's words to the detector's labels")
        labels = labels_of_folder(options["model"])
        unknown = [label for label in (classes or {}).values() if labels is not None and label not in labels]
        if unknown:
            raise RewardError(
                f"reward {name!r}: classes names {unknown[0]!r}, which is no label in the id2label of "
                f"{options['model']}/config.json"
            )

    def detect(self, images: np.ndarray) -> "list[dict[str, list[Box]] | None]":
        """The boxes of each picture by their labels, cut off at its edges; None where a score or a box is not finite.

        Those whose score is above the lower one of both thresholds.

        Args:
            images: uint8 [B, H, W, 3].
        """
        import torch

        made = self.processor(images=list(images), return_tensors="pt").to(self.device)
        inputs = {
            key: value.to(self.model.dtype) if value.is_floating_point() else value for key, value in made.items()
        }
        output = self.model(**inputs)
        output.logits, output.pred_boxes = output.logits.float(), output.pred_boxes.float()
        height, width = images.shape[1:3]
        sizes = torch.tensor([[height, width]] * len(images), device=self.device)
        lowest = min(self._thresholds)
        found = self.processor.post_process_object_detection(output, threshold=lowest, target_sizes=sizes)
        finite = (output.logits.isfinite().flatten(1).all(1) & output.pred_boxes.isfinite().flatten(1).all(1)).tolist()
        limit = torch.tensor([width, height, width, height], device=self.device)
        return [
            self._by_label(one["labels"], one["boxes"].clamp(min=0).minimum(limit), one["scores"]) if sound else None
            for one, sound in zip(found, finite, strict=True)
        ]

    def _by_label(self, labels: "Tensor", boxes: "Tensor", scores: "Tensor") -> dict[str, list[Box]]:
        by_label: dict[str, list[Box]] = {}
        for number, (left, top, right, bottom), score in zip(
            labels.tolist(), boxes.tolist(), scores.tolist(), strict=True
        ):
            by_label.setdefault(self._labels[number], []).append(Box(left, top, right, bottom, score))
        return by_label

    def wanted_boxes(self, scene: Scene, by_label: "Mapping[str, Sequence[Box]]") -> dict[str, list[Box]]:
        """Class -> its boxes that count, the surest first. Raises MissingScore for a class that has no label."""
        known = set(self._labels.values())
        threshold = self._thresholds[scene.tag == COUNTING]
        found = {}
        for name in scene.names:
            label = label_of(name, self._classes, known)
            if label is None:
                raise MissingScore(f"the detector has no label for the class {name!r}")
            found[name] = best_boxes(by_label.get(label, ()), threshold, self._overlap, self._most)
        return found


@register_reward("geneval")
class GenEval(ObjectDetector):
    """Does the picture show the objects that the prompt's metadata asks for: how many, in which colour, and where?

    The keys are GenEval's: `include`, `exclude` and `tag`. The detail `correct` is the strict verdict, and
    `correct_<tag>` that of prompts with the tag; `unmet` says which conditions do not hold.
    """

    bounds = (0.0, 1.0)
    revisions: ClassVar[Mapping[str, str]] = REVISIONS | {"clip": "clip_revision"}

    def __init__(
        self,
        *,
        clip: str | None = None,
        clip_revision: str | None = None,
        position_threshold: float = 0.1,
        scoring: Scoring = "strict",
        **options: Unpack[DetectorOptions],
    ) -> None:
        """Load the detector, and the CLIP model that tells colours.

        Args:
            clip: hub id or folder of a CLIPModel with its processor; without it no prompt may ask for a colour.
            clip_revision: commit of CLIP's hub id.
            position_threshold: share of two boxes' sizes that their centres must be apart to stand in a relation.
            scoring: `strict` is 1 if every condition holds, else 0; `share` is the share of those that hold.
            options: see `ObjectDetector`.
        """
        super().__init__(**options)
        self._position_threshold, self._scoring = position_threshold, scoring
        self._clip: ClipScore | None = None
        self._colors: dict[str, Tensor] = {}
        self.version += f" position={position_threshold} {scoring}"
        if clip is not None:
            shared: Any = {key: options[key] for key in ("device", "dtype", "threads") if key in options}
            self._clip = ClipScore(model=clip, revision=clip_revision, **shared)
            self.version += f" clip=({self._clip.version})"

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """The scoring is known, and the position's threshold a share."""
        super().check_options(name, options)
        scoring, threshold = options.get("scoring", "strict"), options.get("position_threshold", 0.1)
        if scoring not in get_args(Scoring):
            raise RewardError(
                f"reward {name!r}: scoring must be {' or '.join(map(repr, get_args(Scoring)))}, not {scoring!r}"
            )
        if not (_is_number(threshold) and 0 <= threshold < 1):
            raise RewardError(f"reward {name!r}: position_threshold must be from 0 to below 1, not {threshold!r}")

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt has GenEval's metadata, colours have a CLIP model, classes a label where these are known."""
        scenes = [wanted_scene(prompt, name) for prompt in prompts]
        colored = [prompt for prompt, scene in zip(prompts, scenes, strict=True) if scene.has_colors]
        if colored and options.get("clip") is None:
            raise RewardError(
                f"reward {name!r}: {len(colored)} of {len(prompts)} prompts ask for a color, {colored[0].prompt!r} for "
                "example, and clip is missing: give a CLIP model, such as a folder of openai/clip-vit-large-patch14"
            )
        most = options.get("max_objects", 16)
        if any(wanted.count > most for scene in scenes for wanted in (*scene.include, *scene.exclude)):
            raise RewardError(
                f"reward {name!r}: prompts name more objects of a class than max_objects, {most}: raise it"
            )
        labels = labels_of_folder(options["model"])
        if labels is None:
            return
        names = sorted({found for scene in scenes for found in scene.names})
        unknown = [found for found in names if label_of(found, options.get("classes") or {}, labels) is None]
        if unknown:
            raise RewardError(
                f"reward {name!r}: the prompts ask for {', '.join(map(repr, unknown))}, which the id2label of "
                f"{options['model']}/config.json does not have: give the detector's word for each in classes"
            )

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Raises RewardError for a prompt without GenEval's metadata."""
        scenes = [wanted_scene(prompt, self.name) for prompt in prompts]
        rows = [self._row(*each) for each in zip(images, scenes, self.detect(images), strict=True)]
        details: dict[str, list] = {key: [row.get(key) for row in rows] for key in ("correct", "found", "unmet")}
        for tag in TAGS:
            if any(scene.tag == tag for scene in scenes):
                verdicts = zip(details["correct"], scenes, strict=True)
                details[f"correct_{tag}"] = [correct if scene.tag == tag else None for correct, scene in verdicts]
        if any("error" in row for row in rows):
            details["error"] = [row.get("error") for row in rows]
        return RewardResult(np.array([row["score"] for row in rows], np.float32), details)

    def _row(self, image: np.ndarray, scene: Scene, by_label: Mapping[str, Sequence[Box]] | None) -> dict[str, Any]:
        """Score and details of one picture [H, W, 3]."""
        try:
            if by_label is None:
                raise MissingScore("what the detector says is not finite")
            boxes = self.wanted_boxes(scene, by_label)
            asked = {number: wanted for number, wanted in enumerate(scene.include) if wanted.color}
            colors = {n: self.colors(image, w.name, boxes[w.name][: w.count]) for n, w in asked.items()}
        except MissingScore as reason:
            return {"score": math.nan, "error": str(reason)}
        lines = unmet_conditions(scene, boxes, colors, self._position_threshold)
        unmet = [line for line in lines if line is not None]
        share = 1 - len(unmet) / len(lines)
        return {
            "score": share if self._scoring == "share" else float(not unmet),
            "correct": int(not unmet),
            "found": ", ".join(f"{len(found)} {name}" for name, found in boxes.items()),
            "unmet": "; ".join(unmet),
        }

    def colors(self, image: np.ndarray, name: str, boxes: Sequence[Box]) -> list[str]:
        """The colour of each object, which CLIP finds among `COLORS` in the crop of its box [H, W, 3].

        Raises:
            MissingScore: there is no CLIP model, or what it says is not finite.
        """
        if self._clip is None:
            raise MissingScore("a color is asked for, and the option clip is missing")
        if not boxes:
            return []
        if name not in self._colors:
            self._colors[name] = self._color_embeds(self._clip, name)
        likeness = self._clip.image_embeds([square_crop(image, box) for box in boxes]) @ self._colors[name].T
        if not likeness.isfinite().all():
            raise MissingScore("what CLIP says of the colors is not finite")
        return [COLORS[number] for number in likeness.argmax(-1).tolist()]

    @staticmethod
    def _color_embeds(clip: ClipScore, name: str) -> "Tensor":
        """[colours, D]"""
        texts = [_Color(template.format(color=color, name=name)) for color in COLORS for template in COLOR_PROMPTS]
        means = clip.text_embeds(texts).unflatten(0, (len(COLORS), len(COLOR_PROMPTS))).mean(1)
        return means / means.norm(dim=-1, keepdim=True)


def label_of(name: str, classes: Mapping[str, str], labels: "set[str]") -> str | None:
    """The detector's label for a class: as `classes` says, the same word, or COCO's; None where it has none."""
    found = classes.get(name, name if name in labels else COCO_WORDS.get(name))
    return found if found in labels else None


def labels_of_folder(model: str) -> set[str] | None:
    """The labels of a detector that lies in a folder; None of a hub id, and of a config that does not tell."""
    file = Path(model) / "config.json"
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise RewardError(f"geneval: {file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    found = config.get("id2label") if isinstance(config, dict) else None
    if found is None and isinstance(config, dict):
        return None
    if not isinstance(found, dict) or not all(isinstance(label, str) for label in found.values()):
        raise RewardError(f"geneval: {file} has no mapping of numbers to words as id2label: mend it")
    return set(found.values()) or None


def square_crop(image: np.ndarray, box: Box) -> np.ndarray:
    """The pixels that a box touches, at least one, in the middle of a grey square uint8 [S, S, 3].

    Args:
        image: uint8 [H, W, 3].
        box: within the picture.
    """
    height, width = image.shape[:2]
    left, top = min(int(box.left), width - 1), min(int(box.top), height - 1)
    crop = image[top : max(math.ceil(box.bottom), top + 1), left : max(math.ceil(box.right), left + 1)]
    side = max(crop.shape[:2])
    square = np.full((side, side, 3), GREY, np.uint8)
    down, across = (side - crop.shape[0]) // 2, (side - crop.shape[1]) // 2
    square[down : down + crop.shape[0], across : across + crop.shape[1]] = crop
    return square


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
