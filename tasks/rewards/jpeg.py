# SPDX-License-Identifier: Apache-2.0
"""File size as a reward, the classic first test of RL on image models (DDPO, arXiv 2305.13301)."""

from collections.abc import Sequence
from importlib.metadata import version
from io import BytesIO

import numpy as np
from PIL import Image

from tasks.rewards.base import Reward, RewardResult, register_reward
from tasks.rewards.scored_prompt import ScoredPrompt

QUALITY = 95


def jpeg_kilobytes(image: np.ndarray) -> float:
    """Size of a uint8 RGB image [H, W, 3] as a JPEG of quality 95, in units of 1000 bytes."""
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


@register_reward("jpeg_incompressibility")
class JpegIncompressibility(Reward):
    """The size as a JPEG in kB: rises with detail and noise."""

    def __init__(self) -> None:
        """The version names Pillow, whose encoder decides the size."""
        self.version = f"1 pillow=={version('pillow')}"

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Positive sizes; the prompts do not matter."""
        return RewardResult(np.array([jpeg_kilobytes(image) for image in images], dtype=np.float32))


@register_reward("jpeg_compressibility")
class JpegCompressibility(JpegIncompressibility):
    """Minus the size as a JPEG in kB: rises as the picture gets plainer."""

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Negative sizes; the prompts do not matter."""
        return RewardResult(-super().score(images, prompts).scores)
