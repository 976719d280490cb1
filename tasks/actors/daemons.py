# SPDX-License-Identifier: Apache-2.0
"""Ray's daemons of a cluster that this process has started: do they still run?

Ray itself ends the driver ten seconds after its raylet is gone, and a minute after its head is: from C++, without a
word, and before anything is told to MLflow and Prefect. So whoever waits for Ray looks before that.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil

from tasks.actors.ray_address import ClusterError
from tasks.system.processes import runs

NAMES = {"raylet": "raylet", "gcs_server": "head"}
"""Program -> what Ray calls it."""

_needed: dict[psutil.Process, str] = {}


@contextmanager
def needed_daemons(before: Collection[psutil.Process]) -> Iterator[None]:
    """During the block, `require_daemons` misses those that this process has started, but for the ones of before.

    A daemon of an earlier cluster stays among the children, dead, until somebody asks for its exit code.
    """
    begun = {}
    for child in set(psutil.Process().children()) - set(before):
        with suppress(psutil.NoSuchProcess):  # some other child, which has just ended
            if child.name() in NAMES:
                begun[child] = NAMES[child.name()]
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
