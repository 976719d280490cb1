# SPDX-License-Identifier: Apache-2.0
"""Which denoising steps of an iteration are stochastic and trained."""

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig


def window_steps(
    algo: "DiffusionRolloutAlgoConfig",
    num_inference_steps: int,
    seed: int,
    iteration: int,
    total_iterations: int | None = None,
    prompt_uid: str | None = None,
) -> list[int]:
    """The window's step indices, ascending: a function of the arguments alone, so that there is no state to lose.

    One window an iteration for the whole batch, or with `sde_window_per: prompt` one for the samples of each prompt
    (iso-temporal groups of Flash-GRPO, arXiv 2605.15980): windows drawn per sample put the timestep's own bias into the
    group's rewards. With size null, the whole range is the window and nothing is drawn.

    Args:
        algo: kernel and window settings.
        num_inference_steps: of the sampler.
        seed: of the run.
        iteration: counts from 1.
        total_iterations: of the run; read by `decay` alone.
        prompt_uid: whose window; None is that of all prompts.

    Raises:
        ValueError: the range leaves the sampler's steps, or is shorter than the window.
    """
    low, high = algo.window_bounds(num_inference_steps)
    size = algo.window_length(num_inference_steps)
    draw = random.Random(f"window/{seed}/{iteration}" + ("" if prompt_uid is None else f"/{prompt_uid}"))
    if not algo.sde_contiguous:
        return sorted(draw.sample(range(low, high), size))
    if algo.sde_window_mode == "random":
        start = draw.randint(low, high - size)
    else:
        moves = _moves_before(algo, iteration, total_iterations)
        start = low + moves % ((high - low) // size) * size
    return list(range(start, start + size))


def _moves_before(algo: "DiffusionRolloutAlgoConfig", iteration: int, total_iterations: int | None) -> int:
    """How often the window of MixGRPO (arXiv 2507.21802) has moved when `iteration` begins.

    progressive: every `iters_per_group` iterations. decay: a stay that begins after t of T iterations lasts
    iters_per_group (1 - 3/4 t/T), rounded, at least one.
    """
    done = iteration - 1
    if algo.sde_window_mode == "progressive":
        return done // algo.iters_per_group
    if total_iterations is None:
        raise ValueError("sde_window_mode decay needs the run's total_iterations")
    moves = begun = 0
    while True:
        begun += max(1, round(algo.iters_per_group * (1 - 0.75 * min(begun / total_iterations, 1.0))))
        if begun > done:
            return moves
        moves += 1
