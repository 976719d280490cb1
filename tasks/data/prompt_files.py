# SPDX-License-Identifier: Apache-2.0
"""Raw prompt files: `.txt` (a prompt a line), `.jsonl` (an object a line) or `.parquet` (a row a prompt).

The keys `prompt`, `target`, `split` and `uid` have a meaning; whatever else a row holds is metadata for the rewards,
so GenEval's `{"tag": ..., "include": [...], "prompt": ...}` is read as it is.
"""

import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from models.errors import DoubleflowError
from tasks.config.data import Split
from tasks.system.distinct_names import plain_json

SPLITS = get_args(Split)
NEGATIVE_UID = "negative"
"""Key of the empty prompt among the embeddings; no prompt of a data set may take it."""
RESERVED_UIDS = (NEGATIVE_UID, "__metadata__")
"""The other one is where safetensors keeps a file's own metadata."""
UID = re.compile(r"[\w.-]{1,128}")
LONGEST_TEXT = 2**14
"""Characters of a prompt or a target: many times what any text encoder reads."""
LONGEST_LINE = 2**20
"""Characters of a line, metadata included: a file of another kind, such as one long line of base64, ends here."""
HIDDEN = {
    "half of a surrogate pair": "[\ud800-\udfff]",
    "a byte order mark within the text": "\ufeff",
    "a mark that reorders the text shown": "[\u202a-\u202e\u2066-\u2069]",
    "a carriage return that stands alone": r"\r(?!\n|\Z)",
    "a control character": r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]",
}
"""What no one can have meant in a prompt, by name. Marks that scripts and emoji need, such as U+200D, are none."""
_HIDDEN = re.compile("|".join(f"({pattern})" for pattern in HIDDEN.values()))
_SURROGATE = re.compile("[\ud800-\udfff]")
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls a table's row labels in a parquet file, where they are others than 0, 1, 2."""


class DatasetError(DoubleflowError, ValueError):
    """A data set is unusable; the message names the file and the line (in a parquet file: the row, from 1)."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a raw file: its prompt, where it stands ("file:line"), and every other key it has."""

    prompt: str
    source: str
    fields: dict[str, Any]


