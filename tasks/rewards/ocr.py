# SPDX-License-Identifier: Apache-2.0
"""Does the picture show the text it should? Read by RapidOCR, compared by edit distance."""

import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.rapid_ocr import CUDA, READER, DetLimitType
from tasks.rewards.scored_prompt import ScoredPrompt

Target = Literal["column", "quoted"]
"""Where the wanted text is: in the prompt's `target`, or between double quotes in the prompt."""

DETECTION_S_A_PIXEL, LEAST_DETECTED = 1.6e-7, 736**2
"""What a core takes for a pixel that is looked at (docs/recipes.md); and the fewest of a square with `det_limit_type`
min."""
LINE_S = 0.01


@register_reward("ocr")
class OcrReward(Reward):
    """1 - min(edit distance, n) / n between the text read and the target of n characters, so in [0, 1].

    Case and white space do not count. The details are `text`, what was read, and `exact`, 1 if it is the target.
    Needs RapidOCR, whose wheel holds the models. Measured on one core: 6 ms for a picture of 24x48 pixels without
    detection.
    """

    bounds = (0.0, 1.0)
    packages: ClassVar[Mapping[str, str]] = {
        READER.module: READER.package,
        "onnxruntime": "onnxruntime",
        "cv2": "opencv-python",
    }

    @classmethod
    def core_seconds(cls, options: Mapping[str, Any], pixels: int) -> float | None:
        """With detection 0.042 s for 512 x 512 and 0.14 for 704 x 1280, as they are enlarged; a line 6 to 13 ms.

        On a GPU it was not measured.
        """
        if options.get("device") == "cuda":
            return None
        if not options.get("detect", False):
            return LINE_S
        enlarged = pixels * options.get("upscale", 2) ** 2
        least = LEAST_DETECTED if options.get("det_limit_type") == "min" else 0
        return DETECTION_S_A_PIXEL * max(enlarged, least)

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """This environment's onnxruntime is one for GPUs, where one is asked for."""
        if options.get("device") != "cuda":
            return
        from onnxruntime import get_available_providers

        if CUDA not in get_available_providers():
            raise RewardError(
                f"reward {name!r}: the option device is cuda, but the onnxruntime of {sys.prefix} is one for CPUs: "
                "install onnxruntime-gpu there in its place, or set device to cpu"
            )

    def __init__(
        self,
        *,
        target: Target = "column",
        substring_is_full: bool = False,
        detect: bool = False,
        det_limit_type: DetLimitType = "max",
        upscale: PositiveInt = 2,
        rec_image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (3, 48, 96),
        threads: PositiveInt = 1,
        device: Literal["cpu", "cuda"] = "cpu",
    ):
        """
        Args:
            target: where the wanted text is: in the prompt's `target`, or between double quotes in the prompt.
            substring_is_full: the full score if the target stands anywhere in what was read, as Flow-GRPO has it.
            detect: find the text in the picture first. Without it the picture as a whole is taken for one line, which
                is right for small pictures and several times faster.
            det_limit_type: "max" looks for it in the picture as it is, as PaddleOCR does unless it is told otherwise;
                "min" in one that is enlarged until its shorter side has 736 pixels, as RapidOCR does.
            upscale: pictures are enlarged so many times (bicubic) before they are read; RapidOCR wants 48 pixel lines.
            rec_image_shape: (channels, height, least width in pixels) of the recogniser's input. Narrow pictures are
                padded up to the width, so a smaller one is faster.
            threads: threads of onnxruntime.
            device: "cuda" reads on the GPU that the reward's `placement` or `num_gpus` gives it, and needs
                onnxruntime-gpu in place of onnxruntime.

        Raises:
            RewardError: there is no GPU to read on.
        """
        self._target = target
        self._substring_is_full = substring_is_full
        self._detect = detect
        self._upscale = upscale
        self._reader = READER(threads, rec_image_shape, det_limit_type)
        if detect:
            self._reader.keep_buffers()
        import onnxruntime  # its package has one of two names

        package = f"{self._reader.package}=={version(self._reader.package)}"
        self.version = f"2 {package} onnxruntime=={onnxruntime.__version__}"
        if detect and det_limit_type == "max":
            self.version += " det_limit_type=max"  # there was min alone
        if device == "cuda":
            self._reader.use_gpu()
            self.version += " on CUDA"  # rounds otherwise

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt says what is to be read."""
        check_wanted(name, options, prompts)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Read every image and compare; raises RewardError for a prompt without a target."""
        wanted = [wanted_text(prompt, self._target, self.name) for prompt in prompts]
        pictures = [self._enlarged(image) for image in images]
        if self._detect:
            texts = [" ".join(self._reader.find(picture)) for picture in pictures]
        else:
            texts = self._reader.read_lines(pictures)
        return compared(texts, wanted, self._substring_is_full)

    def _enlarged(self, image: np.ndarray) -> np.ndarray:
        import cv2

        height, width = (self._upscale * side for side in image.shape[:2])
        # RapidOCR was trained on OpenCV's channel order.
        return cv2.resize(image[:, :, ::-1].copy(), (width, height), interpolation=cv2.INTER_CUBIC)


def compared(texts: Sequence[str], wanted: Sequence[str], substring_is_full: bool = False) -> RewardResult:
    """Scores of what was read of each picture against the plain text that was wanted, with `text` and `exact`."""
    scores = [text_similarity(got, want, substring_is_full) for got, want in zip(texts, wanted, strict=True)]
    exact = [int(plain_text(got) == want) for got, want in zip(texts, wanted, strict=True)]
    return RewardResult(np.array(scores, dtype=np.float32), {"text": list(texts), "exact": exact})


def wanted_text(prompt: ScoredPrompt, where: Target, reward: str) -> str:
    """The text that the picture of a prompt should show, plain; RewardError of `reward` where there is none."""
    quoted = " ".join(re.findall(r'"([^"]*)"', prompt.prompt))
    text = plain_text((prompt.target or "") if where == "column" else quoted)
    if not text:
        lacking = "target (see prompts.target_pattern)" if where == "column" else "text in double quotes"
        raise RewardError(f"{reward}: the prompt {prompt.prompt!r} has no {lacking}, so nothing says what to read")
    return text


def check_wanted(reward: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
    """Raise RewardError of `reward`, with these options, for a prompt that does not say what to read."""
    where = options.get("target", "column")
    for prompt in prompts:
        wanted_text(prompt, where, reward)


def text_similarity(read: str, wanted: str, substring_is_full: bool = False) -> float:
    """1 - min(edit distance, n) / n of what was read and the plain text of n characters that was wanted.

    With `substring_is_full` 1 also where the wanted text stands anywhere in what was read.
    """
    got = plain_text(read)
    if substring_is_full and wanted in got:
        return 1.0
    return 1 - min(edit_distance(got, wanted), len(wanted)) / len(wanted)


def plain_text(text: str) -> str:
    """Without white space, in lower case, and with one character for a letter and its marks where Unicode has one."""
    return unicodedata.normalize("NFC", "".join(text.split()).lower())


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the least number of inserted, removed and replaced characters from `a` to `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
    return row[-1]
