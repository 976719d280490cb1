"""The record of an iteration's samples: what is needed to look at any of them, or to draw it again."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import ray

from tasks.rollout import PendingBatch


def first_pictures(batches: Sequence[PendingBatch], count: int) -> list[np.ndarray]:
    """The first `count` pictures of an iteration, uint8 [H, W, 3] each; only the batches that hold them are fetched.

    None where the rewards see latents and nothing is decoded.
    """
    pictures: list[np.ndarray] = []
    for batch in batches:
        if len(pictures) >= count or batch.pictures is None:
            break
        pictures.extend(ray.get(batch.pictures))
    return pictures[:count]


def sample_table(
    samples: pd.DataFrame, advantages: np.ndarray, seed: int, iteration: int, policy_version: int, kept: int
) -> pd.DataFrame:
    """An iteration's samples, with advantage, noise key (seed, iteration, uid, sample_index), policy and picture.

    Args:
        samples: of `Scores`, in the order sampled.
        policy_version: the iteration whose weights sampled.
        kept: so many pictures, the first, are artifacts; `image` is their path and empty for the others.
    """
    paths = [f"pictures/{iteration:06d}/{row:04d}.png" if row < kept else None for row in range(len(samples))]
    return samples.assign(
        advantage=advantages, seed=seed, iteration=iteration, policy_version=policy_version, image=paths
    )
