# SPDX-License-Identifier: Apache-2.0
"""The files of a data set that a run reads in every iteration: they stay what they were when it began."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.data.digests import open_safetensors
from tasks.data.prompt_files import DatasetError
from tasks.system.files import sha256_of


class ShardFiles:
    """The safetensors files of a data set that is read while a run goes on: they stay what they were at its opening.

    Args:
        folder: of the data set; a file that is missing in it is not looked at before it is read.
        names: of its files.
        recorded: name -> SHA-256, of the index; None in data of older versions.
    """

    def __init__(self, folder: Path, names: Iterable[str], recorded: Mapping[str, str] | None):
        """Look at size and time of change of each file."""
        self._folder, self._recorded = folder, recorded or {}
        self._found = {name: _size_and_time(folder / name) for name in sorted(set(names))}

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """One of them for reading torch tensors.

        Raises:
            DatasetError: it cannot be read, or is another than it was.
        """
        file, then = self._folder / name, self._found[name]
        now = _size_and_time(file)
        if None not in (then, now) and now != then and self._recorded.get(name) != sha256_of(file):
            raise DatasetError(
                f"{file} was changed while a run reads it, and is not what it began with: bring that file back "
                "and give the same command again, or write other data into another folder for another run"
            )
        with open_safetensors(file) as tensors:
            self._found[name] = now
            yield tensors


def _size_and_time(file: Path) -> tuple[int, int] | None:
    """None where it is missing."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns
