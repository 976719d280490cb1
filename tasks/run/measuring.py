# SPDX-License-Identifier: Apache-2.0
"""What a measurement of weights draws, and how two of them compare."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from tasks.actors.reward_group import not_finite
from tasks.config.errors import ConfigError
from tasks.config.identity import shaping
from tasks.config.measurement import Measurement, PromptSet
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import INDEX, Embeddings, PromptEmbeddings
from tasks.data.prompts import Prompt, load_prompts
from tasks.records.comparison import Interval, score_columns
from tasks.run.data_checks import check_encoded, check_negatives, check_scored, check_texts
from tasks.run.early import as_config_errors
from tasks.run.encoding_checks import check_embeddings
from tasks.run.preflight import Inputs
from tasks.stages.validation import Validation

DRAWN_AS = 3
"""Counts up where the same settings come to other pictures, so that all weights are measured again. 2: guidance_scale
of val_kwargs.pipeline is drawn with. 3: what changes no score, as a reward's number of workers, is left out of the
digest; the reward model, the rollout's engine, the text encoders' settings and which prompts are drawn are in."""


@dataclass(frozen=True)
class Cell:
    """One way of drawing: a set of prompts, steps, guidance and seed.

    Attributes:
        guided_by: the field of the pipeline that guides this model, None where none does.
        guidance: its value; null, which turns it off, is 0 here.
    """

    name: str
    prompts: list[Prompt]
    embeddings: Embeddings
    steps: int
    guided_by: str | None
    guidance: float
    seed: int

    @property
    def label(self) -> str:
        """For metrics' names; all seeds of a cell are one metric."""
        return _label(self.name, self.steps, self.guided_by, self.guidance)

    def drawn_by(self, pipeline: DiffusionPipelineConfig) -> DiffusionPipelineConfig:
        """A validation's sampling with the cell's own steps and guidance in place."""
        guidance = {self.guided_by: self.guidance or None} if self.guided_by else {}
        return pipeline.model_copy(update={"num_inference_steps": self.steps, **guidance})


def _label(name: str, steps: int, guided_by: str | None, guidance: float) -> str:
    return f"{name}/steps_{steps}" + (f"/{guided_by}_{guidance:g}" if guided_by else "")


@dataclass(frozen=True)
class Verdict:
    """How a version compares, each None where there is nothing to compare it with.

    Attributes:
        unmeasured: why it cannot be compared with one that was measured, in words: too little of it has a reward.
    """

    base: Interval | None
    best: Interval | None
    unmeasured: str | None = None

    @property
    def better(self) -> bool:
        """Significantly better than the best so far, or than the base where there is none."""
        against = self.best or self.base
        return against is not None and against.low > 0

    @property
    def wrong(self) -> str | None:
        """What it is significantly worse than, in words, or why that cannot be said."""
        if self.unmeasured is not None:
            return f"cannot be judged: {self.unmeasured}"
        worse = {"the base model": self.base, "the best so far": self.best}
        found = [f"{name} by {gain}" for name, gain in worse.items() if gain is not None and gain.high < 0]
        return f"is worse than {' and '.join(found)}" if found else None


def for_measuring(config: TrainConfig, measurement: Measurement) -> TrainConfig:
    """The config with the held-out rewards in place, and guidance wherever some cell needs its negative prompt.

    Raises:
        ConfigError: the measurement gives a guidance that this model does not have.
    """
    field = guided_by(config)
    changes: dict[str, Any] = {}
    for other in sorted({"true_cfg_scale", "guidance_scale"} - {field}):
        if getattr(measurement, other):
            raise ConfigError(
                f"measurement.{other} is {getattr(measurement, other)}, but the model of actor_rollout_ref.model.path "
                f"{config.actor_rollout_ref.model.path} is guided by {field or 'nothing'}: leave it out"
                + (f", or give measurement.{field}" if field else "")
            )
    if field is not None:
        pipeline = config.actor_rollout_ref.rollout.validation_pipeline()
        scales = getattr(measurement, field) or [getattr(pipeline, field)]
        changes["actor_rollout_ref"] = {"rollout": {"pipeline": {field: max(scales)}}}
    if measurement.reward is not None:
        changes["reward"] = measurement.reward.model_dump()
    return config.with_changes(changes)


