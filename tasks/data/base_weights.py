# SPDX-License-Identifier: Apache-2.0
"""The weights that a run begins with: their digest, and whether they are what DVC has recorded.

A model may hold tens of GB. Each of its files is read whole, once: what was found is remembered with the file's state,
and read again only where that has changed.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tasks.data.digests import MODEL_INDEX, TEXT_SIDE, WEIGHTS, component_names
from tasks.data.prompt_files import DatasetError

MEMORY = Path(".doubleflow/digests.json")
SETTLED_S = 2.0
"""A file that has changed since is not remembered: a second change could fall into the same tick of the clock."""
CHUNK = 2**22
READERS = 4
RECORDED = re.compile(r"([0-9a-f]{32})(\.dir)?")

log = logging.getLogger(__name__)
_REMEMBERED = TypeAdapter(dict[str, tuple[list[int], dict[str, str]]])


class KnownDigests:
    """Digests of files, each of which is read once and not at each start.

    A file is the one that was read while its inode, its size and its times of change (of content and of inode, in
    nanoseconds) are. Who can set these back can also exchange the memory: it saves time, and proves nothing against
    somebody who may write here.

    Args:
        memory: file to remember in, created with its folder; one that cannot be used costs time and a warning.
    """

    def __init__(self, memory: Path = MEMORY):
        """Remember where the memory is; it is read when digests are asked for."""
        self.memory = memory

    def of(self, files: Sequence[Path], kinds: Sequence[str]) -> dict[Path, dict[str, str]]:
        """File -> kind of digest, such as "sha256" -> hexadecimal digits.

        Raises:
            DatasetError: a file cannot be read, or changes meanwhile.
        """
        known = self._recall()
        states = {file: _state(file) for file in files}
        stale = [file for file, state in states.items() if not _holds(known.get(str(file.absolute())), state, kinds)]
        gib = sum(states[file][1] for file in stale) / 2**30
        if gib > 1:
            log.warning("reading %.0f GiB of weights once, for their digests", gib)
        with ThreadPoolExecutor(READERS) as pool:
            read = dict(zip(stale, pool.map(lambda file: _read(file, kinds), stale), strict=True))
        for file in stale:
            if _state(file) != states[file]:
                raise DatasetError(f"{file} changed while it was read; wait until it is written, then start again")
        found = {file: read[file] if file in read else known[str(file.absolute())][1] for file in files}
        settled = time.time_ns() - int(SETTLED_S * 1e9)
        fresh = {str(file.absolute()): (states[file], read[file]) for file in stale if max(states[file][2:]) < settled}
        if fresh:
            self._remember({name: entry for name, entry in known.items() if Path(name).is_file()} | fresh)
        return found

    def _recall(self) -> dict[str, tuple[list[int], dict[str, str]]]:
        if not self.memory.is_file():
            return {}
        try:
            return _REMEMBERED.validate_json(self.memory.read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("%s is unusable and written anew: %s", self.memory, " ".join(str(error).split())[:200])
            return {}

    def _remember(self, entries: Mapping[str, Any]) -> None:
        """Two processes at once both write a whole file; what one of them has read is read again later."""
        try:
            self.memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.memory.parent, delete=False) as stream:
                json.dump(entries, stream)
            os.replace(stream.name, self.memory)
        except OSError as error:
            log.warning("%s cannot be written, so weights are read again at the next start: %s", self.memory, error)


def weights_digest(folders: Iterable[str | Path], known: KnownDigests) -> str:
    """16 hexadecimal digits over names and SHA-256 of the files that make the weights of these folders, in order.

    Of a model in diffusers format those are `model_index.json` and the components that it names, but for the text side,
    whose output is data of its own; of any other folder every file of weights and every `.json`; and a file.

    Raises:
        DatasetError: a file cannot be read.
    """
    listed = [(Path(folder), file) for folder in folders for file in _weight_files(Path(folder))]
    digests = known.of([file for _, file in listed], ("sha256",))
    lines = [f"{file.relative_to(folder).as_posix()} {digests[file]['sha256']}\n" for folder, file in listed]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def check_recorded(paths: Iterable[Path], recorded: Mapping[str, str], known: KnownDigests) -> None:
    """Compare files and folders with what DVC has recorded of them, where it has.

    A path below or above an output of DVC is not compared.

    Args:
        recorded: path of an output, relative to the working directory -> its hash, of `lineage.dvc_hashes`.

    Raises:
        DatasetError: one is not what was recorded.
    """
    by_place = {Path(name).resolve(): digest for name, digest in recorded.items()}
    for path in paths:
        digest = by_place.get(path.resolve(), "")
        if RECORDED.fullmatch(digest) and _dvc_hash(path, digest.endswith(".dir"), known) != digest:
            raise DatasetError(
                f"{path} is not what DVC recorded when it was made ({digest}): `dvc checkout` brings that back, "
                "`dvc repro` makes it anew, `dvc commit` records what is there"
            )


def _dvc_hash(path: Path, is_folder: bool, known: KnownDigests) -> str:
    """DVC's hash of a file is its MD5, of a folder the MD5 of the JSON list of its files."""
    if path.is_dir() != is_folder:
        return "another kind"
    files = sorted(file for file in path.rglob("*") if file.is_file()) if is_folder else [path]
    digests = known.of(files, ("md5", "sha256"))
    if not is_folder:
        return digests[path]["md5"]
    entries = [{"md5": digests[file]["md5"], "relpath": file.relative_to(path).as_posix()} for file in files]
    listing = json.dumps(sorted(entries, key=lambda entry: entry["relpath"]), sort_keys=True)
    return hashlib.md5(listing.encode(), usedforsecurity=False).hexdigest() + ".dir"


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / MODEL_INDEX
    if not index.is_file():
        return [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix in (*WEIGHTS, ".json")]
    text = {part for pattern in TEXT_SIDE for part in folder.glob(pattern)}
    parts = [folder / name for name in sorted(component_names(index)) if folder / name not in text]
    inner = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
    return [index, *(file for file in inner if file.suffix in (*WEIGHTS, ".json"))]


def _state(file: Path) -> list[int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror}; fetch it again") from error
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _holds(entry: tuple[list[int], dict[str, str]] | None, state: list[int], kinds: Sequence[str]) -> bool:
    return entry is not None and entry[0] == state and set(kinds) <= set(entry[1])


def _read(file: Path, kinds: Sequence[str]) -> dict[str, str]:
    """All digests in one pass."""
    digests = {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}
    try:
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK):
                for digest in digests.values():
                    digest.update(chunk)
    except OSError as error:
        raise DatasetError(f"{file} cannot be read: {error.strerror}; fetch it again") from error
    return {kind: digest.hexdigest() for kind, digest in digests.items()}
