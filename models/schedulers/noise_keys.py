# SPDX-License-Identifier: Apache-2.0
"""Noise keys: every random draw has a name, so any worker can draw it again.

The noise of a step is drawn in fp32 on the CPU by a generator seeded from (run seed, iteration, prompt uid, sample
index, step). A retry, a resume, another number of workers or another batch order then gives the same trajectory.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

INITIAL_NOISE = -1
"""The `step` of the draw that starts a trajectory."""
FORWARD_LEVELS = -2
"""The `step` of the draw of the noise levels at which a finished sample is trained."""
FORWARD_NOISE = -3
"""The `step` of the noise at the first of those levels; the following levels count down from it."""
WHOLE_GROUP = -1
"""The `sample_index` of a draw that the samples of a prompt share."""


@dataclass(frozen=True, order=True)
class NoiseKey:
    """Names one trajectory's noise.

    Attributes:
        seed: the run's seed.
        iteration: training iteration, or a fixed negative number for validation (every checkpoint the same noise).
        prompt_uid: the prompt's identifier in the data set.
        sample_index: which of the prompt's samples; WHOLE_GROUP is what they share.
    """

    seed: int
    iteration: int
    prompt_uid: str
    sample_index: int

    def of_group(self) -> Self:
        """The key of what all samples of the prompt share: the same for each of them, wherever it is."""
        return replace(self, sample_index=WHOLE_GROUP)

    def seed_of(self, step: int) -> int:
        """A 63-bit seed for one step's draw; sha256, because Python's own hash differs from process to process.

        torch's CPU generator keeps the lower 32 of its bits. Of n draws about n^2 / 2^33 pairs then share their noise:
        .02 in an iteration of 1152 samples with 11 draws each. More bits would change every draw there has been.
        """
        name = f"{self.seed}/{self.iteration}/{self.prompt_uid}/{self.sample_index}/{step}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def generators(keys: Sequence[NoiseKey], step: int) -> list[torch.Generator]:
    """One CPU generator a sample, for diffusers' `generator=` arguments; `step` INITIAL_NOISE starts the path."""
    return [torch.Generator().manual_seed(key.seed_of(step)) for key in keys]


def draw(keys: Sequence[NoiseKey], step: int, shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Unit Gaussian noise [len(keys), *shape], fp32, one named draw a key: independent, and equal for equal keys."""
    own, place = distinct(keys)
    rows = torch.empty(len(own), *shape)
    for row, generator in zip(rows, generators(own, step), strict=True):
        torch.randn(tuple(shape), generator=generator, out=row)
    return copy_without_waiting(rows if place is None else rows[place], device)


def distinct(keys: Sequence[NoiseKey]) -> tuple[list[NoiseKey], torch.Tensor | None]:
    """Each key once, and for each of `keys` which of these it is, [n]; None where none is there twice, as where the
    samples of a prompt share theirs."""
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [*place], torch.tensor([place[key] for key in keys]) if len(place) < len(keys) else None


def copy_without_waiting(rows: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The rows [...] on a device. A GPU takes it when it comes to it, and the CPU goes on: from memory that may be
    swapped out it would have to wait for all that the GPU was asked for before."""
    leaves = rows.device.type == "cpu" and torch.device(device).type == "cuda"
    return (rows.pin_memory() if leaves else rows).to(device, non_blocking=True)
