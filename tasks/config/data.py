# SPDX-License-Identifier: Apache-2.0
"""`data`: which prompts, embeddings and pairs a run reads."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from models.config.bounds import (
    MOST_BATCH,
)
from models.config.section import NotShaping, Section
from tasks.config.overrides import set_fields

Split = Literal["train", "test", "pretrain"]
DataSetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A part of a path and of a stage's name, `embeddings@<name>`."""
DIGITS = "digits"
"""The tiny model's data set, whose files are in data/ itself."""
FILES = {"prompts": "prompts.parquet", "embeddings": "embeddings", "pairs": "pairs"}
"""Field -> what a data set's folder holds of it."""


def data_folder(name: str) -> Path:
    """Where the stages of a data set write."""
    return Path("data") if name == DIGITS else Path("data") / name


class DataConfig(Section):
    """Where the DVC stages put the data set, and how much of it one iteration takes."""

    name: NotShaping[DataSetName | None] = Field(
        None,
        description="A data set of params.yaml: prompts, embeddings and pairs are then those of data/<name>; a path "
        "that is given goes first.",
    )
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

    @model_validator(mode="wrap")
    @classmethod
    def _named_files(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the files of the data set that is named. They do not count as set: another name has others."""
        given = set_fields(values)
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            return handler(values)
        files = {field: data_folder(given["name"]) / file for field, file in FILES.items()}
        config = handler(files | given)
        config.model_fields_set.difference_update(files.keys() - given.keys())
        return config
