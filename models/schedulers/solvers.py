# SPDX-License-Identifier: Apache-2.0
"""Deterministic steps of second order, for as many forward passes as Euler's."""

import math

from torch import Tensor

from models.schedulers.kernels import AT_ONE


class DpmSolver:
    """DPM-Solver++(2M) (Lu et al., arXiv 2211.01095, algorithm 2) between the noise levels of a flow.

    With x0_hat = x - s v and lambda = log((1 - s) / s) a step from s to s' is

        x' = s'/s x + (1 - s'/s) (x0_hat + (x0_hat - x0_hat of the step before) / (2 r)),

    where r is the last step's length in lambda over this one's. Without the term in r it is Euler's step: so are the
    first one, the one after a first that began at s = 1 (whose length has no end), and the last one, to s' = 0.
    """

    def __init__(self) -> None:
        """Begin without a step before."""
        self._clean: Tensor | None = None
        self._length = math.inf

    def step(self, sample: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """x' [B, ...] in fp32 from x and its velocity [B, ...]; the levels are in (0, 1] and [0, 1); 1 up to
        rounding, which may be above it."""
        sample, velocity = sample.float(), velocity.float()
        clean = sample - sigma * velocity
        length = _lambda(sigma_next) - _lambda(sigma)
        share = length / (2 * self._length) if math.isfinite(length) else 0.0
        aim = clean if self._clean is None or share == 0 else clean + share * (clean - self._clean)
        self._clean, self._length = clean, length
        kept = sigma_next / sigma
        return kept * sample + (1 - kept) * aim


def _lambda(sigma: float) -> float:
    """log((1 - s) / s); minus infinity at 1 up to rounding, plus infinity at 0."""
    if sigma == 0:
        return math.inf
    if sigma > 1 - AT_ONE:
        return -math.inf
    return math.log((1 - sigma) / sigma)
