# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are whole or not there: written aside, flushed to the disk, renamed.

A rename alone is not enough: after a power cut the new name may stand before an empty file.
"""

import hashlib
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from models.config.exported import let_owner_write
from models.errors import DoubleflowError, naming_the_disk

READERS = 8
"""Threads that digest files side by side; each has a core to itself."""


class Replaced(DoubleflowError, RuntimeError):
    """A folder that was read had another one put in its place meanwhile."""


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_each(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, in hexadecimal digits, several at a time; an error of any is raised.

    The threads are daemons: a process that a signal ends waits for none, which may have minutes to read.
    """
    found: list[Future[str]] = [Future() for _ in files]
    left = deque(zip(files, found, strict=True))

    def work() -> None:
        while left:
            with suppress(IndexError):  # another thread took the last
                file, future = left.popleft()
                try:
                    future.set_result(sha256_of(file))
                except Exception as error:
                    future.set_exception(error)

    for number in range(min(READERS, len(files))):
        threading.Thread(target=work, name=f"digest {number}", daemon=True).start()
    try:
        return [future.result() for future in found]
    finally:
        left.clear()


def nearest(folder: Path) -> Path:
    """The folder, or what it will be made in: the innermost of the folders around it that are there."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def free_on_disk(folder: Path) -> int:
    """Bytes that this user may still write below a folder, which need not be there yet."""
    return shutil.disk_usage(nearest(folder)).free


def on_one_disk(folder: Path, other: Path) -> bool:
    """Will what is written below one of two folders, which need not be there yet, take the room of the other?"""
    return nearest(folder).stat().st_dev == nearest(other).stat().st_dev


def bytes_on_disk(path: Path) -> int:
    """What a file takes, or a folder with all that is in it; what is not there, or goes meanwhile, takes nothing."""
    total = 0
    inner = (os.path.join(here, name) for here, folders, files in os.walk(path) for name in (*folders, *files))
    for one in (str(path), *inner):
        with suppress(FileNotFoundError):
            total += os.lstat(one).st_blocks * 512
    return total


@contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file or folder under; it becomes `path` only if the block ends well.

    Whatever stood at `path` stays until then. A folder is swapped by two renames; should the process be killed just
    between them, the next call puts the old folder back first.
    """
    partial, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not path.exists():
        old.rename(path)
    remove(partial, old)
    try:
        with naming_the_disk(path):
            yield partial
            flush(partial)
        if path.is_dir():
            path.rename(old)
        partial.replace(path)
        _sync(path.parent)
        remove(old)
    finally:
        remove(partial)


@contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """Several processes read a folder during the block, which all find the same there.

    Raises:
        Replaced: another one was put in its place, so that some may have read this one and some the other; also in
            place of an error that came of it.
    """
    before = _which(folder)
    told = f"{folder} was replaced while it was read, as a run does that exports its weights: try again, or with a copy"
    try:
        yield
    except Exception as error:
        if _which(folder) != before:
            raise Replaced(told) from error
        raise
    if _which(folder) != before:
        raise Replaced(told)


def _which(folder: Path) -> tuple[int, int] | None:
    """Its inode, and when something in it last got its name: a later folder may get the number. None where it is not
    there, as between the two renames of `put_in_place`."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def move_in_place(aside: Path, path: Path) -> None:
    """Rename a folder that `flush` has written out; what stood at `path` is removed just before."""
    remove(path)
    aside.rename(path)
    _sync(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk, and may be read as the umask has it.

    safetensors gives its files mode 600 whatever the umask.
    """
    if path.is_symlink():
        return  # the folder around it holds all of it
    if path.is_dir():
        for inner in path.iterdir():
            flush(inner)
    else:
        mode = path.stat().st_mode
        if lacking := 0o666 & ~umask() & ~mode:
            path.chmod(mode & 0o7777 | lacking)
    _sync(path)


def umask() -> int:
    """This process's, read and not set, as `os.umask` would for all of its threads."""
    found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None  # since Linux 4.7
    return int(found[1], 8)


def remove(*paths: Path) -> None:
    """Remove files and folders, where they are there; of a link the link alone. Folders of this user's own may be
    read-only."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            let_owner_write(path)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
