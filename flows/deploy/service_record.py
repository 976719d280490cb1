# SPDX-License-Identifier: Apache-2.0
"""The folder .services/ of `make up`: its lock, and the record of which processes were started and which still live."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from models.errors import DoubleflowError
from tasks.system.access import private_folder, write_private
from tasks.system.distinct_names import plain_json
from tasks.system.processes import boot_id, lives

HERE = Path(".services")
RECORD = HERE / "pids.json"
ENVIRONMENT = HERE / "environment"
POOL = HERE / "pool"
LARGEST_PID = 2**22
"""proc(5), pid_max."""


@dataclass(frozen=True)
class Pool:
    """The work pool of what is up, how many flow runs it lets run at once, and the machine's GPUs."""

    name: str
    runs: int
    gpus: int

    def record(self) -> None:
        """Have it known to whoever comes next."""
        write_private(POOL, json.dumps(asdict(self)))

    @classmethod
    def recorded(cls) -> "Pool | None":
        """The one that the last `up` has recorded, whether anything of it still lives or not; None without.

        Raises:
            ServiceError: the record is damaged, or of an older version.
        """
        if not POOL.is_file():
            return None
        try:
            return cls(**json.loads(POOL.read_text()))
        except (ValueError, TypeError) as error:
            raise ServiceError(f"{POOL} does not say which work pool is up ({error}): remove it") from error


class ServiceError(DoubleflowError, RuntimeError):
    """The services cannot be started as asked."""


@dataclass(frozen=True)
class Recorded:
    """A process that was started: `identity` is that of `tasks.system.processes`, `host` the machine."""

    pid: int
    identity: str
    host: str

    @property
    def alive(self) -> bool:
        """Does it still run, here?"""
        return self.host == socket.gethostname() and lives(self.pid, self.identity)

    @property
    def ended(self) -> bool:
        """Has it surely ended: this machine was started again since?"""
        return self.host == socket.gethostname() and not self.identity.startswith(f"{boot_id()}/")


@contextmanager
def hold_services() -> Iterator[None]:
    """Hold .services/, which is made: no two of `up` and `down` work at the same time.

    Raises:
        ServiceError: another one does.
    """
    busy = f"another `up` or `down` is at work in {Path.cwd()}: wait for it"
    with (private_folder(HERE) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.stat(lock.name).st_ino == os.fstat(lock.fileno()).st_ino  # not one that has been removed since
        except (BlockingIOError, FileNotFoundError) as error:
            raise ServiceError(busy) from error
        if not same:
            raise ServiceError(busy)
        yield


def clear_services() -> None:
    """Remove what an earlier start has left, but the lock."""
    for file in HERE.iterdir():
        if file.name != "lock":
            file.unlink()


def recorded_processes() -> dict[str, Recorded]:
    """`recorded_in` this folder's record."""
    return recorded_in(RECORD)


def recorded_in(file: Path) -> dict[str, Recorded]:
    """Name -> process of what was started; nothing without the file.

    Raises:
        ServiceError: the record is broken.
    """
    if not file.is_file():
        return {}
    try:
        record = plain_json(file.read_text())  # of two processes under one name only one would be ended
        return {name: _checked(entry) for name, entry in record.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ServiceError(
            f"{file} cannot be read ({error}): end the servers and the worker by hand, if they run (`pgrep -af "
            f"'prefect|mlflow'`), then remove {file.parent}/"
        ) from error


def _checked(entry: Any) -> Recorded:
    """One process of the record. Raises ValueError or TypeError where it is none."""
    pid, who, host = entry
    if type(pid) is not int or not 0 < pid <= LARGEST_PID or not isinstance(who, str) or not isinstance(host, str):
        raise ValueError(f"{str(entry)[:60]} is no process")
    return Recorded(pid, who, host)


def write_record(processes: Mapping[str, Recorded]) -> None:
    """Written aside and renamed: there is the old record or the new one."""
    aside = RECORD.with_suffix(".new")
    write_private(aside, json.dumps({name: (p.pid, p.identity, p.host) for name, p in processes.items()}))
    os.replace(aside, RECORD)


def living_processes() -> dict[str, psutil.Process]:
    """Name -> process of those that are alive; a pid that has gone to another process since is not one of them."""
    found = {}
    for name, process in recorded_processes().items():
        with suppress(psutil.NoSuchProcess):
            if process.alive:
                found[name] = psutil.Process(process.pid)
    return found
