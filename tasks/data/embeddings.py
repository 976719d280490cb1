# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings: what a run asks of them, and those on disk, written once by a data stage and read by every run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.samples.trajectories import PromptTable
from tasks.data.digests import check_listed, file_digests, read_index, validated, write_index
from tasks.data.prompt_files import NEGATIVE_UID, DatasetError
from tasks.data.prompts import _EMBEDDINGS_INDEX, DIGEST, EmbeddingsIndex, Prompt, prompt_uid
from tasks.data.shard_files import ShardFiles
from tasks.system.files import put_in_place

Encode = Callable[[list[str]], dict[str, torch.Tensor]]
"""What a model adapter's `encode_prompts` does, for texts alone."""
Row = dict[str, torch.Tensor]
"""One prompt as it is kept: `prompt_embeds` [L, D], unpadded, and its extras by name."""
TOKENS = "prompt_embeds"
INDEX = "index.json"


class Embeddings(ABC):
    """Text embeddings of prompts by uid, wherever they come from: each as unpadded tokens, and what a model needs
    besides.

    Attributes:
        max_sequence_length: with which they were encoded.
        extras: names of what there is for each prompt beside the sequence, for example `pooled_prompt_embeds`.
    """

    max_sequence_length: int
    extras: tuple[str, ...]

    @abstractmethod
    def __contains__(self, uid: str) -> bool:
        """Is there an embedding of this prompt?"""

    @abstractmethod
    def _read(self, uids: Sequence[str]) -> Mapping[str, Row]:
        """What is kept of each of these prompts. Raises DatasetError for unknown uids."""

    @property
    @abstractmethod
    def _negatives(self) -> Mapping[str, str]:
        """Uid -> the uid of its own negative prompt, of the prompts that have one."""

    @abstractmethod
    def longest_table(self, uids: Sequence[str], needs_negative: bool) -> PromptTable | None:
        """A table of one prompt, as long as the longest of these: to say what a pass costs. None where its shapes are
        not known."""

    def get(self, uids: Sequence[str]) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [P, L, D] as stored and `prompt_embeds_mask` [P, L] bool, P prompts in the order of `uids`.

        L is the longest of these prompts; shorter ones are filled up with zeros. The extras [P, ...] stand beside them
        under their names. Raises DatasetError for unknown uids.
        """
        stored = self._read(uids)
        rows = [stored[uid][TOKENS] for uid in uids]
        lengths = torch.tensor([len(row) for row in rows])
        embeds = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(embeds.shape[1]) < lengths[:, None]
        extras = {name: torch.stack([stored[uid][name] for uid in uids]) for name in self.extras}
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask} | extras

    def negative(self) -> dict[str, torch.Tensor]:
        """The negative prompt, as `get` returns it for P = 1: `prompt_embeds` [1, L, D] and so on."""
        return self.get([NEGATIVE_UID])

    def negatives(self, uids: Sequence[str]) -> dict[str, torch.Tensor]:
        """The negative prompts of P prompts as `get` returns them: [1, ...] of all, or [P, ...] where one has its own.

        Raises DatasetError for unknown uids.
        """
        if not any(uid in self._negatives for uid in uids):
            return self.negative()
        return self.get([self._negatives.get(uid, NEGATIVE_UID) for uid in uids])


class PromptEmbeddings(Embeddings):
    """Text embeddings on disk, one unpadded tensor a prompt; only what is asked for is read.

    `model_digest` says which text encoders it was, see `digests.parts_digest`; `sha256` is of each file, None in data
    of older versions; `cut` has the uids of texts that were too long, of which the beginning alone was encoded.
    """

    _negatives: Mapping[str, str] = {}

    def __init__(self, folder: Path, index: EmbeddingsIndex):
        """Take what an index says; `open` reads and checks one."""
        self.folder = folder
        self.model, self.model_digest = index.model, index.model_digest
        self.dim, self.max_sequence_length = index.dim, index.max_sequence_length
        self.extras, self.cut = tuple(index.extras), frozenset(index.cut)
        self.sha256, self._shards, self._negatives = index.sha256, index.shards, index.negatives
        self.negative_prompt, self._text_digests = index.negative_prompt, index.text_digests
        self._files = ShardFiles(folder, index.shards.values(), index.sha256)

    @classmethod
    def open(cls, folder: str | Path) -> "PromptEmbeddings":
        """The embeddings that `write_embeddings` left in `folder`. Raises DatasetError for none, or a damaged index."""
        index = Path(folder) / INDEX
        stored = read_index(index, "embeddings")
        if "extras" not in stored:
            raise DatasetError(f"{index} is of an older version of this project; `dvc repro embeddings` makes it anew")
        record = validated(_EMBEDDINGS_INDEX, stored, index, "embeddings")
        check_listed(index, "embeddings", set(record.shards.values()), record.sha256)
        return cls(Path(folder), record)

    def __contains__(self, uid: str) -> bool:
        return uid in self._shards

    def has_text_of(self, prompt: Prompt) -> bool | None:
        """Was it this prompt's text that was encoded under its uid? None where the index, of an older version, does not
        say so of uids that users give; one that looks like a text's digest is taken for that of the text."""
        text = prompt_uid(prompt.prompt)
        if self._text_digests is None:
            return True if prompt.uid == text else False if DIGEST.fullmatch(prompt.uid) else None
        return self._text_digests.get(prompt.uid, prompt.uid) == text

    def has_negative_of(self, prompt: Prompt) -> bool:
        """Was this prompt encoded with the negative prompt that its row names, or with that of all where it names none?

        Where the index does not say what that of all is, the row's may be it.
        """
        own, stored = prompt.negative, self._negatives.get(prompt.uid)
        if own is None or own.prompt == self.negative_prompt:
            return stored is None
        return stored == own.uid or (stored is None and self.negative_prompt is None)

    def longest_table(self, uids: Sequence[str], needs_negative: bool) -> PromptTable:
        """The prompt with the most tokens; the embeddings of the others are not read."""
        return prompt_table(self, [self.longest(uids)], needs_negative)

    def longest(self, uids: Sequence[str]) -> str:
        """Which of these prompts has the most tokens; the embeddings themselves are not read."""
        lengths: dict[str, int] = {}
        for shard in sorted({self._shards[uid] for uid in uids}):
            with self._files.open(shard) as file:
                here = [uid for uid in uids if self._shards[uid] == shard]
                lengths |= {uid: file.get_slice(uid).get_shape()[0] for uid in here}
        return max(uids, key=lengths.__getitem__)

    def _read(self, uids: Sequence[str]) -> dict[str, Row]:
        missing = [uid for uid in uids if uid not in self._shards]
        if missing:
            raise DatasetError(
                f"{self.folder} has no embedding of prompt uid {missing[0]!r} (missing of those asked for: "
                f"{len(missing)}); run `dvc repro embeddings` and see embeddings.splits in params.yaml"
            )
        rows: dict[str, Row] = {}
        for shard in sorted({self._shards[uid] for uid in uids}):
            with self._files.open(shard) as file:
                for uid in (uid for uid in uids if self._shards[uid] == shard):
                    extras = {name: file.get_tensor(f"{uid}/{name}") for name in self.extras}
                    rows[uid] = {TOKENS: file.get_tensor(uid)} | extras
        for uid in uids:
            tokens = rows[uid][TOKENS]
            if tokens.ndim != 2 or tokens.shape[1] != self.dim or not tokens.is_floating_point():
                raise DatasetError(
                    f"{self.folder / self._shards[uid]} holds {list(tokens.shape)} of {tokens.dtype} for uid "
                    f"{uid!r}, not tokens of {self.dim} numbers; run `dvc repro embeddings`"
                )
        return rows


