# SPDX-License-Identifier: Apache-2.0
"""What pictures look like, in numbers that no reward model gives: they move where a policy games its reward."""

from typing import NamedTuple

import numpy as np
from PIL import Image

EDGE = 0.1
THUMBNAIL = 8
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
DIVERSITY = "diversity"
GUARDS = ("edge_density", "saturation", DIVERSITY)
"""Those whose fall says something. Entropy falls with the noise of a plain background, in every run that draws better:
the quickstart's pictures begin at 4.1 bits, and what its base model learnt from has 2.1."""


class PictureStatistics(NamedTuple):
    """Of a batch.

    Attributes:
        values: "edge_density", "entropy" and "saturation" -> float32 [B], of each picture by itself.
        thumbnails: float32 [B, 8, 8, 3] in [0, 1], the small copies that `diversity` compares.
    """

    values: dict[str, np.ndarray]
    thumbnails: np.ndarray


def picture_statistics(pictures: np.ndarray) -> PictureStatistics:
    """What is measured of pictures.

    Args:
        pictures: uint8 RGB [B, H, W, 3], or [B, F, H, W, 3]: the mean over a video's frames.
    """
    frames = pictures[:, None] if pictures.ndim == 4 else pictures
    measures = {"edge_density": edge_density, "entropy": entropy, "saturation": saturation}
    values = {
        name: np.array([np.mean([measure(frame) for frame in video]) for video in frames], np.float32)
        for name, measure in measures.items()
    }
    thumbnails = np.stack([np.mean([thumbnail(frame) for frame in video], axis=0) for video in frames])
    return PictureStatistics(values, thumbnails)


def luma(picture: np.ndarray) -> np.ndarray:
    """Brightness [H, W] in [0, 1] of a uint8 picture [H, W, 3]."""
    return picture.astype(np.float32) @ LUMA / 255


def edge_density(picture: np.ndarray) -> float:
    """Share of the pixels of a picture [H, W, 3] from which brightness changes by more than a tenth of its range to the
    right or down one pixel.

    The change is the length of both differences together; the last row and column have none and do not count.
    """
    grey = luma(picture)
    across, down = np.diff(grey, axis=1)[:-1], np.diff(grey, axis=0)[:, :-1]
    return float(np.mean(across**2 + down**2 > EDGE**2))


def entropy(picture: np.ndarray) -> float:
    """Shannon entropy in bits of the brightness of a picture [H, W, 3] in 256 levels: 0 for a plain one, at most 8."""
    counts = np.bincount((luma(picture) * 255).round().astype(int).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def saturation(picture: np.ndarray) -> float:
    """Mean HSV saturation of a picture [H, W, 3], (max - min) / max of a pixel's channels: 0 for grey, at most 1."""
    red, green, blue = np.moveaxis(picture, -1, 0)  # channel by channel is ten times faster than .max(-1)
    high, low = (reduce(reduce(red, green), blue).astype(np.float32) for reduce in (np.maximum, np.minimum))
    return float(np.mean((high - low) / np.maximum(high, 1)))


def thumbnail(picture: np.ndarray) -> np.ndarray:
    """The picture averaged down to float32 [8, 8, 3] in [0, 1]."""
    small = Image.fromarray(picture).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255


def diversity(thumbnails: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """How much the pictures of a group differ: float32 [B], the same for all of a group, NaN for a group of one.

    The root of the variance (ddof 1) among the group, mean over the thumbnails' pixels and channels: the root mean
    square distance of two of its pictures, divided by the root of two. Falls to 0 as a policy draws one picture only.

    Args:
        thumbnails: [B, 8, 8, 3].
        uids: [B]; the samples of equal uids are a group.
    """
    result = np.full(len(uids), np.nan, dtype=np.float32)
    for uid in np.unique(uids):
        group = uids == uid
        if group.sum() > 1:
            result[group] = np.sqrt(thumbnails[group].astype(np.float64).var(axis=0, ddof=1).mean())
    return result
