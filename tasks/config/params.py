# SPDX-License-Identifier: Apache-2.0
"""The parameters of the data stages: what `params.yaml` may say, and where the stages' files are.

No field has a default here: DVC compares the values in params.yaml, so that is where all of them must stand. The entry
of a raw file is an exception, where a bare path stands for the plain one, and so is `too_long`, which came later.
"""

import re
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from models.config.bounds import (
    MOST_BATCH,
    MOST_COUNT,
    MOST_NOISE_LEVELS,
    MOST_PIXELS,
    MOST_PROCESSES,
    MOST_THREADS,
    Seed,
    check_given,
    check_texts,
)
from models.errors import DoubleflowError
from models.tiny_qwen_image.settings import TinySettings
from models.words_stable_diffusion_3.settings import WordsSettings
from tasks.config.data import DIGITS, DataSetName, Split, TooLong, data_folder
from tasks.config.errors import NO_YAML, described
from tasks.system.distinct_names import plain_yaml

RAW = "data/raw/"
PROMPTS = Path("data/prompts.parquet")
BASE_MODEL = Path("data/base_model")
BASE_MODEL_METRICS = Path("data/base_model_metrics.json")
PREFERENCES = Path("data/preferences.parquet")
PAIRS = Path("data/pairs")
WORDS_PROMPTS = Path("data/words/prompts.parquet")
WORDS_MODEL = Path("data/words/base_model")
WORDS_METRICS = Path("data/words/base_model_metrics.json")

TAKEN = ("raw", "words", "base_model", "embeddings", "pairs")
"""Names in data/ that are no data set's."""

Share = Annotated[float, Field(ge=0, le=1)]


