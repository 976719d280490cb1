# SPDX-License-Identifier: Apache-2.0
"""`data`: which prompts, embeddings and pairs a run reads."""

from pathlib import Path

from pydantic import Field

from models.config.bounds import (
    MOST_BATCH,
)
from models.config.section import Section


class DataConfig(Section):
    """Where the DVC stages put the data set, and how much of it one iteration takes."""

    prompts: Path = Field(Path("data/prompts.parquet"), description="Prompt table of the `prompts` stage.")
    embeddings: Path = Field(Path("data/embeddings"), description="Folder of the `embeddings` stage.")
    pairs: Path = Field(
        Path("data/pairs"), description="Folder of the `pairs` stage, read where algorithm.sample_source is offline."
    )
    train_batch_size: int = Field(
        16,
        ge=1,
        le=MOST_BATCH,
        description="Prompts per iteration, each sampled rollout.n times; offline, pairs per iteration.",
    )