def guided_by(config: TrainConfig) -> str | None:
    """The field of `rollout.pipeline` that turns the model's classifier-free guidance on; None where none does.

    Raises:
        ConfigError: the model's folder is not there, or of an unknown architecture.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    with as_config_errors():
        adapter = DiffusionModelBase.get_class(DiffusionModelConfig.load(model, rollout.pipeline, rollout.algo))
    field = adapter.pipeline_fields[0] if adapter.pipeline_fields else None
    return field if field in ("true_cfg_scale", "guidance_scale") else None


def cells(config: TrainConfig, inputs: Inputs, measurement: Measurement) -> Iterator[Cell]:
    """Every combination of prompts, steps, guidance and seed.

    Raises:
        ConfigError: a set has fewer than two prompts, a prompt without an embedding or without what a reward looks for,
            or another model's embeddings.
    """
    pipeline, field = config.actor_rollout_ref.rollout.validation_pipeline(), guided_by(config)
    scales = (getattr(measurement, field) or [getattr(pipeline, field) or 0.0]) if field else [0.0]
    sets: dict[str, tuple[list[Prompt], Embeddings]] = {"test": (inputs.test, inputs.embeddings)}
    if measurement.sets:
        sets = {name: _load(config, inputs.model_config, name, entry) for name, entry in measurement.sets.items()}
    for name, (prompts, embeddings) in sets.items():
        if len(prompts) < 2:
            raise ConfigError(f"measurement.sets: {name} has {len(prompts)} prompt; an interval needs at least 2")
        yield from (
            Cell(name, prompts, embeddings, steps, field, guidance, seed)
            for steps, guidance, seed in product(
                measurement.num_inference_steps or [pipeline.num_inference_steps],
                scales,
                measurement.seeds,
            )
        )


def metrics(table: pd.DataFrame, verdict: Verdict, guided_by: str | None) -> dict[str, float]:
    """val/<set>/steps_<k>/<guided_by>_<g>/<reward>/mean over all seeds, their mean over cells, how many rewards are
    missing and how many samples are not finite, and the gains."""
    rewards = score_columns(table)
    means = table.groupby(["set", "steps", "guidance"])[rewards].mean()
    result = {f"val/{name}/mean": float(table[name].mean()) for name in rewards}
    result["val/reward/missing"] = float(table["reward"].isna().sum())
    result["val/rollout/not_finite"] = not_finite(table)
    for (name, steps, guidance), row in means.iterrows():
        label = _label(name, steps, guided_by, guidance)
        result |= {f"val/{label}/{reward}/mean": float(value) for reward, value in row.items()}
    for against in ("base", "best"):
        gain: Interval | None = getattr(verdict, against)
        if gain is not None:
            result |= {
                f"gain/{against}/mean": gain.mean,
                f"gain/{against}/low": gain.low,
                f"gain/{against}/high": gain.high,
            }
    return result


def _load(
    config: TrainConfig, model_config: DiffusionModelConfig, name: str, entry: PromptSet
) -> tuple[list[Prompt], PromptEmbeddings]:
    prompts = load_prompts(entry.prompts, entry.split)[: entry.max_prompts]
    embeddings = PromptEmbeddings.open(entry.embeddings)
    missing = [prompt.prompt for prompt in prompts if prompt.uid not in embeddings]
    if missing:
        raise ConfigError(f"measurement.sets: {entry.embeddings} lacks the embedding of {missing[0]!r} of set {name}")
    with as_config_errors():
        check_texts(entry.prompts, prompts)
        check_embeddings(config, model_config, embeddings, f"measurement.sets.{name}.embeddings")
        check_encoded(entry.prompts, prompts, embeddings)
        check_negatives(config, model_config, entry.prompts, prompts, embeddings)
        check_scored(config, prompts)
    return prompts, embeddings


def labelled(cell: Cell, result: Validation) -> pd.DataFrame:
    """The rewards of a cell's pictures, with the columns of `PAIR`."""
    return result.samples.assign(set=cell.name, steps=cell.steps, guidance=cell.guidance, seed=cell.seed)


def measurement_digest(config: TrainConfig, inputs: Inputs, measurement: Measurement) -> str:
    """A digest of what a measurement depends on beside the weights and the rewards' versions: of its sets' files the
    content.

    Args:
        config: what `for_measuring` gives, with the measurement's reward in place.

    Raises:
        ConfigError: a file of `measurement.sets` is not there.
    """
    rollout = config.actor_rollout_ref.rollout
    dumped = [
        DRAWN_AS,
        measurement.model_dump(mode="json", exclude={"reward", "confidence"}),
        rollout.name,
        shaping(rollout.validation_pipeline()),  # without settings that are younger than measurements, and unchanged
        shaping(config.actor_rollout_ref.model.model_copy(update={"initial_weights": None})),  # training begins there
        shaping(config.reward),
        None if config.data.encoders is None else shaping(config.data.encoders),
        [] if measurement.sets else [prompt.uid for prompt in inputs.test],
        inputs.digest,
        *(_digests(name, entry) for name, entry in sorted(measurement.sets.items())),
    ]
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()[:12]


def _digests(name: str, entry: PromptSet) -> list[str]:
    """Of the set's prompts, and of its embeddings' index, which lists the digests of their files."""
    files = {"prompts": entry.prompts, "embeddings": entry.embeddings / INDEX}
    for field, file in files.items():
        if not file.is_file():
            raise ConfigError(f"measurement.sets.{name}.{field}: {file} is missing; give what its data stage has made")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files.values()]
