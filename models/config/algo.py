# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.algo`: how the rollout explores, by kernel, window and noise."""

from typing import Literal, Self

from pydantic import Field, model_validator

from models.config.bounds import MOST_ITERATIONS, MOST_NOISE_LEVELS, Options
from models.config.section import ANY_NAME, Later, NoiseLevel, NotShaping, Section, choices

WindowMode = Literal["random", "progressive", "decay"]
WindowPer = Literal["iteration", "prompt"]


class DiffusionRolloutAlgoConfig(Section):
    """How a sample explores: the reverse-process kernel and the window of steps that are stochastic and trained."""

    sde_type: str = Field(
        "sde",
        description="Reverse-process kernel: sde (Flow-GRPO), cps, dance_sde, or one of your own by its registered "
        "name or as package.module:function.",
        examples=["sde", "cps", "dance_sde"],
        json_schema_extra=choices("sde", "cps", "dance_sde", own=ANY_NAME),
    )
    sde_options: Later[Options] = Field(
        default_factory=dict, description="Keyword arguments of a kernel of your own; sde, cps and dance_sde take none."
    )
    noise_level: float = Field(
        0.7,
        ge=0.0,
        le=10.0,
        description="Noise of the kernel: a for sde and cps (there at most 1, all of the noise anew), eta for "
        "dance_sde. 0 is the ODE, which losses on finished samples (dpo, diffusion_nft, awm, distill_fm_mse) sample by "
        "whatever stands here.",
    )
    max_leftover_noise: NotShaping[float] = Field(
        0.5,
        gt=0,
        le=100.0,
        description="Largest standard deviation of the noise that exploring may leave in the finished latents, "
        "predicted from the schedule before the run (docs/algorithms.md); above it the run is refused. Published "
        "settings leave up to 0.21.",
    )
    sde_window_size: int | None = Field(
        None, ge=1, le=MOST_NOISE_LEVELS, description="Number of stochastic, trained steps; null takes the whole range."
    )
    sde_window_range: tuple[NoiseLevel, NoiseLevel] | None = Field(
        None,
        description="Steps [lo, hi) that the window may cover; null is every step but the last, which would add "
        "noise to the finished picture.",
    )
    sde_window_mode: WindowMode = Field(
        "random",
        description="Where the window is: random draws its place each iteration; progressive moves it by its size "
        "every iters_per_group iterations and past the end back to lo; decay does so faster and faster.",
    )
    iters_per_group: int = Field(
        25,
        ge=1,
        le=MOST_ITERATIONS,
        description="Iterations at one place, for progressive and decay; decay lets it fall linearly to a quarter.",
    )
    sde_contiguous: bool = Field(
        True, description="Consecutive steps; false draws any sde_window_size steps of the range."
    )

    sde_window_per: Later[WindowPer] = Field(
        "iteration",
        description="Who shares a window: all samples of an iteration, or those of a prompt, each prompt drawing its "
        "own (Flash-GRPO, with a sde_window_size of 1).",
    )

    init_same_noise: Later[bool] = Field(
        False,
        description="The samples of a prompt start from the same noise, so that they differ by what the window's steps "
        "add alone, as DanceGRPO's and MixGRPO's own code has it. A validation's start from noise of their own.",
    )

    @model_validator(mode="after")
    def _cps_turns_by_a_right_angle_at_most(self) -> Self:
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ValueError(
                f"noise_level is {self.noise_level:g}, but cps takes the noise's share sin(noise_level pi/2), which "
                "falls again above 1: give it at most 1"
            )
        return self

    @model_validator(mode="after")
    def _window_is_defined(self) -> Self:
        moves = self.sde_window_mode != "random"
        if moves and self.sde_window_size is None:
            raise ValueError(f"sde_window_mode {self.sde_window_mode} moves a window: give it a sde_window_size")
        if moves and not self.sde_contiguous:
            raise ValueError(
                f"sde_contiguous is false but sde_window_mode is {self.sde_window_mode}: single steps are drawn, use "
                "random"
            )
        if not self.sde_contiguous and self.sde_window_size is None:
            raise ValueError("sde_contiguous is false but sde_window_size is null: say how many steps to draw")
        if self.sde_window_per == "prompt" and (moves or self.sde_window_size is None):
            raise ValueError(
                f"sde_window_per is prompt, but sde_window_mode {self.sde_window_mode} with sde_window_size "
                f"{self.sde_window_size} draws no window: set the mode to random and give it a size"
            )
        return self

    def window_bounds(self, num_inference_steps: int) -> tuple[int, int]:
        """The half-open range of steps that the window may cover, for a sampler of that many steps.

        Raises:
            ValueError: the range leaves the sampler's steps, or is shorter than the window.
        """
        low, high = self.sde_window_range or (0, max(num_inference_steps - 1, 1))
        if not 0 <= low < high <= num_inference_steps:
            raise ValueError(
                f"rollout.algo.sde_window_range [{low}, {high}) must lie within the {num_inference_steps} denoising "
                "steps of rollout.pipeline.num_inference_steps"
            )
        if self.sde_window_size is not None and self.sde_window_size > high - low:
            raise ValueError(
                f"rollout.algo.sde_window_size {self.sde_window_size} is longer than sde_window_range [{low}, {high})"
            )
        return low, high

    def window_length(self, num_inference_steps: int) -> int:
        """How many steps the window has, of a sampler of that many; errors as of `window_bounds`."""
        low, high = self.window_bounds(num_inference_steps)
        return self.sde_window_size or high - low
