# SPDX-License-Identifier: Apache-2.0
"""The prompts, embeddings and pairs of a run, opened, and whether there is what it asks of them."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.data.digests import IMAGE_SIDE
from tasks.data.embeddings import INDEX, Embeddings, PromptEmbeddings
from tasks.data.pairs import PairDataset
from tasks.data.prompts import DIGEST, Prompt, load_prompts, prompt_uid
from tasks.rewards import check_reward
from tasks.run.encoding_checks import check_embeddings, check_origin
from tasks.run.live_text import open_live, text_side

log = logging.getLogger(__name__)


class RunData(NamedTuple):
    """What a run reads.

    Attributes:
        test: the held-out prompts that validation draws.
        pairs: None where samples are made and not read.
        digest: 16 hexadecimal digits over the prompt table, what stands for the embeddings, and the index of the pairs.
    """

    train: list[Prompt]
    test: list[Prompt]
    embeddings: Embeddings
    pairs: PairDataset | None
    digest: str


def open_data(
    config: TrainConfig, model_config: DiffusionModelConfig, latent_shape: tuple[int, ...], trains: bool
) -> RunData:
    """The prompts, their embeddings and, to train, the pairs; the digest is over their tables and indices alone."""
    train, held_out = load_prompts(config.data.prompts, "train"), load_prompts(config.data.prompts, "test")
    check_texts(config.data.prompts, train + held_out)
    test = held_out[: config.actor_rollout_ref.rollout.val_kwargs.max_prompts]
    embeddings, made_by = _open_embeddings(config, model_config)
    content = config.data.prompts.read_bytes() + made_by
    pairs, encoded = None, train + test
    if trains and not config.is_online:
        every = load_prompts(config.data.prompts)
        pairs = _open_pairs(config, embeddings, latent_shape, every, {prompt.uid for prompt in held_out})
        encoded = encoded + _of_pairs_alone(pairs, every, encoded)
        content += (config.data.pairs / INDEX).read_bytes()
    if trains:
        _check_count(config, len(train) if pairs is None else len(pairs.pairs))
    missing = [prompt for prompt in train + test if prompt.uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of {missing[0].prompt!r} ({len(missing)} in all): run "
            "`dvc repro embeddings`"
        )
    if isinstance(embeddings, PromptEmbeddings):
        check_embeddings(config, model_config, embeddings)
        check_encoded(config.data.prompts, encoded, embeddings)
        check_negatives(config, model_config, config.data.prompts, encoded, embeddings)
    if config.is_online or not trains:
        # What a function of the user's makes of the train prompts is known when it is called.
        check_scored(config, test if config.data.rewrite_prompts else train + test)
    return RunData(train, test, embeddings, pairs, hashlib.sha256(content).hexdigest()[:16])


def check_texts(table: Path, prompts: Sequence[Prompt]) -> None:
    """No text was changed under its uid, by which embeddings, samples and records know it.

    A uid that a user gives may be anything: one is taken to be a text's where it looks so and others of the table are.

    Raises:
        ConfigError: one was.
    """
    odd = [prompt for prompt in prompts if prompt.uid != prompt_uid(prompt.prompt)]
    changed = [prompt for prompt in odd if DIGEST.fullmatch(prompt.uid)]
    if changed and len(odd) < len(prompts):
        uid, text = changed[0].uid, changed[0].prompt
        raise ConfigError(
            f"{table}: the uid {uid!r} is of another text than {text[:60]!r} ({len(changed)} in all), which was "
            f"changed later: give it the uid {prompt_uid(text)!r} and encode the prompts again, or bring the text back"
        )


def check_encoded(table: Path, prompts: Sequence[Prompt], embeddings: PromptEmbeddings) -> None:
    """What was encoded under the prompts' uids are the texts that the table has for them.

    Embeddings of older versions do not say it of uids that users give: they are taken, with a warning.

    Raises:
        ConfigError: another text was.
    """
    same = [embeddings.has_text_of(prompt) for prompt in prompts]
    other = [prompt for prompt, known in zip(prompts, same, strict=True) if known is False]
    if other:
        raise ConfigError(
            f"{embeddings.folder} has another text under the uid {other[0].uid!r} than {table}, where it is "
            f"{other[0].prompt[:60]!r} ({len(other)} in all): run `dvc repro embeddings`, or bring the table back"
        )
    if None in same:
        log.warning(
            "%s is of an older version, whose index has no digests of texts: whether it was made from those that %s "
            "has for its %d uids of your own is not checked; `dvc repro embeddings` makes it anew",
            *(embeddings.folder, table, same.count(None)),
        )


def check_negatives(
    config: TrainConfig,
    model_config: DiffusionModelConfig,
    table: Path,
    prompts: Sequence[Prompt],
    embeddings: PromptEmbeddings,
) -> None:
    """What guidance contrasts a prompt with is what its row says; without guidance it is nobody's matter.

    Raises:
        ConfigError: the row's negative prompt is another than the one that was encoded.
    """
    if not is_guided(config, model_config):
        return
    other = [prompt for prompt in prompts if not embeddings.has_negative_of(prompt)]
    if other:
        raise ConfigError(
            f"{embeddings.folder} was encoded with another negative prompt than {table} has for "
            f"{other[0].prompt[:60]!r} ({len(other)} in all), which was changed later: run `dvc repro embeddings`, or "
            "bring the table back"
        )


def is_guided(config: TrainConfig, model_config: DiffusionModelConfig) -> bool:
    """Is the rollout guided, or the validation?"""
    rollout, adapter = config.actor_rollout_ref.rollout, DiffusionModelBase.get_class(model_config)
    return any(adapter.is_guided(pipeline) for pipeline in (rollout.pipeline, rollout.validation_pipeline()))


def check_scored(config: TrainConfig, prompts: Sequence[Prompt]) -> None:
    """The prompts say what the rewards look for. Raises RewardError, which names a prompt that does not."""
    for name, entry in config.reward.named().values():
        if isinstance(reward := check_reward(name, **entry.options), type):
            reward.check_prompts(name, entry.options, prompts)


def _check_count(config: TrainConfig, there: int) -> None:
    """There is enough for one iteration."""
    offline = not config.is_online
    file, what = (config.data.pairs, "pairs") if offline else (config.data.prompts, "train prompts")
    if there < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size} but {file} has only {there} {what}: lower it or "
            f"add {what}"
        )


def _open_embeddings(config: TrainConfig, model_config: DiffusionModelConfig) -> tuple[Embeddings, bytes]:
    """Those on disk or those that the run will make, and what stands for them in the digest of its data."""
    folder = config.data.embeddings
    if isinstance(folder, Path):
        embeddings = PromptEmbeddings.open(folder)
        return embeddings, (folder / INDEX).read_bytes()
    return open_live(config, model_config), text_side(config).encode()


def _of_pairs_alone(pairs: PairDataset, every: Sequence[Prompt], known: Sequence[Prompt]) -> list[Prompt]:
    """Those of all prompts that pairs have and that are of a split which nothing else is read of."""
    uids = {pair.prompt_uid for pair in pairs.pairs} - {prompt.uid for prompt in known}
    return [prompt for prompt in every if prompt.uid in uids]


def _open_pairs(
    config: TrainConfig,
    embeddings: Embeddings,
    latent_shape: tuple[int, ...],
    every: Sequence[Prompt],
    held_out: set[str],
) -> PairDataset:
    """The pairs fit the model's latents, and their prompts are encoded and none of them is held out.

    Args:
        every: all prompts of the table.
        held_out: uids, also of prompts that validation does not draw.
    """
    pairs = PairDataset.open(config.data.pairs).named_by(every)
    if pairs.latent_shape != tuple(latent_shape):
        raise ConfigError(
            f"{config.data.pairs} holds latents {list(pairs.latent_shape)} but rollout.pipeline height and width make "
            f"{list(latent_shape)}: set them to the size of the pairs' pictures"
        )
    seen = [pair for pair in pairs.pairs if pair.prompt_uid in held_out]
    if seen:
        raise ConfigError(
            f"{config.data.pairs} has pairs of prompts that {config.data.prompts} holds out, pair {seen[0].uid!r} for "
            f"example ({len(seen)} in all): leave them out of the preference table, or make the split of their prompts "
            "another than test"
        )
    missing = [pair for pair in pairs.pairs if pair.prompt_uid not in embeddings]
    if missing:
        raise ConfigError(
            f"{config.data.embeddings} lacks the embedding of the prompt of pair {missing[0].uid!r} ({len(missing)} in "
            "all): put the pairs' prompts into the prompt table and run `dvc repro embeddings`"
        )
    check_origin(config, pairs, IMAGE_SIDE, "pairs", "data.pairs")
    return pairs