class PrepareError(DoubleflowError, ValueError):
    """A data stage cannot go on; the message says which field, file or number is at fault."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_was_given(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if is_dataclass(annotation) and isinstance(value, dict):
            kinds = get_type_hints(annotation)
            for name, number in value.items():
                check_given(number, kinds.get(name))
        return check_given(value, annotation)

    @field_validator("*")
    @classmethod
    def _texts_can_be_written(cls, value: Any) -> Any:
        return check_texts(value)


class RawFile(_Section):
    """One raw file of prompts, or a folder that Hugging Face's `datasets` saved; see docs/data.md."""

    file: str = Field(description="Within data/raw/: .txt, .jsonl, .parquet, or a folder of `save_to_disk`.")
    split: Split | None = Field(
        None, description="Of all its rows that name none; null draws it, or takes what `extra_info` says."
    )
    columns: dict[str, str] | None = Field(
        None, description="Column of the file -> key of docs/data.md; others are left out. Null takes all as they are."
    )
    hidden: Literal["refuse", "remove"] = Field(
        "refuse", description="What to do with a prompt that holds characters which nobody sees or meant."
    )

    @field_validator("file")
    @classmethod
    def _within_raw(cls, file: str) -> str:
        # DVC watches that folder; a change in a file elsewhere would go unnoticed.
        if not file.startswith(RAW) or ".." in Path(file).parts:
            raise ValueError(f"{file} is not within {RAW}, where DVC would see it change")
        return file

    @field_validator("columns")
    @classmethod
    def _one_column_a_key(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        taken: dict[str, str] = {}
        for column, key in (columns or {}).items():
            if key in taken:
                raise ValueError(f"{taken[key]} and {column} are both to be {key}: name one of them")
            taken[key] = column
        return columns


class PromptsParams(_Section):
    """Stage `prompts`: raw files -> prompts.parquet of the data set."""

    files: list[RawFile] = Field(min_length=1, description="Raw files; a bare path is one without more to say.")
    n_test: int = Field(ge=0, le=MOST_COUNT, description="Prompts held out of the base model's training and of RL.")
    n_train: int | None = Field(ge=0, le=MOST_COUNT, description="Prompts for RL; null takes all that are left.")
    seed: Seed = Field(description="Seed of the shuffle that decides the splits.")
    target_pattern: str | None = Field(
        description="Regular expression with one group: the part of a prompt that the picture should show as text.",
    )

    @field_validator("files", mode="before")
    @classmethod
    def _paths_are_files(cls, files: Any) -> Any:
        listed = isinstance(files, list)
        return [{"file": entry} if isinstance(entry, str) else entry for entry in files] if listed else files

    @field_validator("target_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"{pattern!r} has {groups} groups; it must have one, around the wanted text")
        return pattern


class GateParams(_Section):
    """What the base model must reach on held-out prompts: RL needs something to start from and something to learn."""

    prompts: int = Field(ge=1, le=MOST_COUNT, description="How many prompts of the test split are drawn.")
    images_per_prompt: int = Field(ge=1, le=MOST_BATCH, description="Pictures of each.")
    steps: int = Field(ge=1, le=MOST_NOISE_LEVELS, description="Sampling steps of the standard pipeline.")
    seed: Seed = Field(description="Seed of the pictures' noise.")
    min_reward: Share = Field(description="Least mean OCR reward; RL from weaker models learns scribbles.")
    max_reward: Share = Field(description="Greatest mean OCR reward; above it little is left to learn.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_reward > self.max_reward:
            raise ValueError(f"min_reward {self.min_reward} must not be above max_reward {self.max_reward}")
        return self


M = TypeVar("M", TinySettings, WordsSettings)


def check_model_numbers(model: M) -> M:
    """The settings of a model that the project trains itself, all finite and none absurd.

    Their classes have no bounds of their own: their files are dependencies of stages, which a change would run again.

    Raises:
        ValueError: one is not.
    """
    for name, value in asdict(model).items():
        for number in value if isinstance(value, tuple) else [value]:
            if not abs(number) <= MOST_COUNT:  # NaN is not, either
                raise ValueError(f"model.{name} is {number:g}: give a finite number of at most {MOST_COUNT:g}")
    if model.seed < 0:
        raise ValueError(f"model.seed is {model.seed}: give a whole number from 0 on")
    return model


class BaseModelParams(_Section):
    """Stage `base_model`: data/prompts.parquet -> data/base_model/ and its metrics."""

    model: TinySettings = Field(description="See models/tiny_qwen_image/settings.py.")
    gate: GateParams = Field(description="The model is kept only within these bounds.")

    @field_validator("model")
    @classmethod
    def _numbers_are_small(cls, model: TinySettings) -> TinySettings:
        return check_model_numbers(model)


class EmbeddingsParams(_Section):
    """Stage `embeddings`: the prompt table and the text encoders -> embeddings/ of the data set."""

    model: str = Field(min_length=1, description="Folder in diffusers format whose text encoders encode.")
    adapter: str = Field(
        min_length=1, description="File of the model's family, which DVC watches: models/families/*.py or your own."
    )
    external_lib: str | None = Field(description="Modules that register a family of your own; null for none.")
    dtype: Literal["float32", "bfloat16"] = Field(description="Number format of the text encoders and the embeddings.")
    device: Literal["cpu", "cuda"] = Field(description="Where the text encoders compute.")
    splits: list[Split] = Field(min_length=1, description="Splits whose prompts are encoded.")
    max_sequence_length: int = Field(
        ge=1, le=1024, description="Tokens of a prompt, as its model's template counts them; for longer ones: too_long."
    )
    too_long: TooLong = Field("refuse", description="Refuse longer prompts, or cut them as the model's pipeline does.")
    negative_prompt: str | None = Field(
        description="What classifier-free guidance contrasts with; null takes the model card's, mostly empty."
    )
    batch_size: int = Field(
        ge=1,
        le=MOST_BATCH,
        description="Prompts encoded at once; with 1 an embedding cannot depend, in the last bits, on its neighbours.",
    )
    shard_size: int = Field(ge=1, le=MOST_COUNT, description="Prompts in a safetensors file.")
    threads: int = Field(
        ge=1, le=MOST_THREADS, description="CPU threads of torch; sums change in the last bit with them."
    )


class PreferencesParams(_Section):
    """Stage `preferences`: base model, embeddings and a reward -> data/preferences.parquet."""

    reward: str = Field(description="Reward that says which of a prompt's pictures is better.")
    images_per_prompt: int = Field(
        ge=2, le=MOST_BATCH, description="Pictures of each train prompt; the best and the worst are kept."
    )
    height: int = Field(ge=8, le=MOST_PIXELS, description="Picture height in pixels.")
    width: int = Field(ge=8, le=MOST_PIXELS, description="Picture width in pixels.")
    steps: int = Field(ge=1, le=MOST_NOISE_LEVELS, description="Denoising steps.")
    batch_size: int = Field(ge=1, le=MOST_BATCH, description="Prompts sampled at once.")
    seed: Seed = Field(description="Seed of the noise.")


class PairsParams(_Section):
    """Stage `pairs`: a preference table and the VAE -> data/pairs/."""

    table: str = Field(description="Preference table, see docs/data.md.")
    shard_size: int = Field(ge=1, le=MOST_COUNT, description="Pairs in a safetensors file.")


class WordsParams(_Section):
    """Stages `words_prompts` and `words_base_model`: data/words/, the model that writes a word."""

    device: Literal["cpu", "cuda"] = Field(description="Where the base model is trained and measured.")
    processes: int = Field(ge=1, le=MOST_PROCESSES, description="Processes that read pictures while it trains.")
    model: WordsSettings = Field(description="See models/words_stable_diffusion_3/settings.py.")
    gate: GateParams = Field(description="The model is kept only within these bounds.")

    @field_validator("model")
    @classmethod
    def _numbers_are_small(cls, model: WordsSettings) -> WordsSettings:
        return check_model_numbers(model)


class DataSetParams(_Section):
    """One data set: the stages `prompts@<name>` and `embeddings@<name>`, and where their files are."""

    folder: str = Field(description="data/<name>, where `data.name` of a recipe looks; data for the tiny model's.")
    prompts: PromptsParams
    embeddings: EmbeddingsParams

    @property
    def table(self) -> Path:
        """The prompt table."""
        return Path(self.folder) / "prompts.parquet"

    @property
    def embedded(self) -> Path:
        """The folder of the embeddings."""
        return Path(self.folder) / "embeddings"


class PrepareParams(_Section):
    """All of params.yaml."""

    data_sets: dict[DataSetName, DataSetParams]
    base_model: BaseModelParams
    preferences: PreferencesParams
    pairs: PairsParams
    words: WordsParams

    @field_validator("data_sets")
    @classmethod
    def _in_their_folders(cls, data_sets: dict[str, DataSetParams]) -> dict[str, DataSetParams]:
        if DIGITS not in data_sets:
            raise ValueError(f"{DIGITS} is missing: the base model learns from its prompts")
        for name, entry in data_sets.items():
            if name in TAKEN:
                raise ValueError(f"{name} is another folder of data/: choose another name")
            if entry.folder != data_folder(name).as_posix():
                raise ValueError(f"{name}.folder is {entry.folder}: it must be {data_folder(name)}")
        return data_sets

    def data_set(self, name: str) -> DataSetParams:
        """A data set by its name. Raises PrepareError, which lists them all."""
        if name not in self.data_sets:
            raise PrepareError(f"data_sets in params.yaml has no {name!r}; there are {', '.join(self.data_sets)}")
        return self.data_sets[name]


def load_params(path: Path) -> PrepareParams:
    """Read and check a parameter file. Raises PrepareError naming every wrong field."""
    if not path.is_file():
        raise PrepareError(f"{path} is missing; run from the repository's root")
    try:
        return PrepareParams.model_validate(plain_yaml(path.read_text()))
    except ValidationError as error:
        raise PrepareError(f"{path}: {described(error, PrepareParams)}") from error
    except (*NO_YAML, OSError) as error:
        raise PrepareError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error


def changed(params: EmbeddingsParams, changes: dict[str, Any]) -> EmbeddingsParams:
    """The parameters with some fields replaced. Raises PrepareError naming every wrong one."""
    try:
        return EmbeddingsParams.model_validate(params.model_dump() | changes)
    except ValidationError as error:
        raise PrepareError(f"embeddings: {described(error, EmbeddingsParams)}") from error
