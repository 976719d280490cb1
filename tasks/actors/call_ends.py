# SPDX-License-Identifier: Apache-2.0
"""How the processes of an actor ended that is started again: Ray says of one that hung and of one that died the same.

Each process notes beside its log in which call it is; the next one reads there, and in the log, how it ended.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import ray

STANDARD_ERROR = Path("/proc/self/fd/2")
TAIL_BYTES = 1 << 20
"""Of a log: faulthandler's lines for a process with many threads are fewer."""
HUNG = re.compile(r"^Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!$", re.MULTILINE)
"""What faulthandler writes before it ends a process."""
LINE_CHARACTERS = 200


class CallEnd(NamedTuple):
    """How a process ended in a call.

    Attributes:
        hung: did faulthandler end it, since the call took too long? Else it died otherwise.
        said: the last line of its standard error, "" where there is none; at most `LINE_CHARACTERS`.
    """

    hung: bool
    said: str


@contextmanager
def noted_call() -> Iterator[None]:
    """The present call runs within; the note stays where this process ends in it, and goes where the call returns or
    raises. Nothing is noted in a process that is no worker of Ray with a log that /proc tells."""
    log, notes = _log(), _notes()
    if log is None or notes is None:
        yield
        return
    note = f"{ray.get_runtime_context().get_task_id()} {log.name}\n"
    with notes.open("a") as file:
        file.write(note)
    try:
        yield
    except Exception:  # and not SystemExit, with which Ray ends a process that is sent SIGTERM
        _take_back(notes, note.encode())
        raise
    _take_back(notes, note.encode())


def _take_back(notes: Path, note: bytes) -> None:
    """Cut the last note off, if it is this one: there is one for each process that ended in a call, and no more."""
    with suppress(FileNotFoundError), notes.open("r+b") as file:
        before = max(0, os.fstat(file.fileno()).st_size - len(note))
        file.seek(before)
        if file.read() == note:
            file.truncate(before)


def how_calls_ended(task: str) -> list[CallEnd]:
    """How the processes ended on this machine that ended in this call of the present actor, in their order.

    Args:
        task: Ray's id of the call, in hex.

    Returns:
        Empty where nothing is known, as after its machine was lost.
    """
    own, notes = _log(), _notes()
    if own is None or notes is None or not notes.exists():
        return []
    begun = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    return [_end(notes.parent / log) for asked, log in begun if asked == task and log != own.name]


def has_lost_a_process() -> bool:
    """Has one ended in the present call? False where nothing is known, as outside of Ray's workers."""
    return _log() is not None and bool(how_calls_ended(ray.get_runtime_context().get_task_id() or ""))


def _log() -> Path | None:
    """Where this process's standard error goes, if that is a log of Ray's and the system tells."""
    log = STANDARD_ERROR.readlink() if STANDARD_ERROR.is_symlink() else None
    return log if log is not None and ray.is_initialized() and log.suffix == ".err" else None


def _notes() -> Path | None:
    """Of the present actor, in the folder of Ray's logs; it goes with the session."""
    log, actor = _log(), ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    return None if log is None or actor is None else log.parent / f"calls-{actor}.txt"


def _end(log: Path) -> CallEnd:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(":")]  # Ray's own marks
    return CallEnd(HUNG.search(text) is not None, lines[-1][:LINE_CHARACTERS] if lines else "")
