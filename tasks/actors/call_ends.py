# SPDX-License-Identifier: Apache-2.0
"""How the processes of an actor ended that is started again: Ray says of one that hung and of one that died the same.

Each process notes beside its log which call it begins; the next one reads there, and in the log, how it ended.
"""

import os
import re
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
    """How a process ended that had begun a call.

    Attributes:
        hung: did faulthandler end it, since the call took too long? Else it died otherwise.
        said: the last line of its standard error, "" where there is none; at most `LINE_CHARACTERS`.
    """

    hung: bool
    said: str


def note_call() -> None:
    """The present call begins in this process; nothing where that is no worker of Ray with a log that /proc tells."""
    log, notes = _log(), _notes()
    if log is not None and notes is not None:
        with notes.open("a") as file:
            file.write(f"{ray.get_runtime_context().get_task_id()} {log.name}\n")


def how_calls_ended(task: str) -> list[CallEnd]:
    """How the processes ended on this machine that had begun this call of the present actor, in their order; one that
    began it several times, as it raised before, ended once.

    Args:
        task: Ray's id of the call, in hex.

    Returns:
        Empty where nothing is known, as after its machine was lost.
    """
    own, notes = _log(), _notes()
    if own is None or notes is None or not notes.exists():
        return []
    begun = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    logs = dict.fromkeys(log for asked, log in begun if asked == task and log != own.name)
    return [_end(notes.parent / log) for log in logs]


def has_lost_a_process() -> bool:
    """Has one ended that had begun the present call? False where nothing is known, as outside of Ray's workers."""
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
