# SPDX-License-Identifier: Apache-2.0
"""Text encoders in the run: what is checked and known of them before they load, and how they are started."""

from pathlib import Path

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import pipeline_config
from tasks.actors.rank_places import RankPlaces
from tasks.actors.text_encoder_group import TextEncoderGroup
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.digests import TEXT_SIDE, WEIGHTS, parts_digest
from tasks.data.embeddings import Embeddings
from tasks.data.live_embeddings import LiveEmbeddings
from tasks.data.prompts import load_prompts
from tasks.data.text_encoding import EncodingSettings

MIB = 2**20


def open_live(config: TrainConfig, model_config: DiffusionModelConfig) -> LiveEmbeddings:
    """The embeddings that the run is to make of its prompts; what encodes them starts later.

    Raises:
        ConfigError: the model's folder lacks a text encoder, or the length of prompts is not given.
    """
    _check_encoders(config)
    adapter, settings = DiffusionModelBase.get_class(model_config), encoding_settings(config)
    given = settings.negative_prompt
    return LiveEmbeddings(
        load_prompts(config.data.prompts),
        negative_prompt=adapter.negative_prompt if given is None else given,
        max_sequence_length=settings.max_sequence_length,
        shapes=adapter.text_shapes(model_config, settings.max_sequence_length) or None,
        extras=adapter.prompt_extras,
        cache_bytes=config.data.text_encoder.cache_mib * MIB,
    )


def text_side(config: TrainConfig) -> str:
    """What stands for the text encoders in a run's data digest: the digest that embeddings on disk would name."""
    return str(parts_digest(config.actor_rollout_ref.model.path, TEXT_SIDE))


def encoding_settings(config: TrainConfig) -> EncodingSettings:
    """How the run's text encoders encode."""
    policy, encoder = config.actor_rollout_ref, config.data.text_encoder
    length = policy.rollout.pipeline.max_sequence_length
    if length is None:
        raise ConfigError("rollout.pipeline.max_sequence_length is null: say how many tokens a prompt may have")
    return EncodingSettings(
        dtype=encoder.dtype or policy.model.dtype,
        device=encoder.device,
        max_sequence_length=length,
        negative_prompt=encoder.negative_prompt,
        threads=encoder.threads,
        external_lib=policy.model.external_lib,
    )


def start_text_encoders(
    config: TrainConfig, embeddings: Embeddings, places: RankPlaces | None
) -> TextEncoderGroup | None:
    """The text encoders of a run whose embeddings are live, loading in the background; None for one without.

    Args:
        places: of the trainer's ranks, see `TextEncoderGroup`.
    """
    if not isinstance(embeddings, LiveEmbeddings):
        return None
    path = config.actor_rollout_ref.model.path
    group = TextEncoderGroup(path, config.data.text_encoder, encoding_settings(config), places)
    embeddings.encode = group.encode
    embeddings.start = None if config.data.text_encoder.sleeps else group.start
    return group


def _check_encoders(config: TrainConfig) -> None:
    """Every text encoder that the folder names is in it."""
    path = config.actor_rollout_ref.model.path
    parts = {name: kind for name, kind in pipeline_config(path).items() if name.startswith("text_encoder")}
    named = [name for name, kind in parts.items() if isinstance(kind, list) and kind[-1] is not None]
    advice = "give the whole model, or embeddings on disk"
    if not named:
        raise ConfigError(
            f"data.embeddings is live, but model_index.json of actor_rollout_ref.model.path {path} names no text "
            f"encoder: {advice}"
        )
    for name in named:
        if not any(file.suffix in WEIGHTS for file in (Path(path) / name).glob("*")):
            raise ConfigError(
                f"data.embeddings is live, but {name} of actor_rollout_ref.model.path {path} holds no weights: {advice}"
            )
