# SPDX-License-Identifier: Apache-2.0
"""Ray's daemon on a machine that is busy: Ray itself waits half a minute for it, whatever its settings are."""

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from tasks.actors.daemons import begun_daemons
from tasks.system.processes import runs

DAEMON = "raylet"
LATEST_SECONDS = 180.0
"""For it to be there. Before that it starts two Python programs, each of which takes half a minute on a slow host."""


def daemon_lives(before: Set[psutil.Process]) -> bool:
    """Does a daemon run that this process has started, none of those processes?

    It gives up by itself where one of its Python programs has not said after 15 seconds, which no setting changes, that
    it is there.
    """
    return any(name == DAEMON and runs(daemon) for daemon, name in begun_daemons(before).items())


@contextmanager
def waited_for(before: Set[psutil.Process]) -> Iterator[float]:
    """A cluster that is started in the block may be so late, as long as its daemon, none of those processes, lives.

    Returns:
        until when, by `time.monotonic`.
    """
    services: Any = ray._private.services
    look = services.get_node
    latest = time.monotonic() + LATEST_SECONDS

    def get_node(*asked: Any, **named: Any) -> Any:
        while True:
            try:
                return look(*asked, **named)
            except RuntimeError:  # Ray's, of a node that it does not know yet
                if time.monotonic() > latest or not daemon_lives(before):
                    raise
            time.sleep(0.1)

    services.get_node = get_node
    try:
        yield latest
    finally:
        services.get_node = look
