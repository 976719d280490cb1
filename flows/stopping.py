# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: what ends at once, and what has to be ended in order. Imports nothing that takes time."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.system.causes import causes

Handler = Callable[[int, FrameType | None], None]
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""Signals that end a command with 128 and their number, as a shell says it: 130 and 143."""


class Stopped(BaseException):
    """SIGTERM, where nobody else minds it."""


def stopped(number: int) -> str:
    """What is said of it."""
    return f"stopped by {NAMES[signal.Signals(number)]}"


def end_now(number: int, frame: FrameType | None = None) -> None:
    """For where nothing is there yet that would have to be ended: an import may swallow what is raised within it."""
    os.write(2, f"{chr(10) * os.isatty(2)}{stopped(number)}\n".encode())  # below the terminal's ^C
    os._exit(128 + number)


def raise_it(number: int, frame: FrameType | None = None) -> None:
    """For where there is something to end. Raises KeyboardInterrupt or Stopped."""
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def handle(handler: Handler) -> dict[signal.Signals, signal.Handlers | Handler | int | None]:
    """Have both signals call the handler; what called before.

    One that is ignored stays so, as Ctrl-C is in a process that a script started in the background. Nothing changes
    elsewhere than in a process's main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heeded = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """The same for the block; a handler that comes within it stays."""
    before = handle(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)


def signal_of(error: BaseException | None) -> int:
    """The signal that an error comes from, at first or last; 0 where it comes from none.

    What is interrupted within Prefect's own steps may end with another error than the interrupt.
    """
    for found in causes(error):
        if isinstance(found, KeyboardInterrupt):
            return signal.SIGINT
        if isinstance(found, Stopped):
            return signal.SIGTERM
    return 0
