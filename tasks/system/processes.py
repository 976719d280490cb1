# SPDX-License-Identifier: Apache-2.0
"""Which process is which: also after its pid went to another one, and after the clock was set.

The time of day at which a process started is no mark of it: the kernel keeps the ticks between boot and start, and who
adds the boot's time of day gets another sum after every step of the clock. The ticks themselves never change.
"""

import os
import socket
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOK_SECONDS = 0.02
"""Between two looks at processes that should end."""
COPY = "measured-"
"""Begins the names of folders with weights that a validation sweep measures."""


class ProcessIdentity(NamedTuple):
    """One process of all that there have been; a list of these three in JSON, see `parsed` for words.

    Attributes:
        pid: its number.
        started: clock ticks from the boot to its start, proc(5)'s starttime.
        boot: the kernel's id of that boot.
    """

    pid: int
    started: int
    boot: str

    def __str__(self) -> str:
        """Its three values, with blanks between them."""
        return f"{self.pid} {self.started} {self.boot}"

    @classmethod
    def parsed(cls, words: str) -> "ProcessIdentity":
        """From what `str` gave."""
        pid, started, boot = words.split()
        return cls(int(pid), int(started), boot)

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The identity of the process that has the pid now.

        Raises:
            psutil.NoSuchProcess: none has.
        """
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
        except (FileNotFoundError, ProcessLookupError) as error:
            raise psutil.NoSuchProcess(pid) from error
        return cls(pid, int(fields[19]), boot_id())

    def process(self) -> psutil.Process | None:
        """The process, if it still is; one that has ended and waits for its parent is not."""
        try:
            found = psutil.Process(self.pid)
            same = ProcessIdentity.of(self.pid) == self
            return found if same and runs(found) else None
        except psutil.NoSuchProcess:
            return None


def identity(pid: int) -> str | None:
    """`boot id/start ticks`, for a record with the pid beside it; None where no such process runs, or only a zombie."""
    try:
        found = ProcessIdentity.of(pid)
    except psutil.NoSuchProcess:
        return None
    return None if found.process() is None else f"{found.boot}/{found.started}"


def lives(pid: int, known: str) -> bool:
    """Does the process of that number, whose `identity` was this, still run?"""
    return identity(pid) == known


def named_after_this_process(prefix: str) -> str:
    """How the name of a temporary folder begins from which `maker_lives` tells whether anybody works there."""
    return f"{prefix}{socket.gethostname()}-{os.getpid()}-"


def maker_lives(name: str, prefix: str) -> bool | None:
    """Does the process still run that made a folder of this name? None: it ran on another machine, so nobody knows."""
    host, _, pid = name.removeprefix(prefix).rpartition("-")[0].rpartition("-")
    return identity(int(pid)) is not None if host == socket.gethostname() and pid.isdigit() else None


def runs(process: psutil.Process) -> bool:
    """Does it still run? One that has ended stays in the list of processes until its parent asks for its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for so many seconds that they end; those that run still.

    By looking, not by `psutil.wait_procs`: that opens a pidfd, and of a process that is just ending some kernels refuse
    one with an error that psutil passes on (FileNotFoundError, or OSError with EINVAL).
    """
    over = time.monotonic() + seconds
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < over:
        time.sleep(LOOK_SECONDS)
        processes = left
    return left


def wait_or_kill(processes: Collection[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for so many seconds that they end, then kill those that do not; what is there still after as long again."""
    left = wait_until_ended(processes, seconds)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return wait_until_ended(left, seconds)


def boot_id() -> str:
    """The id of the running kernel; another one after each start of the machine."""
    return BOOT_ID.read_text().strip()


def beside_python(name: str) -> str:
    """How a program of this Python's environment is called from the working folder."""
    program = Path(sys.executable).with_name(name)
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
