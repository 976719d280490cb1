# SPDX-License-Identifier: Apache-2.0
"""Data sets: raw prompt files become one prompt table, and the table's prompts become sharded embeddings."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
from pydantic import Field, TypeAdapter

from tasks.config.params import RawFile
from tasks.data.prompt_files import NEGATIVE_UID, SPLITS, DatasetError, PromptRow, check_text, is_visible, read_parquet
from tasks.data.raw_files import SYSTEM, read_raw_file

if TYPE_CHECKING:
    import torch

    Encode = Callable[[list[str]], dict[str, torch.Tensor]]

COLUMNS = ("uid", "prompt", "split", "target", "metadata", "source")
ShardName = Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]
"""Of a file beside the index."""


@dataclass(frozen=True)
class EmbeddingsIndex:
    """What `PromptEmbeddings` reads of its index; see there."""

    model: str
    model_digest: str
    dim: Annotated[int, Field(gt=0)]
    max_sequence_length: Annotated[int, Field(gt=0)]
    extras: list[str]
    shards: dict[str, ShardName]
    negative_prompt: str | None = None
    sha256: dict[str, str] | None = None
    negatives: dict[str, str] = field(default_factory=dict)
    text_digests: dict[str, str] | None = None
    cut: list[str] = field(default_factory=list)


_EMBEDDINGS_INDEX = TypeAdapter(EmbeddingsIndex)
JSON_ERRORS = (TypeError, ValueError, RecursionError)
"""What a value that JSON has no form for ends in."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt table; `target` is what the picture should show, where a reward needs to know it."""

    uid: str
    prompt: str
    target: str | None
    metadata: dict[str, Any]
    source: str

    @property
    def negative(self) -> "Prompt | None":
        """What guidance contrasts this prompt with, where its row says so; else the data set's own negative prompt."""
        text = self.metadata.get("negative_prompt")
        if not isinstance(text, str):
            return None
        return Prompt(f"{NEGATIVE_UID}/{prompt_uid(text)}", text, None, {}, f"{self.source}: negative_prompt")


DIGEST = re.compile("[0-9a-f]{16}")
"""What `prompt_uid` gives: a uid of a user's that looks so is taken for one."""


def prompt_uid(prompt: str) -> str:
    """The name of a prompt wherever it occurs: 16 hex digits of its text's BLAKE2b."""
    return blake2b(prompt.encode(), digest_size=8).hexdigest()


def build_prompt_table(
    files: Sequence[RawFile | str], *, n_test: int, n_train: int | None, seed: int, target_pattern: str | None
) -> pd.DataFrame:
    """The prompt table of raw files: columns uid, prompt, split, target, metadata (JSON) and source ("file:line").

    The prompts are shuffled by `seed`: the first `n_test` make the test split, the next `n_train` the train split
    (None: all that are left) and the rest the pretrain split. A row that names its split keeps it and is not counted.
    A row without a `target` key gets the group of `target_pattern`, a regular expression; without one it has no target.
    Rows that are the same in every key are one, at the first one's place; `attrs["repeated"]` counts the others, and
    `attrs["chats"]` the rows with a system message. Raises DatasetError for unusable rows, a prompt with two different
    rows, be it in two spellings of Unicode, a pattern that does not match, or too few prompts.
    """
    read = [row for file in files for row in read_raw_file(file)]
    rows = _without_repeats(read)
    uids = [row.fields.get("uid") or prompt_uid(row.prompt) for row in rows]
    _check_distinct([unicodedata.normalize("NFC", row.prompt) for row in rows], rows, "prompt")
    _check_distinct(uids, rows, "uid")
    free = [uid for uid, row in zip(uids, rows, strict=True) if row.fields.get("split") is None]
    drawn = _draw_splits(free, n_test, n_train, seed)
    table = [
        (
            uid,
            row.prompt,
            row.fields.get("split") or drawn[uid],
            _target(row, target_pattern),
            _metadata(row),
            row.source,
        )
        for uid, row in zip(uids, rows, strict=True)
    ]
    frame = pd.DataFrame(table, columns=COLUMNS, dtype="str")
    frame.attrs |= {"repeated": len(read) - len(rows), "chats": sum(SYSTEM in row.fields for row in rows)}
    return frame


def load_prompts(path: str | Path, split: str | None = None) -> list[Prompt]:
    """The prompts of a prompt table, in the table's order; `split` keeps one split of it.

    Raises DatasetError when the file is missing or no prompt table, and when nothing is left.
    """
    if split not in (None, *SPLITS):
        raise DatasetError(f"{split!r} is no split; it must be one of {', '.join(SPLITS)}")
    if Path(path).is_dir():
        raise DatasetError(
            f"{path} is a folder: give the prompt table itself, such as {Path(path) / 'prompts.parquet'}"
        )
    if not Path(path).is_file():
        raise DatasetError(f"{path} is missing; `dvc repro prompts` makes it")
    rows = read_parquet(Path(path))
    if rows and set(COLUMNS) <= set(rows[0]):
        numbered = [(number, row) for number, row in enumerate(rows, 1) if split in (None, row["split"])]
    else:
        numbered = []
    if not numbered:
        raise DatasetError(f"{path} must have the columns {', '.join(COLUMNS)} and a row of split {split or 'any'!r}")
    prompts = [_stored_prompt(row, f"{path}:{number}") for number, row in numbered]
    _check_once([prompt.uid for prompt in prompts], path)
    return prompts


