# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings on disk: written once by a data stage, read by every run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from models.samples.trajectories import PromptTable
from tasks.data.digests import check_listed, file_digests, open_safetensors, read_index, validated, write_index
from tasks.data.prompt_files import NEGATIVE_UID, DatasetError
from tasks.data.prompts import _EMBEDDINGS_INDEX, EmbeddingsIndex, Prompt
from tasks.system.files import put_in_place

if TYPE_CHECKING:
    Encode = Callable[[list[str]], dict[str, torch.Tensor]]

INDEX = "index.json"


class PromptEmbeddings:
    """Text embeddings on disk, one unpadded tensor a prompt; only what is asked for is read.

    `extras` names what is stored for each prompt besides, for example `pooled_prompt_embeds`. `model_digest` says which
    text encoders it was, see `digests.parts_digest`; `sha256` is of each file, None in data of older versions.
    """

    def __init__(self, folder: Path, index: EmbeddingsIndex):
        """Take what an index says; `open` reads and checks one."""
        self.folder = folder
        self.model, self.model_digest = index.model, index.model_digest
        self.dim, self.max_sequence_length = index.dim, index.max_sequence_length
        self.extras = tuple(index.extras)
        self.sha256, self._shards, self._negatives = index.sha256, index.shards, index.negatives

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
        """Is there an embedding of this prompt?"""
        return uid in self._shards

    def get(self, uids: Sequence[str]) -> dict[str, "torch.Tensor"]:
        """`prompt_embeds` [P, L, D] as stored and `prompt_embeds_mask` [P, L] bool, P prompts in the order of `uids`.

        L is the longest of these prompts; shorter ones are filled up with zeros. The extras [P, ...] stand beside them
        under their names. Raises DatasetError for unknown uids.
        """
        stored = self._read(uids)
        rows = [stored[uid] for uid in uids]
        lengths = torch.tensor([len(row) for row in rows])
        embeds = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(embeds.shape[1]) < lengths[:, None]
        extras = {name: torch.stack([stored[f"{uid}/{name}"] for uid in uids]) for name in self.extras}
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask} | extras

    def longest(self, uids: Sequence[str]) -> str:
        """Which of these prompts has the most tokens; the embeddings themselves are not read."""
        lengths: dict[str, int] = {}
        for shard in sorted({self._shards[uid] for uid in uids}):
            with open_safetensors(self.folder / shard) as file:
                here = [uid for uid in uids if self._shards[uid] == shard]
                lengths |= {uid: file.get_slice(uid).get_shape()[0] for uid in here}
        return max(uids, key=lengths.__getitem__)

    def negative(self) -> dict[str, "torch.Tensor"]:
        """The negative prompt, as `get` returns it for P = 1: `prompt_embeds` [1, L, D] and so on."""
        return self.get([NEGATIVE_UID])

    def negatives(self, uids: Sequence[str]) -> dict[str, "torch.Tensor"]:
        """The negative prompts of P prompts as `get` returns them: [1, ...] of all, or [P, ...] where one has its own.

        Raises DatasetError for unknown uids.
        """
        if not any(uid in self._negatives for uid in uids):
            return self.negative()
        return self.get([self._negatives.get(uid, NEGATIVE_UID) for uid in uids])

    def _read(self, uids: Sequence[str]) -> dict[str, "torch.Tensor"]:
        missing = [uid for uid in uids if uid not in self._shards]
        if missing:
            raise DatasetError(
                f"{self.folder} has no embedding of prompt uid {missing[0]!r} (missing of those asked for: "
                f"{len(missing)}); run `dvc repro embeddings` and see embeddings.splits in params.yaml"
            )
        rows: dict[str, torch.Tensor] = {}
        for shard in sorted({self._shards[uid] for uid in uids}):
            with open_safetensors(self.folder / shard) as file:
                here = [uid for uid in uids if self._shards[uid] == shard]
                names = here + [f"{uid}/{name}" for uid in here for name in self.extras]
                rows |= {name: file.get_tensor(name) for name in names}
        for uid in uids:
            if rows[uid].ndim != 2 or rows[uid].shape[1] != self.dim or not rows[uid].is_floating_point():
                raise DatasetError(
                    f"{self.folder / self._shards[uid]} holds {list(rows[uid].shape)} of {rows[uid].dtype} for uid "
                    f"{uid!r}, not tokens of {self.dim} numbers; run `dvc repro embeddings`"
                )
        return rows


def write_embeddings(
    prompts: Sequence[Prompt],
    encode: "Encode",
    out_dir: str | Path,
    shard_size: int,
    *,
    batch_size: int,
    negative_prompt: str,
    max_sequence_length: int,
    model: str,
    model_digest: str,
) -> None:
    """Encode the prompts and the negative prompts into shards of `shard_size` prompts and an index in `out_dir`.

    `negative_prompt` is that of all prompts that have none of their own.

    `encode` takes up to `batch_size` texts and returns what a model adapter's `encode_prompts` does, to which it gave
    `max_sequence_length`. `model` and `model_digest` say which text encoder it was. `out_dir` appears whole or not at
    all.
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
        write_index(folder / INDEX, index)


def _write_shard(path: Path, texts: dict[str, str], encode: "Encode", batch_size: int) -> tuple[int, list[str]]:
    """Write one shard and return the width of its embeddings and the names of its extras."""
    rows: dict[str, torch.Tensor] = {}
    uids = list(texts)
    for start in range(0, len(uids), batch_size):
        batch = uids[start : start + batch_size]
        encoded = {name: tensor.cpu() for name, tensor in encode([texts[uid] for uid in batch]).items()}
        embeds, mask = encoded.pop("prompt_embeds"), encoded.pop("prompt_embeds_mask")
        for i, uid in enumerate(batch):
            # The copies cut a row off from its batch, whose storage safetensors would else refuse to share.
            own = {uid: embeds[i][mask[i].bool()]} | {f"{uid}/{name}": t[i].clone() for name, t in encoded.items()}
            if not all(tensor.isfinite().all() for tensor in own.values()):
                raise DatasetError(f"the text encoder gives {texts[uid]!r} (uid {uid}) values that are not finite")
            rows |= own
    save_file(rows, path)
    return embeds.shape[-1], sorted(encoded)


def prompt_table(embeddings: PromptEmbeddings, uids: Sequence[str], needs_negative: bool) -> PromptTable:
    """Embeddings of these prompts, each once, with their negative prompts' where guidance needs them."""
    negative = embeddings.negatives(uids) if needs_negative else {}
    return PromptTable.of(embeddings.get(uids) | {f"negative_{name}": tensor for name, tensor in negative.items()})
