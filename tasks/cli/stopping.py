# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP: what ends at once, and what has to be ended in order. Imports nothing that takes time."""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import parent_process
from types import FrameType

from models.errors import causes
from tasks.system.signals import last_wait

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""Signals that end a command with 128 and their number, as a shell says it: 130 and 143."""


_said: set[int] = set()
_codes: list[int] = []
_saying = threading.Lock()


class Stopped(BaseException):
    """SIGTERM, where nobody else minds it."""


def stop_message(number: int) -> str:
    """What the user is told of a signal."""
    return f"stopped by {NAMES[signal.Signals(number)]}"


def say(number: int) -> None:
    """Say it, unless somebody has since `forget_said`."""
    with _saying:
        if number not in _said:
            _said.add(number)
            _write(number)


def _write(number: int) -> None:
    """On a line of its own, below the bar or the terminal's ^C."""
    os.write(2, f"{chr(10) * os.isatty(2)}{stop_message(number)}\n".encode())


def forget_said() -> None:
    """A command begins."""
    _said.clear()


def say_at_once() -> None:
    """From now on it is said when the signal comes: whoever handles it, and whatever keeps the main thread meanwhile.

    What is there then is ended in order, which takes seconds on a busy machine. One that comes after all is done, while
    something is waited for that may not end, is answered: the next one ends the process (`tasks.system.signals`).
    """
    if threading.current_thread() is threading.main_thread():
        heard, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=_say_all, args=(heard,), daemon=True).start()


def _say_all(heard: int) -> None:
    while number := os.read(heard, 1):
        if number[0] not in NAMES:
            continue
        if (wait := last_wait()) is not None:
            wait.hear(number[0])
        else:
            say(number[0])


def leave_early(code: int) -> None:
    """The process ends with this code as soon as everything is done that is registered for its end.

    What would come next is that all modules are taken down, seconds of work with torch, Ray and Prefect among them. A
    process of multiprocessing ends without that anyway.
    """
    if parent_process() is None:
        _codes.append(code)
        handle(signal.SIG_IGN)  # all is done: a signal would end what is registered half way, with its frames


def _leave() -> None:
    if _codes:
        logging.shutdown()  # which may have been registered before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_codes[-1])


atexit.register(_leave)  # here, where a command's process begins: what is registered first is done last


def end_now(number: int, frame: FrameType | None = None) -> None:
    """For where nothing is there yet that would have to be ended: an import may swallow what is raised within it."""
    _write(number)
    os._exit(128 + number)


def raise_it(number: int, frame: FrameType | None = None) -> None:
    """For where there is something to end. Raises KeyboardInterrupt or Stopped."""
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def heed_hangup() -> None:
    """A terminal that goes away ends the command as SIGTERM does, from now on, and what it still says goes nowhere.

    Not where SIGHUP is ignored, as `nohup` has it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        return
    of_terminal = [stream for stream in (0, 1, 2) if os.isatty(stream)]

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in of_terminal:  # to write there is an error now, which would interrupt the end
            os.dup2(nowhere, stream)
        os.close(nowhere)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGHUP, end)


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
