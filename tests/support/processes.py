# SPDX-License-Identifier: Apache-2.0
"""Processes by their commands, and actors'; one that ends while it is looked at is none."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil
import ray


def pid_of(actor: Any) -> int:
    """The process of a Ray actor."""
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def words_of(process: psutil.Process) -> list[str]:
    """Its command; none of one that has ended, a zombie too, or that nobody may look at."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def with_word(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Those that have this in their command."""
    return [process for process in processes if word in " ".join(words_of(process))]


def named(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """Those whose program has this name."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found += [process] if process.name() == name else []
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """By SIGKILL, those that are still there: one may end with another, before its turn comes."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def children_of(processes: Iterable[psutil.Process], recursive: bool = False) -> list[psutil.Process]:
    """What they have started, and if `recursive` what that has started."""
    found: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += process.children(recursive=recursive)
    return found
