# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.pipeline`: how a picture is sampled."""

from typing import Literal

from pydantic import Field

from models.config.bounds import MOST_FRAMES, MOST_GUIDANCE, MOST_NOISE_LEVELS, MOST_PIXELS, MOST_TOKENS
from models.config.section import Later, Section

Solver = Literal["euler", "dpm2"]


class DiffusionPipelineConfig(Section):
    """How a picture is sampled. Start from the model card's values, so that exploration begins at a good point."""

    height: int = Field(
        512, ge=8, le=MOST_PIXELS, description="Picture height in pixels, a multiple of the model's patch."
    )
    width: int = Field(
        512, ge=8, le=MOST_PIXELS, description="Picture width in pixels, a multiple of the model's patch."
    )
    num_inference_steps: int = Field(10, ge=1, le=MOST_NOISE_LEVELS, description="Denoising steps of one sample.")
    true_cfg_scale: float = Field(
        1.0,
        ge=1.0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance of Qwen-Image and FLUX.1; 1 turns it off and halves the work.",
    )
    guidance_scale: float | None = Field(
        None,
        ge=0.0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance of Stable Diffusion 3, Wan, FLUX.2 klein (off up to 1) and Z-Image (off "
        "at 0), where null turns it off; for FLUX.1-dev the scale that the model was distilled with, which it must be "
        "given.",
    )
    num_frames: int | None = Field(
        None, ge=1, le=MOST_FRAMES, description="Frames of a video; null for models of pictures."
    )
    max_sequence_length: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens of a prompt with which the embeddings must have been made, or are made where "
        "data.embeddings is live; null takes those on disk as they are.",
    )
    solver: Later[Solver] = Field(
        "euler",
        description="Steps without noise: euler, as the models' pipelines draw, or dpm2 (DPM-Solver++ 2M), of second "
        "order at the same cost, whose samples are nearer to what the velocity says (docs/algorithms.md).",
    )
