"""Which denoising steps of an iteration are stochastic and trained."""

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import DiffusionRolloutAlgoConfig


def window_steps(algo: "DiffusionRolloutAlgoConfig", num_inference_steps: int, seed: int, iteration: int) -> list[int]:
    """The window's step indices, ascending.

    The start is drawn once an iteration for the whole batch: windows drawn per sample put the timestep's own bias
    into the group's rewards. With size null, the whole range is the window and nothing is drawn.

    Raises:
        ValueError: the range leaves the sampler's steps, or is shorter than the window.
    """
    low, high = algo.window_bounds(num_inference_steps)
    size = algo.sde_window_size or high - low
    if not 0 <= low < high <= num_inference_steps:
        raise ValueError(
            f"sde_window_range [{low}, {high}) must lie within the {num_inference_steps} denoising steps "
            f"[0, {num_inference_steps})"
        )
    if size > high - low:
        raise ValueError(f"sde_window_size {size} is longer than sde_window_range [{low}, {high})")
    start = random.Random(f"window/{seed}/{iteration}").randint(low, high - size)
    return list(range(start, start + size))
