# SPDX-License-Identifier: Apache-2.0
"""Whether what was encoded before a run, its embeddings and pairs, was made by the run's model and fits it."""

import logging

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import text_width
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.digests import TEXT_SIDE, check_files, made_with
from tasks.data.embeddings import PromptEmbeddings
from tasks.data.pairs import PairDataset

log = logging.getLogger(__name__)


def check_embeddings(
    config: TrainConfig,
    model_config: DiffusionModelConfig,
    embeddings: PromptEmbeddings,
    field: str = "data.embeddings",
) -> None:
    """They hold what the model needs, and were made as the run expects; texts that were cut are warned of.

    Args:
        field: that names their folder.

    Raises:
        ConfigError: another model's text encoders made them, or with other settings; or a file is damaged.
    """
    folder = embeddings.folder
    adapter = DiffusionModelBase.get_class(model_config)
    lacking = sorted(set(adapter.prompt_extras) - set(embeddings.extras))
    if lacking:
        raise ConfigError(
            f"{field} {folder} lacks {', '.join(lacking)}: encode the prompts with "
            f"actor_rollout_ref.model.path {config.actor_rollout_ref.model.path}"
        )
    width = text_width(model_config)
    if width not in (None, embeddings.dim):
        raise ConfigError(
            f"{field} {folder} holds vectors of {embeddings.dim} numbers, but the transformer "
            f"of actor_rollout_ref.model.path {config.actor_rollout_ref.model.path} takes {width}: encode the prompts "
            "with it"
        )
    adapter.check_text_length(embeddings.max_sequence_length, f"max_sequence_length of {field} {folder}")
    wanted = config.actor_rollout_ref.rollout.pipeline.max_sequence_length
    if wanted not in (None, embeddings.max_sequence_length):
        raise ConfigError(
            f"rollout.pipeline.max_sequence_length is {wanted}, but {folder} was encoded with "
            f"{embeddings.max_sequence_length}: encode the prompts again or leave the field out"
        )
    check_origin(config, embeddings, TEXT_SIDE, "embeddings", field)
    if embeddings.cut:
        log.warning(
            "%s %s: of %d texts the first %d tokens alone were encoded (too_long: cut), such as that of %s",
            *(field, folder, len(embeddings.cut), embeddings.max_sequence_length, min(embeddings.cut)),
        )


def check_origin(
    config: TrainConfig, data: PromptEmbeddings | PairDataset, parts: tuple[str, ...], stage: str, field: str
) -> None:
    """What was encoded before was encoded by these parts of this model, and is as it was written.

    Data of older versions cannot be compared, nor can a model that lacks the parts: it is taken, with a warning.
    """
    folder = data.folder
    model, maker = config.actor_rollout_ref.model.path, " and ".join(part.rstrip("*") for part in parts)
    same = made_with(data.model_digest, model, parts)
    if same is False:
        raise ConfigError(
            f"{field} {folder} was made with another {maker} than actor_rollout_ref.model.path {model} has: make "
            f"it with `python -m flows.prepare {stage} --model {model} --out {folder}`, or give the model that made it"
        )
    if data.sha256 is None:
        log.warning(
            "%s %s is of an older version: whether the %s of %s made it, and whether it is whole, is not checked; "
            "`python -m flows.prepare %s` makes it anew",
            *(field, folder, maker, model, stage),
        )
        return
    if same is None:
        log.warning("%s has no %s: whether they made %s %s is not checked", model, maker, field, folder)
    check_files(folder, data.sha256)