def raw_rows(path: Path, columns: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The rows of one raw file as they stand there; of a parquet file `columns` alone are read, where they are given.

    Raises DatasetError naming the file and, of text, the line.
    """
    of_text = {".txt": _read_txt, ".jsonl": _read_jsonl}
    if path.suffix not in (*of_text, ".parquet"):
        raise DatasetError(f"{path} must end in one of {', '.join((*of_text, '.parquet'))}")
    if not path.is_file():
        raise DatasetError(f"{path} is missing; prompts.files in params.yaml must list existing files")
    return of_text[path.suffix](path) if path.suffix in of_text else read_parquet(path, columns)


def read_parquet(path: Path, columns: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a parquet file as plain Python values; with `columns` no other one is read.

    Pages that have a checksum are compared with it. pandas' row labels are left out. Raises DatasetError when the file
    is none, is damaged, holds what Python has no value for, lacks a column, or names one twice.
    """
    with _readable(path):
        names = pq.read_schema(path).names
    check_columns(columns, names, str(path))
    with _readable(path):
        wanted = None if columns is None else [*columns]
        table = pq.read_table(path, columns=wanted, partitioning=None, page_checksum_verification=True)
        table = table.drop_columns([name for name in table.column_names if PANDAS_INDEX.fullmatch(name)])
        return table.to_pylist()


def check_columns(columns: Collection[str] | None, names: Sequence[str], source: str) -> None:
    """The wanted columns are among those of a table, and each name of it, or of those wanted, stands there once.

    Raises:
        DatasetError: one is not; `source` is named.
    """
    lacking = [column for column in columns or () if column not in names]
    if lacking:
        raise DatasetError(f"{source}: there is no column {lacking[0]!r}; there are {', '.join(names)}")
    repeated = {name for name in names if (columns is None or name in columns) and names.count(name) > 1}
    if repeated:
        raise DatasetError(f"{source} has more than one column {min(repeated)!r}; keep one")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises DatasetError where reading a parquet file ends in an error."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise DatasetError(f"{path} is not a readable parquet file: {_one_line(error)}; write it anew") from error


def _read_txt(path: Path) -> list[dict[str, Any]]:
    return [{"prompt": line} for line in _lines(path)]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [_json_object(line, f"{path}:{number}") for number, line in enumerate(_lines(path), 1)]


def _json_object(line: str, source: str) -> dict[str, Any]:
    try:
        row = plain_json(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{source}: broken JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of too many digits, brackets too deep
        raise DatasetError(f"{source}: unusable JSON: {_one_line(error)}; mend the line") from error
    if not isinstance(row, dict):
        raise DatasetError(f'{source}: a line must be one JSON object like {{"prompt": "a red cup"}}')
    return row


def _lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without the blank ones at its end."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig").rstrip(" \t\r\n")
    except UnicodeDecodeError as error:
        number = raw[: error.start].count(b"\n") + 1
        raise DatasetError(
            f"{path}:{number}: byte {raw[error.start]:#x} is not UTF-8; save the file as UTF-8"
        ) from error
    lines = text.split("\n") if text else []
    for number, line in enumerate(lines, 1):
        if "\r" in line[:-1]:
            raise DatasetError(
                f"{path}:{number}: a carriage return (U+000D) stands alone; end lines with a line feed, or with both"
            )
        if len(line) > LONGEST_LINE:
            raise DatasetError(
                f"{path}:{number}: a line of {len(line)} characters; the longest may have {LONGEST_LINE}"
            )
    return lines


def checked_row(raw: dict[str, Any], source: str) -> PromptRow:
    """A row whose keys are those of docs/data.md. Raises DatasetError that names the file and the line."""
    fields = dict(raw)
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str) or not is_visible(prompt):
        shown = prompt if prompt is None or isinstance(prompt, str | int | float | bool) else type(prompt).__name__
        raise DatasetError(f"{source}: the prompt must be a text that is not blank, not {_shortened(repr(shown))}")
    for key in ("uid", "target", "split"):
        if not isinstance(fields.get(key), str | None):
            raise DatasetError(f"{source}: {key} must be a text, not {_shortened(repr(fields[key]))}")
    check_text(prompt, "prompt", source)
    if fields.get("target") is not None:
        check_text(fields["target"], "target", source)
    if isinstance(fields.get("negative_prompt"), str):
        check_text(fields["negative_prompt"], "negative_prompt", source)
    if fields.get("split") not in (None, *SPLITS):
        raise DatasetError(
            f"{source}: {_shortened(repr(fields['split']))} is no split; it must be one of {', '.join(SPLITS)}"
        )
    _check_uid(fields.get("uid"), source)
    _check_metadata({key: value for key, value in fields.items() if key not in ("uid", "target", "split")}, source)
    return PromptRow(prompt.strip(), source, fields)


def check_text(text: str, what: str, source: str) -> None:
    """Raise DatasetError for a text with one of `HIDDEN`, which would be encoded, drawn and shown, or one too long."""
    if len(text) > LONGEST_TEXT:
        raise DatasetError(f"{source}: the {what} has {len(text)} characters; the longest may have {LONGEST_TEXT}")
    found = _HIDDEN.search(text)
    if found and found.lastindex:
        fault, code = [*HIDDEN][found.lastindex - 1], ord(found[0])
        raise DatasetError(
            f"{source}: character {found.start() + 1} of the {what} is {fault} (U+{code:04X}); remove it"
        )


def without_hidden(text: str) -> str:
    """The text without any of `HIDDEN`."""
    return _HIDDEN.sub("", text)


def is_visible(text: str) -> bool:
    """Is there more than blanks, marks without width and combining marks without a letter?"""
    return any(unicodedata.category(character)[0] not in "ZCM" for character in text)


def _check_metadata(value: Any, source: str) -> None:
    """Raise DatasetError for what JSON or a parquet file cannot hold."""
    try:
        fault = _metadata_fault(value)
    except RecursionError as error:
        raise DatasetError(f"{source}: the metadata is nested too deep; make it flatter") from error
    if fault:
        raise DatasetError(f"{source}: the metadata holds {fault}; leave it out or give another value")


def _metadata_fault(value: Any) -> str | None:
    match value:
        case float():
            return None if math.isfinite(value) else f"{value}, which JSON has no number for"
        case str():
            bad = _SURROGATE.search(value)
            return None if bad is None else f"half of a surrogate pair (U+{ord(bad[0]):04X})"
        case dict():
            inner: Any = [*value.keys(), *value.values()]
        case list() | tuple():
            inner = value
        case _:
            return None
    return next(filter(None, map(_metadata_fault, inner)), None)


def _one_line(error: BaseException) -> str:
    return _shortened(" ".join(str(error).split()) or type(error).__name__, 300)


def _shortened(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


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
