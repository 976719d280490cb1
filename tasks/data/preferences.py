# SPDX-License-Identifier: Apache-2.0
"""Preference pairs of a model's own: sample it, score the pictures, keep each prompt's best and worst."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import ValidationError
from tqdm import tqdm

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import RolloutRequest
from models.schedulers.noise_keys import NoiseKey
from tasks.config.errors import described
from tasks.config.params import PreferencesParams
from tasks.data.digests import TEXT_SIDE, made_with
from tasks.data.embeddings import PromptEmbeddings, prompt_table
from tasks.data.pairs import best_and_worst
from tasks.data.prompt_files import DatasetError
from tasks.data.prompts import Prompt
from tasks.rewards import Reward

log = logging.getLogger(__name__)


def sampled_preferences(  # noqa: PLR0913  # each is said by somebody else
    model: Path,
    embeddings: Path,
    prompts: Sequence[Prompt],
    *,
    reward: Reward,
    settings: PreferencesParams,
    pipeline: Mapping[str, Any],
    dtype: str = "float32",
    device: str = "cpu",
    external_lib: str | None = None,
) -> pd.DataFrame:
    """The preference table of `pairs` for these prompts; one whose pictures are all worth the same gives no pair. A
    picture that is not finite is in none, and told.

    Args:
        model: folder in diffusers format.
        embeddings: folder of the `embeddings` stage, by this model's encoders.
        reward: what says which picture is better.
        settings: how many pictures a prompt, how many prompts at once, and the seed; of size and steps see `pipeline`.
        pipeline: fields of `DiffusionPipelineConfig`: size, steps, guidance.
        dtype, device: in which number format and where the model computes.
        external_lib: module that registers the model's family, of one that is not the project's.

    Raises:
        DatasetError: the model cannot be sampled so, draws nothing finite, or other encoders made the embeddings.
    """
    store = PromptEmbeddings.open(embeddings)
    if made_with(store.model_digest, model, TEXT_SIDE) is False:
        raise DatasetError(
            f"{embeddings} was made with other text encoders than {model} has: encode the prompts with it"
        )
    try:
        sampling = DiffusionPipelineConfig(**pipeline)
        described_model = ModelConfig(path=str(model), dtype=dtype, external_lib=external_lib)
        config = DiffusionModelConfig.load(described_model, sampling, DiffusionRolloutAlgoConfig())
        adapter = DiffusionModelBase.get_class(config)
        adapter.check_pipeline(config)
    except ValidationError as error:
        section = ModelConfig if error.title == ModelConfig.__name__ else DiffusionPipelineConfig
        raise DatasetError(f"{model} cannot be sampled so: {described(error, section)}") from error
    except ValueError as error:
        raise DatasetError(f"{model} cannot be sampled so: {' '.join(str(error).split())}") from error
    engine = DiffusersRolloutEngine(config, device)
    images, batch_size = settings.images_per_prompt, settings.batch_size
    tables, drawn, sound = [], 0, 0
    for start in tqdm(range(0, len(prompts), batch_size), desc="preferences", unit="batch"):
        part = prompts[start : start + batch_size]
        keys = tuple(NoiseKey(settings.seed, 0, prompt.uid, i) for prompt in part for i in range(images))
        rows = torch.arange(len(part)).repeat_interleave(images)
        table = prompt_table(store, [prompt.uid for prompt in part], adapter.is_guided(sampling))
        made = engine.produce(RolloutRequest(keys, table, rows, window=()))
        assert made.pictures is not None, "a request asks for pictures by default"
        pictures, scores = made.pictures.numpy(), np.full(len(keys), np.nan, np.float32)
        there = made.finite.nonzero().flatten().tolist()
        drawn, sound = drawn + len(keys), sound + len(there)
        if there:
            scores[there] = reward(pictures[there], [part[row // images] for row in there]).scores
        tables.append(best_and_worst([prompt.prompt for prompt in part], pictures, scores, images))
    if not sound:
        raise DatasetError(f"none of the {drawn} pictures that {model} draws in {dtype} is finite: look at its weights")
    if sound < drawn:
        tqdm.write(f"{drawn - sound} of {drawn} pictures are not finite and in no pair")
    return pd.concat(tables, ignore_index=True)


def check_encoded(embeddings: Path, prompts: Sequence[Prompt], encoded_by: str) -> None:
    """There are embeddings of all prompts, and of these texts of theirs.

    Args:
        embeddings: folder of the `embeddings` stage.
        encoded_by: the command that makes those of these prompts.

    Raises:
        DatasetError: of some there are none; the message has the command.
    """
    store = PromptEmbeddings.open(embeddings)
    same = [prompt.uid in store and store.has_text_of(prompt) for prompt in prompts]
    missing = [prompt for prompt, known in zip(prompts, same, strict=True) if known is False]
    if missing:
        raise DatasetError(
            f"{embeddings} lacks the embedding of {missing[0].prompt[:60]!r} ({len(missing)} in all): `{encoded_by}` "
            "makes them, where the data set's embeddings.splits in params.yaml has train"
        )
    if None in same:
        log.warning("%s does not say of which texts it is; `%s` makes it anew", embeddings, encoded_by)
