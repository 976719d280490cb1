# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's folder: one process at a time works on it.

The lock is the kernel's, on an open file: it ends with the process that holds it, so a killed run leaves none behind.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

from tasks.records.run_store import CheckpointError
from tasks.system.processes import ProcessIdentity


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is created; the kernel gives it back when this process ends, however it ends.

    Who holds it, or held it last, is in its `.lock`: host, and pid, start and boot of the process.

    Raises:
        CheckpointError: another process holds it, or its file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process works on {folder}{_owner(lock)}: end it first, or wait for it"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be locked, which keeps a second process from it: its file system "
                f"{_file_system(folder)} says {error.strerror!r}; mount it with locks, or set "
                "trainer.default_local_dir to a folder of another one"
            ) from error
        lock.truncate(0)
        json.dump({"host": socket.gethostname()} | ProcessIdentity.of(os.getpid())._asdict(), lock)
        lock.flush()
        yield


def _owner(lock: TextIO) -> str:
    """What the holder has written of itself, in brackets; nothing where it is only about to."""
    lock.seek(0)
    try:
        owner = json.loads(lock.read())
        return f" (pid {owner['pid']} on {owner['host']})"
    except (ValueError, KeyError, TypeError):
        return ""


def _file_system(folder: Path) -> str:
    """Its kind and where it is mounted."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    nearest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return "of an unknown kind" if nearest is None else f"{nearest.fstype} at {nearest.mountpoint}"
