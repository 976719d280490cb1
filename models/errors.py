# SPDX-License-Identifier: Apache-2.0
"""What all errors of this project have in common, what one came from, and which of the system's tell of a full disk."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE})
"""What a system says of a file that is there, or of a folder, where it lets nobody write or read."""
OF_RUST = re.compile(r"I/O error: .*\(os error (\d+)\)")
"""How safetensors tells of the system's errors, in an exception of its own."""
SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""How numpy does, which does not hand on the system's number."""
OF_COPIES = re.compile(r"\[Errno (\d+)\]")
"""How shutil does of a folder that it copies: a list of what it could not copy, each with the system's words."""


class DoubleflowError(Exception):
    """An error whose message is for the user: one sentence, what is wrong and what would be right.

    Each class has a built-in error as its second base, and that says whose fault it is: `ValueError` is raised for what
    was given (a setting, a file, a prompt), `RuntimeError` for what happened to a run that was asked for correctly. The
    command line shows the message without a traceback, and ends with 2 for the first kind and 1 for the second.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on to the first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # one that was raised again may have its own consequence as a cause
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def out_of_room(error: object) -> OSError | None:
    """The system's error which says that the disk, or the user's share of it, is full: this one, or the one of which
    safetensors, numpy and shutil tell in their own."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return error
    text = str(error) if isinstance(error, Exception) else ""
    told = OF_COPIES if isinstance(error, shutil.Error) else OF_RUST
    numbers = {int(number) for number in told.findall(text)}
    if isinstance(error, OSError) and SHORT_WRITE.search(text):
        numbers.add(errno.ENOSPC)
    full = sorted(NO_ROOM & numbers)
    return OSError(full[0], os.strerror(full[0])) if full else None


def no_room_for(what: str) -> OSError:
    """The system's error of a full disk, of what had no room there: a file, a folder, a database's address."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)


def full_disk(error: BaseException | None) -> OSError | None:
    """The error among its causes, also of those that Ray brings from an actor, which says that a disk is full."""
    for found in causes(error):
        if (full := out_of_room(getattr(found, "cause", found))) is not None:
            return full
    return None


@contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Context in which the error of a full disk is the system's and says where: of a file that is open the system does
    not, and what an error came from does not reach other processes."""
    try:
        yield
    except Exception as error:
        full = full_disk(error)
        if full is None or (full is error and full.filename is not None):
            raise
        raise OSError(full.errno, full.strerror, full.filename or str(path)) from error


def is_refused(error: object) -> bool:
    """Does the system say that a file or folder, which it names, may not be written or read, or that its disk fails?"""
    return isinstance(error, OSError) and error.errno in REFUSED and error.filename is not None
