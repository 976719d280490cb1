# SPDX-License-Identifier: Apache-2.0
"""Ray's daemons of a cluster that this process has started: do they still run?

Ray itself ends the driver ten seconds after its raylet is gone, and a minute after its head is: from C++, without a
word, and before anything is told to MLflow and Prefect. So whoever waits for Ray looks before that.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress

import psutil

from tasks.actors.ray_address import ClusterError
from tasks.system.processes import runs

NAMES = {"raylet": "raylet", "gcs_server": "head"}
"""Program -> what Ray calls it."""

_needed: dict[psutil.Process, str] = {}


def begun_daemons(before: Set[psutil.Process] = frozenset()) -> dict[psutil.Process, str]:
    """Those among this process's children but for the ones of before, and what Ray calls them; dead ones, too."""
    begun = {}
    for child in set(psutil.Process().children()) - before:
        with suppress(psutil.Error):  # some other child, which has just ended
            if child.name() in NAMES:
                begun[child] = NAMES[child.name()]
    return begun


@contextmanager
def needed_daemons(before: Set[psutil.Process]) -> Iterator[None]:
    """During the block, `require_daemons` misses those that this process has started, but for the ones of before.

    A daemon of an earlier cluster stays among the children, dead, until somebody asks for its exit code.
    """
    begun = begun_daemons(before)
    _needed.update(begun)
    try:
        yield
    finally:
        for child in begun:
            del _needed[child]


def require_daemons() -> None:
    """Check that those of `needed_daemons` still run.

    Raises:
        ClusterError: one has ended.
    """
    for daemon, name in list(_needed.items()):
        if not runs(daemon):
            raise ClusterError(
                f"Ray's {name} (process {daemon.pid}) has ended, without which a run cannot go on: where the kernel "
                "killed it for want of memory, `dmesg` tells so"
            )