def write_embeddings(
    prompts: Sequence[Prompt],
    encode: Encode,
    out_dir: str | Path,
    shard_size: int,
    *,
    batch_size: int,
    negative_prompt: str,
    max_sequence_length: int,
    model: str,
    model_digest: str,
    cut: Collection[str] = (),
) -> None:
    """Encode the prompts and the negative prompts into shards of `shard_size` prompts and an index in `out_dir`.

    `negative_prompt` is that of all prompts that have none of their own. A uid that is not its text's has the text's
    beside it in the index, so that another text under the same uid is known as one that is not encoded.

    `encode` takes up to `batch_size` texts and returns what a model adapter's `encode_prompts` does, to which it gave
    `max_sequence_length`. `model` and `model_digest` say which text encoder it was. `cut` are the uids of the texts of
    which `encode` keeps only the beginning; where there are some the index names them, so that it is another one than
    that of the same texts as a whole. `out_dir` appears whole or not at all.
    """
    own = {prompt.uid: prompt.negative for prompt in prompts if prompt.negative is not None}
    negatives = {uid: negative.uid for uid, negative in own.items() if negative.prompt != negative_prompt}
    texts = {NEGATIVE_UID: negative_prompt} | {prompt.uid: prompt.prompt for prompt in prompts}
    texts |= {own[uid].uid: own[uid].prompt for uid in negatives}
    uids = list(texts)
    groups = [uids[i : i + shard_size] for i in range(0, len(uids), shard_size)]
    names = [f"embeddings-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    with put_in_place(Path(out_dir)) as folder:
        folder.mkdir()
        for name, group in zip(names, groups, strict=True):
            dim, extras = _write_shard(folder / name, {uid: texts[uid] for uid in group}, encode, batch_size)
        shards = {uid: name for name, group in zip(names, groups, strict=True) for uid in group}
        index = {
            "model": model,
            "model_digest": model_digest,
            "negative_prompt": negative_prompt,
            "max_sequence_length": max_sequence_length,
            "dim": dim,
            "extras": extras,
            "sha256": file_digests(folder),
            "shards": shards,
        }
        if negatives:
            index["negatives"] = negatives
        if given := {prompt.uid: text for prompt in prompts if (text := prompt_uid(prompt.prompt)) != prompt.uid}:
            index["text_digests"] = given
        if shortened := [uid for uid in uids if uid in cut]:
            index["cut"] = shortened
        write_index(folder / INDEX, index)


def _write_shard(path: Path, texts: dict[str, str], encode: Encode, batch_size: int) -> tuple[int, list[str]]:
    """Write one shard and return the width of its embeddings and the names of its extras."""
    encoded, tensors = encoded_rows(texts, encode, batch_size), dict[str, torch.Tensor]()
    for uid, row in encoded.items():
        tensors |= {uid if name == TOKENS else f"{uid}/{name}": tensor for name, tensor in row.items()}
    save_file(tensors, path)
    any_row = next(iter(encoded.values()))
    return any_row[TOKENS].shape[-1], sorted(any_row.keys() - {TOKENS})


def encoded_rows(texts: Mapping[str, str], encode: Encode, batch_size: int) -> dict[str, Row]:
    """The embeddings of texts by uid, on the CPU.

    Args:
        texts: uid -> text.
        encode: of up to `batch_size` texts.

    Raises:
        DatasetError: some are not finite.
    """
    rows: dict[str, Row] = {}
    uids = list(texts)
    for start in range(0, len(uids), batch_size):
        batch = uids[start : start + batch_size]
        encoded = {name: tensor.cpu() for name, tensor in encode([texts[uid] for uid in batch]).items()}
        embeds, mask = encoded.pop(TOKENS), encoded.pop("prompt_embeds_mask")
        for i, uid in enumerate(batch):
            # The copies cut a row off from its batch, whose storage safetensors would else refuse to share.
            rows[uid] = {TOKENS: embeds[i][mask[i].bool()]} | {name: t[i].clone() for name, t in encoded.items()}
            if not all(tensor.isfinite().all() for tensor in rows[uid].values()):
                raise DatasetError(f"the text encoder gives {texts[uid]!r} (uid {uid}) values that are not finite")
    return rows


def prompt_table(embeddings: Embeddings, uids: Sequence[str], needs_negative: bool) -> PromptTable:
    """Embeddings of these prompts, each once, with their negative prompts' where guidance needs them."""
    negative = embeddings.negatives(uids) if needs_negative else {}
    return PromptTable.of(embeddings.get(uids) | {f"negative_{name}": tensor for name, tensor in negative.items()})
