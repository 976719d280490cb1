# SPDX-License-Identifier: Apache-2.0
"""What data was made with and whether it is whole: digests of a model's parts, and of the files of a data set."""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from tasks.data.prompt_files import DatasetError
from tasks.system.files import sha256_of

TEXT_SIDE = ("text_encoder*", "tokenizer*")
IMAGE_SIDE = ("vae",)
MODEL_INDEX = "model_index.json"
SCHEME = "sha256-ends:"
"""Begins a digest of `parts_digest`; older data sets have digests of another kind, which nothing compares."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
END = 2**20
CHECKED_GIB = 4
"""So much of a data set is read at a run's start at most."""
INDEX_DIGEST = "index_sha256"
"""Of an index's other keys; indices of older versions have none."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def component_names(index: Path) -> list[str]:
    """What a model_index.json names. Raises DatasetError where it cannot be read."""
    try:
        listed = json.loads(index.read_text())
        return [name for name in listed if not name.startswith("_")]
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise DatasetError(f"{index} cannot be read: {error}; give a model in diffusers format") from error


def component_folders(model: str | Path, folders: tuple[str, ...]) -> list[Path]:
    """Folders of a model by patterns of their names, sorted; beside a model_index.json only those that it names.

    Some published models have others, such as `text_encoders` with the files of another program.
    """
    found = {folder for pattern in folders for folder in Path(model).glob(pattern)}
    index = Path(model) / MODEL_INDEX
    named = component_names(index) if index.is_file() else [folder.name for folder in found]
    return sorted(folder for folder in found if folder.name in named)


def parts_digest(model: str | Path, folders: tuple[str, ...]) -> str | None:
    """Digest of some folders of a model in diffusers format; None where they hold no weights.

    SHA-256 of each file's name, size and bytes; of files of weights only the first and the last MiB are read, so that
    it takes a moment for any model. Weights that were trained further differ in nearly every number, so in those too.

    Args:
        folders: patterns of their names, such as `TEXT_SIDE`.
    """
    parts = component_folders(model, folders)
    files = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
    if not any(file.suffix in WEIGHTS for file in files):
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(model).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            if file.suffix not in WEIGHTS or size <= 2 * END:
                digest.update(stream.read())
                continue
            digest.update(stream.read(END))
            stream.seek(-END, 2)
            digest.update(stream.read())
    return SCHEME + digest.hexdigest()


def stored_parameters(model: str | Path, folders: tuple[str, ...]) -> int:
    """Numbers in the safetensors files of some folders of a model, by their headers.

    Of several sets of files in one folder (`*.fp16.safetensors` and the like) those without a variant's name count.
    """
    parts = component_folders(model, folders)
    files = [file for part in parts for file in part.glob("*.safetensors") if file.name.count(".") == 1]
    total = 0
    for file in files:
        with open_safetensors(file) as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def made_with(recorded: str, model: str | Path, folders: tuple[str, ...]) -> bool | None:
    """Were these parts of the model the ones whose digest was recorded? None where one side cannot be known."""
    present = parts_digest(model, folders)
    return None if present is None or not recorded.startswith(SCHEME) else recorded == present


def file_digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of each safetensors file in a folder."""
    return {file.name: sha256_of(file) for file in sorted(folder.glob("*.safetensors"))}


def check_files(folder: Path, recorded: Mapping[str, str]) -> None:
    """Compare a data set's files with the digests of its index, once in a process.

    A data set of more than `CHECKED_GIB` is not read: a warning says so.

    Raises:
        DatasetError: a file is missing, or is not the one that was written.
    """
    missing = [name for name in recorded if not (folder / name).is_file()]
    if missing:
        raise DatasetError(f"{folder / missing[0]} is missing, but the index lists it; make the data anew")
    stats = {name: (folder / name).stat() for name in recorded}
    gib = sum(stat.st_size for stat in stats.values()) / 2**30
    if gib > CHECKED_GIB:
        log.warning("%s holds %.0f GiB: its digests are only checked up to %d GiB", folder, gib, CHECKED_GIB)
        return
    for name, digest in recorded.items():
        if _seen((folder / name).resolve(), stats[name].st_size, stats[name].st_mtime_ns) != digest:
            raise DatasetError(
                f"{folder / name} is damaged: its SHA-256 is not the one that the index recorded when it was written; "
                "make the data anew, or fetch it again"
            )


def write_index(index: Path, record: Mapping[str, Any]) -> None:
    """Write the index of a data set, with a digest of itself."""
    index.write_text(json.dumps({**record, INDEX_DIGEST: record_digest(record)}, indent=1) + "\n")


def read_index(index: Path, maker: str) -> dict[str, Any]:
    """The index of a data set, which the stage `maker` makes. Raises DatasetError where it is missing or damaged."""
    if not index.is_file():
        raise DatasetError(f"{index} is missing; `dvc repro {maker}` makes it")
    try:
        record = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged_index(index, maker, str(error)) from error
    if not isinstance(record, dict):
        raise _damaged_index(index, maker, "it is no JSON object")
    if INDEX_DIGEST in record and record.pop(INDEX_DIGEST) != record_digest(record):
        raise _damaged_index(index, maker, "its digest is of another content")
    return record


def validated(kind: TypeAdapter[T], record: Mapping[str, Any], index: Path, maker: str) -> T:
    """The record of an index as `kind`. Raises DatasetError that names the keys that are missing or of another type."""
    try:
        return kind.validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise _damaged_index(index, maker, "; ".join(faults[:3]) + more) from error


def check_listed(index: Path, maker: str, shards: set[str], recorded: Mapping[str, str] | None) -> None:
    """Raise DatasetError where an index has not a digest of just the shards that it names."""
    if recorded is not None and shards != set(recorded):
        odd = min(shards ^ set(recorded))
        raise _damaged_index(index, maker, f"it has not both content and a digest of {odd}")


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record, the same before it is written as JSON and after it is read."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _damaged_index(index: Path, maker: str, fault: str) -> DatasetError:
    return DatasetError(f"{index} is damaged: {fault}; `dvc repro {maker}` makes it anew")


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """A safetensors file for reading torch tensors. Raises DatasetError with its name where it cannot be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise DatasetError(f"{file} cannot be read: {error}; make the data anew, or fetch it again") from error


@functools.lru_cache(maxsize=4096)
def _seen(file: Path, size: int, changed: int) -> str:
    """The digest of a file as it was at that size and time."""
    return sha256_of(file)
