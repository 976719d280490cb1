# SPDX-License-Identifier: Apache-2.0
"""Are ink and paper of the colours that the prompt names? Measured in the picture, with no model to fool.

For one line of text on plain paper, as the words model draws it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.words_stable_diffusion_3.render import INKS, PAPERS
from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.scored_prompt import ScoredPrompt

PHRASE = re.compile(r"\bin (\w+) on (\w+)")
INK_SHARE = 0.01
"""Of the pixels, those that differ most from the paper are the ink: the edges of letters are mixed with paper."""


@register_reward("ink_and_paper")
class InkAndPaperReward(Reward):
    """(ink right + paper right) / 2, so 0, 0.5 or 1: is each nearer to the colour asked for than to any other?

    Asked for is what stands in the prompt as "in <ink> on <paper>", of the inks and papers of the words model. Paper is
    the picture's median colour, ink the mean colour of the hundredth of its pixels that differs most from it. Where
    that is nearer to the paper than to any ink there is none, and it is wrong. The details are `ink` and `paper`, what
    was found, and `exact`, 1 if both are right.
    """

    version = "1"
    bounds = (0.0, 1.0)

    @classmethod
    def core_seconds(cls, options: Mapping[str, Any], pixels: int) -> float:
        """2.5 ms for 64 x 256 pixels: a median of each channel, so by their number."""
        return 2.5e-3 * pixels / (64 * 256)

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt names one ink and one paper."""
        for prompt in prompts:
            wanted_colours(prompt)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Look at every image; raises RewardError for a prompt that names no known ink and paper."""
        wanted = [wanted_colours(prompt) for prompt in prompts]
        found = [colours(image) for image in images]
        right = [(have[0] == want[0], have[1] == want[1]) for have, want in zip(found, wanted, strict=True)]
        return RewardResult(
            np.array([np.mean(pair) for pair in right], dtype=np.float32),
            {
                "ink": [ink for ink, _ in found],
                "paper": [paper for _, paper in found],
                "exact": [int(all(pair)) for pair in right],
            },
        )


def wanted_colours(prompt: ScoredPrompt) -> tuple[str, str]:
    """Ink and paper that a prompt asks for. Raises RewardError where it names none that are known."""
    found = PHRASE.findall(prompt.prompt)
    if len(found) == 1 and found[0][0] in INKS and found[0][1] in PAPERS:
        return found[0]
    raise RewardError(
        f"ink_and_paper: the prompt {prompt.prompt!r} must say once 'in <ink> on <paper>', with an ink of "
        f"{', '.join(INKS)} and a paper of {', '.join(PAPERS)}"
    )


def colours(image: np.ndarray) -> tuple[str, str]:
    """Names of the nearest ink, "none" where there is none, and of the nearest paper of a uint8 image [H, W, 3]."""
    pixels = image.reshape(-1, 3).astype(np.float32)
    paper = np.median(pixels, axis=0)
    apart = np.linalg.norm(pixels - paper, axis=1)
    count = max(1, round(INK_SHARE * len(pixels)))
    ink = pixels[np.argpartition(apart, -count)[-count:]].mean(axis=0)
    return _nearest(ink, {"none": tuple(paper), **INKS}), _nearest(paper, PAPERS)


def _nearest(colour: np.ndarray, names: Mapping[str, tuple[float, ...]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(colour - np.array(names[name], np.float32))))
