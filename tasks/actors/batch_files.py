# SPDX-License-Identifier: Apache-2.0
"""A rollout batch as a file. What this imports is what the start of a process that writes one waits for."""

from pathlib import Path

import numpy as np
import torch

from models.samples.file import write_samples
from models.samples.trajectories import FINITE, LATENTS, PICTURES, Samples


def write_batch(
    file: Path, recorded: Samples, pictures: np.ndarray | None, latents: np.ndarray | None, finite: np.ndarray
) -> None:
    """Write what a rollout worker returned of a batch: pictures, latents [B, ...], finite [B], see `RolloutReply`."""
    outputs = {PICTURES: pictures, LATENTS: latents, FINITE: finite}
    # Ray's arrays are read-only, which torch warns about.
    given = {name: torch.from_numpy(np.array(array)) for name, array in outputs.items() if array is not None}
    write_samples(file, recorded, given)
