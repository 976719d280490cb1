# SPDX-License-Identifier: Apache-2.0
"""`data`: which prompts, embeddings and pairs a run reads, and the text encoders that it has itself."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator

from models.config.bounds import MOST_BATCH, MOST_MEGABYTES, MOST_RETRIES, MOST_THREADS, Gpus
from models.config.section import IMPORT_PATH, Later, NotShaping, Section
from tasks.config.overrides import set_fields

Split = Literal["train", "test", "pretrain"]
DataSetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A part of a path and of a stage's name, `embeddings@<name>`."""
DIGITS = "digits"
"""The tiny model's data set, whose files are in data/ itself."""
FILES = {"prompts": "prompts.parquet", "embeddings": "embeddings", "pairs": "pairs"}
"""Field -> what a data set's folder holds of it."""

TooLong = Literal["refuse", "cut"]
"""What becomes of a prompt of more tokens than max_sequence_length: an error, or its beginning is encoded."""

LIVE: Literal["live"] = "live"
"""In place of a folder of embeddings: the run encodes its prompts itself."""


def data_folder(name: str) -> Path:
    """Where the stages of a data set write."""
    return Path("data") if name == DIGITS else Path("data") / name


class TextEncoderConfig(Section):
    """The model's text encoders as a part of the run; read where `data.embeddings` is live."""

    device: NotShaping[Literal["cpu", "cuda"]] = Field("cpu", description="Where the text encoders compute.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="Number format of the text encoders and the embeddings; null is actor_rollout_ref.model.dtype.",
    )
    negative_prompt: str | None = Field(
        None, description="What classifier-free guidance contrasts with; null takes the model card's, mostly empty."
    )
    too_long: Later[TooLong] = Field(
        "refuse",
        description="Refuse prompts of more tokens than rollout.pipeline.max_sequence_length, or cut them as the "
        "model's pipeline does.",
    )
    placement: NotShaping[Literal["separate", "colocated"]] = Field(
        "separate",
        description="On CUDA: separate takes num_gpus of the cluster; colocated is on the GPU of the first trainer "
        "rank and takes none besides.",
    )
    num_gpus: NotShaping[Gpus] = Field(
        1.0,
        description="GPUs on CUDA, where placement is separate: 1, or a share of one that rollout workers or rewards "
        "with shares of their own leave free.",
    )
    enable_sleep_mode: NotShaping[bool] = Field(
        True,
        description="On a GPU that others use too (colocated, or num_gpus below 1) the weights are in host memory but "
        "while prompts are encoded. false leaves them on the GPU.",
    )
    batch_size: NotShaping[int] = Field(
        1,
        ge=1,
        le=MOST_BATCH,
        description="Prompts encoded at once; with 1 an embedding cannot depend, in the last bits, on its neighbours.",
    )
    threads: NotShaping[int] = Field(
        1, ge=1, le=MOST_THREADS, description="CPU threads of torch; sums change in the last bit with them."
    )
    cache_mib: NotShaping[float] = Field(
        4096,
        ge=0,
        le=MOST_MEGABYTES,
        description="MiB of the driver's memory for embeddings of earlier prompts, those used last; what an iteration "
        "or a validation needs is held besides. 0 keeps none.",
    )
    max_restarts: NotShaping[int] = Field(
        2,
        ge=0,
        le=MOST_RETRIES,
        description="How often the process is started again if it dies; it then encodes again.",
    )

    @model_validator(mode="after")
    def _has_its_gpu(self) -> Self:
        if self.placement == "colocated" and self.device != "cuda":
            raise ValueError(
                f"placement is colocated, which is a GPU's, and device {self.device}: set device to cuda, or placement "
                "to separate"
            )
        if self.device == "cuda" and self.placement == "separate" and self.num_gpus == 0:
            raise ValueError(
                "device is cuda and num_gpus 0: give it a GPU or a share of one, set placement to colocated, or device "
                "to cpu"
            )
        return self

    @property
    def is_colocated(self) -> bool:
        """Is it on a trainer rank's GPU?"""
        return self.placement == "colocated"

    @property
    def own_gpus(self) -> float:
        """GPUs, or the share of one, that it takes beside the trainer's and the rollout's."""
        return self.num_gpus if self.device == "cuda" and not self.is_colocated else 0.0

    @property
    def sleeps(self) -> bool:
        """Are its weights on the GPU only while prompts are encoded?"""
        shares = self.is_colocated or self.num_gpus < 1
        return self.device == "cuda" and shares and self.enable_sleep_mode


class DataConfig(Section):
    """Where the DVC stages put the data set, and how much of it one iteration takes."""

    name: NotShaping[DataSetName | None] = Field(
        None,
        description="A data set of params.yaml: prompts, embeddings and pairs are then those of data/<name>; a path "
        "that is given goes first.",
    )
    prompts: Path = Field(Path("data/prompts.parquet"), description="Prompt table of the `prompts` stage.")
    embeddings: Path | Literal["live"] = Field(
        Path("data/embeddings"),
        description="Folder of the `embeddings` stage; or live: the run's own text encoders encode the prompts.",
    )
    text_encoder: Later[TextEncoderConfig] = Field(
        default_factory=TextEncoderConfig, description="These text encoders, where embeddings is live."
    )
    rewrite_prompts: Later[str | None] = Field(
        None,
        pattern=IMPORT_PATH,
        description="package.module:function that takes an iteration's prompts, its number and the seed and returns "
        "the prompts that are sampled (docs/data.md); embeddings must be live. null takes them as they are.",
    )
    pairs: Path = Field(
        Path("data/pairs"), description="Folder of the `pairs` stage, read where algorithm.sample_source is offline."
    )
    train_batch_size: int = Field(
        16,
        ge=1,
        le=MOST_BATCH,
        description="Prompts per iteration, each sampled rollout.n times; offline, pairs per iteration.",
    )

    @field_validator("embeddings")
    @classmethod
    def _live_in_json_too(cls, embeddings: Path | str, info: ValidationInfo) -> Path | str:
        """In JSON any text is a path to pydantic, which takes the first kind that fits exactly."""
        return LIVE if info.mode == "json" and embeddings == Path(LIVE) else embeddings

    @property
    def is_live(self) -> bool:
        """Does the run encode its prompts itself?"""
        return self.embeddings == LIVE

    @property
    def encoders(self) -> TextEncoderConfig | None:
        """The run's text encoders; None where the embeddings are on disk."""
        return self.text_encoder if self.is_live else None

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
