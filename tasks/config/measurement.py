# SPDX-License-Identifier: Apache-2.0
"""What a validation sweep draws: prompt sets, steps and guidance."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from models.config.bounds import MOST_BATCH, MOST_COUNT, MOST_GUIDANCE, MOST_NOISE_LEVELS, Seed, SetName
from models.config.section import Section
from tasks.config.data import Split
from tasks.config.reward import RewardConfig

MOST_VALUES = 1000
"""Of one dimension of a measurement."""


class PromptSet(Section):
    """Prompts to measure on, with their embeddings."""

    prompts: Path = Field(description="Prompt table of a `prompts` stage.")
    embeddings: Path = Field(description="Folder of an `embeddings` stage.")
    split: Split = Field("test", description="Which of the table's prompts.")
    max_prompts: int | None = Field(
        None,
        ge=2,
        le=MOST_COUNT,
        description="Use only the first so many, in the raw files' order; null takes all.",
    )


class Measurement(Section):
    """What is drawn for each set of weights, and what counts as a difference."""

    sets: dict[SetName, PromptSet] = Field(
        default_factory=dict, description="Name -> prompts; empty takes the test split of the config's data."
    )
    num_inference_steps: list[Annotated[int, Field(ge=1, le=MOST_NOISE_LEVELS)]] = Field(
        default_factory=list, max_length=MOST_VALUES, description="Each of them; empty is the recipe's."
    )
    true_cfg_scale: list[Annotated[float, Field(ge=1, le=MOST_GUIDANCE)]] = Field(
        default_factory=list,
        max_length=MOST_VALUES,
        description="Each of them, for models that are guided by it (Qwen-Image, FLUX.1); empty is the recipe's.",
    )
    guidance_scale: list[Annotated[float, Field(ge=0, le=MOST_GUIDANCE)]] = Field(
        default_factory=list,
        max_length=MOST_VALUES,
        description="The same for those guided by guidance_scale (Stable Diffusion 3, Wan, FLUX.2 klein, Z-Image).",
    )
    seeds: list[Seed] = Field(
        [0], min_length=1, max_length=MOST_VALUES, description="Each of them; the noise is the same for all weights."
    )
    n: int = Field(1, ge=1, le=MOST_BATCH, description="Pictures of each prompt, for each of all these.")
    reward: RewardConfig | None = Field(
        None, description="Held-out rewards, the weighted sum decides; null is the config's own reward."
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Of the bootstrap intervals.")
