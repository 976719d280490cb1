# SPDX-License-Identifier: Apache-2.0
"""Raw files of prompts as the field has them, read as rows of one form: plain prompts, chats, saved `datasets` folders.

A row of VeRL-Omni's RL parquet has a chat as its `prompt`, and often one as its `negative_prompt`; the text that the
picture should show is `reward_model.ground_truth`, and `extra_info.split` says which split it belongs to.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.config.params import RawFile
from tasks.data.prompt_files import (
    SPLITS,
    DatasetError,
    PromptRow,
    check_columns,
    checked_row,
    raw_rows,
    without_hidden,
)

STATE, PARTS = "state.json", "dataset_dict.json"
"""What `save_to_disk` of a Hugging Face data set leaves beside its Arrow files, and that of several splits."""
LONGEST_FILE = 255
"""Characters of a file's name, on Linux."""
SYSTEM = "system_prompt"
"""Key of a chat's system message among the metadata."""


def read_raw_file(raw: RawFile | str) -> list[PromptRow]:
    """The rows of one raw file or folder, each checked by itself. Raises DatasetError naming the file and the line."""
    entry = raw if isinstance(raw, RawFile) else RawFile.model_construct(file=raw)
    path = Path(entry.file)
    columns = entry.columns or None  # others are not read: pictures would be a thousand times what the texts are
    read = _read_saved(path, columns) if path.is_dir() else _numbered(raw_rows(path, columns), path.as_posix())
    rows = [checked_row(_plain_row(row, source, entry, split), source) for source, split, row in read]
    if not rows:
        raise DatasetError(f"{path} is empty; it must hold at least one prompt")
    return rows


def _plain_row(raw: dict[str, Any], source: str, entry: RawFile, saved_as: str | None) -> dict[str, Any]:
    """A row with the keys of docs/data.md; `saved_as` is the split whose folder it lay in."""
    row = dict(raw) if entry.columns is None else _renamed(raw, entry.columns, source)
    row["prompt"] = _said(row.get("prompt"), "prompt", source, row)
    if row.get("negative_prompt") is not None:
        row["negative_prompt"] = _said(row["negative_prompt"], "negative_prompt", source)
        if not isinstance(row["negative_prompt"], str):
            raise DatasetError(f"{source}: negative_prompt must be a text or a chat; leave it out where there is none")
    truth = _below(row, "reward_model", "ground_truth")
    if "target" not in row and isinstance(truth, str | int) and not isinstance(truth, bool):
        row["target"] = str(truth)
    if row.get("split") is None:
        row["split"] = saved_as or entry.split or _split_inside(row, source)
    if entry.hidden == "remove":
        texts = {key: row[key] for key in ("prompt", "target", "negative_prompt") if isinstance(row.get(key), str)}
        row |= {key: without_hidden(text) for key, text in texts.items()}
    return row


def _split_inside(row: Mapping[str, Any], source: str) -> str | None:
    """`extra_info.split`; another word than ours is refused: drawn, held-out rows would be trained on."""
    split = _below(row, "extra_info", "split")
    if split not in (None, *SPLITS):
        raise DatasetError(
            f"{source}: extra_info.split {split!r:.60} is no split; it must be one of {', '.join(SPLITS)}, or give "
            "this file's entry in params.yaml a `split`, which goes first"
        )
    return split


def _renamed(raw: Mapping[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    check_columns(columns, [*raw], source)
    return {key: raw[column] for column, key in columns.items()}


def _said(value: Any, key: str, source: str, row: dict[str, Any] | None = None) -> Any:
    """A chat's one user message; anything else as it is. The system message goes into `row`, if that is given.

    Raises:
        DatasetError: the chat has another form, or more in it than text.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return value
    texts: dict[str, list[str]] = {}
    for message in value:
        texts.setdefault(str(message.get("role")), []).append(_content(message.get("content"), key, source))
    if len(texts.get("user", ())) != 1 or not set(texts) <= {"system", "user"}:
        turns = ", ".join(f"{len(said)} of {role}" for role, said in texts.items()) or "no message"
        raise DatasetError(f"{source}: the {key} is a chat of {turns}; it must be one user message, after a system one")
    if row is not None and "system" in texts:
        row[SYSTEM] = "\n".join(texts["system"])
    return texts["user"][0]


def _content(content: Any, key: str, source: str) -> str:
    """The text of a message: as one, or in parts of the type text."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts) or not all(
        isinstance(part.get("text"), str) for part in parts
    ):
        raise DatasetError(
            f"{source}: a message of the {key} holds more than text; pictures are no part of a prompt here"
        )
    return "".join(part["text"] for part in parts)


def _below(row: Mapping[str, Any], section: str, key: str) -> Any:
    inner = row.get(section)
    return inner.get(key) if isinstance(inner, Mapping) else None


def _numbered(
    rows: Sequence[dict[str, Any]], name: str, split: str | None = None
) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    return ((f"{name}:{number}", split, row) for number, row in enumerate(rows, 1))


# ---- Hugging Face's `datasets`, saved


def _read_saved(
    folder: Path, columns: Collection[str] | None, split: str | None = None
) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """("folder:row", split, row) of a folder that `save_to_disk` wrote; of several splits each row has its own.

    With `columns` no other one is read.
    """
    if (folder / PARTS).is_file():
        names = _json(folder / PARTS).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DatasetError(f"{folder / PARTS} has no list of names as `splits`; save the data set again")
        odd = [name for name in names if name not in SPLITS]
        if odd:
            raise DatasetError(
                f"{folder} has a split {odd[0]!r:.60}, which is none of {', '.join(SPLITS)}: name its folders one by "
                f"one, {folder.as_posix()}/{odd[0]:.60} for example, each with its `split`"
            )
        for name in names:
            yield from _read_saved(folder / name, columns, name)
        return
    if not (folder / STATE).is_file():
        raise DatasetError(f"{folder} is a folder without {STATE}: give a file, or what `save_to_disk` has written")
    state = _json(folder / STATE)
    if state.get("_indices_data_files"):
        raise DatasetError(f"{folder} holds a choice of rows by their numbers: save it after `flatten_indices()`")
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(_is_file_beside(entry) for entry in files):
        raise DatasetError(f"{folder / STATE} has no list of the folder's Arrow files; save the data set again")
    rows = [row for entry in files for row in _read_arrow(folder / entry["filename"], columns)]
    yield from _numbered(rows, folder.as_posix(), split)


def _is_file_beside(entry: Any) -> bool:
    """Does it name a file of its own folder? One elsewhere is nothing that `save_to_disk` has written."""
    name = entry.get("filename") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or name in ("", ".", "..") or len(name) > LONGEST_FILE:
        return False
    return Path(name).name == name and "\0" not in name


def _read_arrow(file: Path, columns: Collection[str] | None) -> list[dict[str, Any]]:
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            check_columns(columns, stream.schema.names, str(file))
            table = stream.read_all() if columns is None else stream.read_all().select([*columns])
            table.validate(full=True)  # a damaged offset leads out of the file's memory
            return table.to_pylist()
    except DatasetError:
        raise
    except (pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise DatasetError(f"{file} is not a readable Arrow file: {' '.join(str(error).split())[:300]}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{file} cannot be read: {error}; save the data set again") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{file} is no JSON object; save the data set again")
    return found
