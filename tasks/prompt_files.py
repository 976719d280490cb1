"""Raw prompt files: `.txt` (a prompt a line), `.jsonl` (an object a line) or `.parquet` (a row a prompt).

The keys `prompt`, `target`, `split` and `uid` have a meaning; whatever else a row holds is metadata for the rewards,
so GenEval's `{"tag": ..., "include": [...], "prompt": ...}` is read as it is.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from models.errors import DoubleflowError

SPLITS = ("train", "test", "pretrain")
NEGATIVE_UID = "negative"
"""Key of the empty prompt among the embeddings; no prompt of a data set may take it."""
RESERVED_UIDS = (NEGATIVE_UID, "__metadata__")
"""The other one is where safetensors keeps a file's own metadata."""
UID = re.compile(r"[\w.-]{1,128}")


class DatasetError(DoubleflowError, ValueError):
    """A data set is unusable; the message names the file and the line (in a parquet file: the row, from 1)."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a raw file: its prompt, where it stands ("file:line"), and every other key it has."""

    prompt: str
    source: str
    fields: dict[str, Any]


def read_prompt_file(path: Path) -> list[PromptRow]:
    """The rows of one raw file, each checked by itself. Raises DatasetError naming the file and the line."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise DatasetError(f"{path} must end in one of {', '.join(readers)}")
    if not path.is_file():
        raise DatasetError(f"{path} is missing; prompts.files in params.yaml must list existing files")
    rows = [_checked_row(raw, f"{path.as_posix()}:{i}") for i, raw in enumerate(readers[path.suffix](path), 1)]
    if not rows:
        raise DatasetError(f"{path} is empty; it must hold at least one prompt")
    return rows


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a parquet file as plain Python values. Raises DatasetError when it is none."""
    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{path} is not a readable parquet file: {error}") from error


def _read_txt(path: Path) -> list[dict[str, Any]]:
    return [{"prompt": line} for line in _lines(path)]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}:{number}: broken JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise DatasetError(f'{path}:{number}: a line must be one JSON object like {{"prompt": "a red cup"}}')
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without the blank ones at its end."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DatasetError(f"{path}:{line}: byte {raw[error.start]:#x} is not UTF-8; save the file as UTF-8") from error
    return text.split("\n") if text else []


def _checked_row(raw: dict[str, Any], source: str) -> PromptRow:
    fields = dict(raw)
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DatasetError(f"{source}: the prompt must be a text that is not blank, not {prompt!r}")
    for key in ("uid", "target", "split"):
        if not isinstance(fields.get(key), str | None):
            raise DatasetError(f"{source}: {key} must be a text, not {fields[key]!r}")
    if fields.get("split") not in (None, *SPLITS):
        raise DatasetError(f"{source}: {fields['split']!r} is no split; it must be one of {', '.join(SPLITS)}")
    _check_uid(fields.get("uid"), source)
    return PromptRow(prompt.strip(), source, fields)


def _check_uid(uid: str | None, source: str) -> None:
    """A uid names tensors: `a/pooled` would be an extra of prompt `a`, and safetensors keeps one name for itself."""
    if uid in RESERVED_UIDS:
        raise DatasetError(f"{source}: the uid {uid!r} is reserved; choose another or leave it out")
    if uid is not None and not UID.fullmatch(uid):
        shown = uid if len(uid) <= 40 else f"{uid[:40]}..."
        raise DatasetError(
            f"{source}: the uid {shown!r} must be 1 to 128 letters, digits and characters of `_.-`; change it, or "
            "leave it out"
        )
