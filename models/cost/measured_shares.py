# SPDX-License-Identifier: Apache-2.0
"""Which share of a GPU's peak whole stages were measured to reach, on one H200 in bf16 (benchmarks/RESULTS.md)."""

import math
from dataclasses import dataclass

from models.cost.device_peaks import BFLOAT16, peak_tflops

MEASURED_ON = "NVIDIA H200"


@dataclass(frozen=True)
class MeasuredWork:
    """A model's iteration, as the tables of benchmarks/RESULTS.md have it.

    Attributes:
        name: of the model, for the message.
        forward: 1e12 operations of one forward of one sample: larger ones fill a GPU better.
        compiled: were its blocks compiled?
        graphs: did the rollout replay CUDA graphs?
        rollout: (1e12 operations, seconds) of its denoising, its decoding in the seconds.
        update: the same of forward and backward.
        reference: the same of forwards without gradient in the trainer; None where it had none.
    """

    name: str
    forward: float
    compiled: bool
    graphs: bool
    rollout: tuple[float, float]
    update: tuple[float, float]
    reference: tuple[float, float] | None = None

    def shares(self) -> "Shares":
        """Shares of the data sheet's peak."""
        peak = peak_tflops(MEASURED_ON, BFLOAT16)
        if peak is None:
            raise KeyError(f"{MEASURED_ON} is not in the table of peaks")
        rollout, update = (work / seconds / peak for work, seconds in (self.rollout, self.update))
        work, seconds = self.reference or self.rollout
        return Shares(self, rollout, update, work / seconds / peak)


@dataclass(frozen=True)
class Shares:
    """Of the peak, by what is computed, and whose they are."""

    measured: MeasuredWork
    rollout: float
    update: float
    reference: float


MEASURED = (
    # 32 pictures: 45 TFLOP each to sample, 44 to learn from; the KL's 18 forwards are 6.37 - 3.55 s.
    MeasuredWork("Stable Diffusion 3.5 medium", 2.25, True, False, (1440, 3.41), (1409, 3.55), (1296, 2.82)),
    MeasuredWork("Stable Diffusion 3.5 medium", 2.25, False, False, (1440, 6.27), (1409, 6.28)),
    # 16 pictures, 342 and 72 TFLOP each.
    MeasuredWork("Qwen-Image", 17.1, True, False, (5472, 10.95), (1152, 3.12)),
    # 1,024 pictures of ten forwards; the update is four levels of two forwards and a backward.
    MeasuredWork("the words model", 0.0153, True, True, (157, 0.66), (251, 1.36)),
    MeasuredWork("the words model", 0.0153, True, False, (157, 1.28), (251, 1.36)),
)


def measured_shares(forward: float, compiled: bool, graphs: bool = False) -> Shares:
    """Those of the measured work that is nearest in size, compiled or not as asked.

    Args:
        forward: 1e12 operations of one forward of one sample.
        compiled: are the transformer's blocks compiled?
        graphs: does the rollout replay CUDA graphs?
    """
    alike = [work for work in MEASURED if work.compiled == compiled]
    nearest = min(alike, key=lambda work: (abs(math.log(work.forward / forward)), work.graphs != graphs))
    return nearest.shares()