def _stored_prompt(row: dict[str, Any], source: str) -> Prompt:
    """A row of the table, which is as `build_prompt_table` makes it. Raises DatasetError that names row and column."""
    for column in COLUMNS:
        if not isinstance(row[column], str) and (column != "target" or row[column] is not None):
            raise DatasetError(f"{source}: {column} is {row[column]!r}, not a text; `dvc repro prompts` makes it anew")
    for column in ("uid", "prompt", "target"):
        check_text(row[column] or "", column, source)
    if not is_visible(row["prompt"]):
        raise DatasetError(f"{source}: the prompt is blank; `dvc repro prompts` makes it anew")
    try:
        metadata = json.loads(row["metadata"])
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{source}: metadata is no JSON: {error}; `dvc repro prompts` makes it anew") from error
    if not isinstance(metadata, dict):
        raise DatasetError(f"{source}: metadata is no JSON object; `dvc repro prompts` makes it anew")
    return Prompt(row["uid"], row["prompt"], row["target"], metadata, row["source"])


def _check_once(uids: Sequence[str], path: str | Path) -> None:
    if len(set(uids)) != len(uids):
        twice = next(uid for uid, count in Counter(uids).items() if count > 1)
        raise DatasetError(f"{path} has the uid {twice!r} more than once; `dvc repro prompts` makes it anew")


def check_prompt_lengths(prompts: Sequence[Prompt], lengths: Sequence[int], max_sequence_length: int) -> None:
    """Raise DatasetError for a prompt that the text encoder would cut off without a word.

    `lengths` are the tokens of each prompt, its template's among them, that count against `max_sequence_length`.
    """
    too_long = [(prompt, n) for prompt, n in zip(prompts, lengths, strict=True) if n > max_sequence_length]
    if too_long:
        prompt, n = too_long[0]
        raise DatasetError(
            f"{prompt.source}: the prompt has {n} tokens with its template, but max_sequence_length="
            f"{max_sequence_length} (prompts that are too long: {len(too_long)}): raise it, shorten them, or set "
            "too_long to cut, which encodes the beginning of each as the model's pipeline does"
        )


def _without_repeats(rows: list[PromptRow]) -> list[PromptRow]:
    """The first of each set of rows with the same prompt and the same other keys."""
    kept: dict[str, list[PromptRow]] = {}
    for row in rows:
        known = kept.setdefault(row.prompt, [])
        if not any(_typed(_content(row)) == _typed(_content(other)) for other in known):
            known.append(row)
    first = {id(row) for known in kept.values() for row in known}
    return [row for row in rows if id(row) in first]


def _content(row: PromptRow) -> dict[str, Any]:
    """What a row says; `extra_info.index`, its number in the file that it comes from, is no part of that."""
    extra = row.fields.get("extra_info")
    if not isinstance(extra, dict):
        return row.fields
    return row.fields | {"extra_info": {key: value for key, value in extra.items() if key != "index"}}


def _typed(value: Any) -> Any:
    """With the type of each part: 1, 1.0 and true are equal in Python, and say different things in a file."""
    if isinstance(value, dict):
        return {key: _typed(part) for key, part in value.items()}
    return [_typed(part) for part in value] if isinstance(value, list) else (type(value), value)


def _check_distinct(keys: list[str], rows: list[PromptRow], what: str) -> None:
    first: dict[str, PromptRow] = {}
    for key, row in zip(keys, rows, strict=True):
        if key in first:
            raise DatasetError(
                f"{row.source}: the {what} {key!r} already stands at {first[key].source} with other content; keep one"
            )
        first[key] = row


def _draw_splits(uids: list[str], n_test: int, n_train: int | None, seed: int) -> dict[str, str]:
    """Split of each uid. Sorting by a keyed hash is a shuffle that the order of the files' lines cannot change."""
    if len(uids) < n_test + (n_train or 0):
        raise DatasetError(
            f"prompts.n_test={n_test} and n_train={n_train} ask for more than the {len(uids)} prompts without a split"
        )
    shuffled = sorted(uids, key=lambda uid: blake2b(f"{seed}/{uid}".encode()).digest())
    n_train = len(uids) - n_test if n_train is None else n_train
    names = ["test"] * n_test + ["train"] * n_train + ["pretrain"] * (len(uids) - n_test - n_train)
    return dict(zip(shuffled, names, strict=True))


def _target(row: PromptRow, pattern: str | None) -> str | None:
    if "target" in row.fields or pattern is None:
        return row.fields.get("target")
    match = re.search(pattern, row.prompt)
    if match is None or not match.group(1):
        raise DatasetError(f"{row.source}: prompts.target_pattern {pattern!r} does not match {row.prompt!r}")
    return match.group(1)


def _metadata(row: PromptRow) -> str:
    metadata = {key: value for key, value in row.fields.items() if key not in ("uid", "target", "split")}
    try:
        return json.dumps(metadata, ensure_ascii=False, sort_keys=True, allow_nan=False)
    except JSON_ERRORS as error:
        raise _without_json(metadata, row.source) from error


def _without_json(metadata: Mapping[str, Any], source: str) -> DatasetError:
    """The error of metadata that JSON has no form for; it names the key."""
    for key, value in metadata.items():
        try:
            json.dumps({key: value}, sort_keys=True, allow_nan=False)
        except JSON_ERRORS as error:
            return DatasetError(
                f"{source}: {key!r} cannot be kept as metadata in JSON: {error}; leave it out, as by naming the "
                "others in the `columns` of the file's entry in params.yaml, or give it as text or a number"
            )
    return DatasetError(f"{source}: the metadata cannot be kept as JSON, as its keys have no order among them")
