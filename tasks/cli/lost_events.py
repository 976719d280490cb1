# SPDX-License-Identifier: Apache-2.0
"""Prefect's events where its server is gone: told once, and no reason for a command not to end.

To each event that is not taken Prefect gives seven seconds, one after the other, prints all of it, and waits for all of
them before a process ends: minutes after the command's last words.
"""

import logging
import sys
from concurrent.futures import wait
from contextlib import suppress
from queue import Empty
from typing import Any

PATIENCE_SECONDS = 5.0
"""For a server that is there to take the last events."""


class FirstOfLostEvents(logging.Filter):
    """Passes the first record that says that Prefect's server cannot be told of events; not one for each of these."""

    FIRST = "prefect.events.clients", "Unable to connect to "
    EACH = "prefect._internal.concurrency", "Service 'EventsWorker' failed to process item "

    def __init__(self) -> None:
        super().__init__()
        self.was_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Is it to be shown?"""
        message = record.getMessage()
        if record.name == self.FIRST[0] and message.startswith(self.FIRST[1]):
            told, self.was_told = self.was_told, True
            return not told
        return not (record.name == self.EACH[0] and message.startswith(self.EACH[1]))


def give_up_events(seconds: float = PATIENCE_SECONDS) -> int:
    """Wait until Prefect's server has taken the events that there are, and leave those that it has not taken after so
    many seconds; how many that is, the one on its way not counted."""
    if "prefect.events.worker" not in sys.modules:
        return 0
    service: Any = sys.modules["prefect.events.worker"].EventsWorker
    workers = [*service._instances.values()]
    wait([worker._drain() for worker in workers], seconds)
    left = [event for worker in workers for event in _emptied(worker) if event is not None]
    if left:
        print(f"Prefect's server did not take the last {len(left)} events of the run", file=sys.stderr)
    return len(left)


def _emptied(worker: Any) -> list[Any]:
    """What is left in its queue, after which there is nothing for it to wait for."""
    left = []
    with suppress(Empty):
        while True:
            left.append(worker._queue.get_nowait())
    worker._queue.put_nowait(None)
    return left
