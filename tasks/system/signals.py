# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: once is enough, and each is what it is, whatever a library made of it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

from models.errors import causes

PREFECTS = "prefect.exceptions"


@contextmanager
def passed_on() -> Iterator[None]:
    """An error of the block that came of a signal, which a library met within its own steps, is raised as the signal.

    Raises:
        KeyboardInterrupt, TerminationSignal: what the signal's handler raised.
    """
    heard: BaseException | None = None
    try:
        yield
    except Exception as error:
        signals = _raised_by_handlers()
        heard = next((found for found in causes(error) if isinstance(found, signals)), None)
        if heard is None:
            raise
    if heard is not None:
        raise heard


@contextmanager
def held_back() -> Iterator[None]:
    """SIGTERM and Ctrl-C of the block reach their handlers after it: for what a signal must not leave half done, and
    what takes an instant.

    Only Python's main thread hears signals, and only there does this do anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    kinds = (signal.SIGTERM, signal.SIGINT)
    with kept_from_below(*kinds):  # between the two nothing is heard by half
        before = [signal.signal(kind, lambda number, frame: heard.append((number, frame))) for kind in kinds]
    try:
        yield
    finally:
        with kept_from_below(*kinds):
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)
        for number, frame in heard[:1]:
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(number)


@contextmanager
def kept_from_below(*kinds: signal.Signals) -> Iterator[None]:
    """Processes that this thread starts in the block do not hear the signals, which a terminal or a batch system sends
    to all of a command's; this one does so after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raised_by_handlers() -> tuple[type[BaseException], ...]:
    """Prefect is not imported for it: the actors do without, and where it is not there, none of its handlers is."""
    prefect = sys.modules.get(PREFECTS)
    return (KeyboardInterrupt,) if prefect is None else (KeyboardInterrupt, prefect.TerminationSignal)


@contextmanager
def heeded_once() -> Iterator[None]:
    """A SIGTERM or Ctrl-C that ends the block is the last signal that is heeded, so that what follows is done whole.

    Who ends a process may say so more than once, as Prefect's worker does, and people in a hurry: the second signal
    would interrupt the process while it tells MLflow and Prefect of its end. SIGKILL remains. Whoever had set a handler
    of SIGTERM sets it again. Python's own of Ctrl-C stays: its process may go on, as a notebook does.
    """
    try:
        with passed_on():
            yield
    except Exception:
        raise
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


def unheeded_while(holds: Callable[[], bool]) -> None:
    """From now on SIGTERM and Ctrl-C do nothing as long as that holds: for where all is done. Afterwards they reach the
    handlers of now, if no others are there; what is ignored stays so. See `tasks.cli.stopping` for who says so.

    Only Python's main thread hears signals, and only there does this do anything.
    """
    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(kind)
            if callable(before):
                signal.signal(kind, partial(_unless, holds, before))


def _unless(holds: Callable[[], bool], handler: Callable[..., object], number: int, frame: FrameType | None) -> None:
    if not holds():
        handler(number, frame)


_last_waits: list["LastWait"] = []


@dataclass
class LastWait:
    """A wait for an end after which nothing is left to do: a first signal is told, and the next one ends the process.

    In a thread, for the main one may wait in a library's hands, where none of Python's handlers runs. A process that
    has none for it, as one that is no command, waits on.

    Args:
        is_over: asked in any thread.
        told: what a first signal is answered.
        leave: what is done before the process ends at the next one.
    """

    is_over: Callable[[], bool]
    told: str
    leave: Callable[[], object]
    _heard: bool = False

    def begin(self) -> None:
        """From now on, until it is over."""
        _last_waits[:] = [self]

    def hear(self, number: int) -> None:
        """A signal that came: tell it, or end the process as a shell says it, with 128 and the number."""
        if self._heard:
            self.leave()
            os._exit(128 + number)
        self._heard = True
        os.write(2, f"{chr(10) * os.isatty(2)}{self.told}\n".encode())


def last_wait() -> LastWait | None:
    """What is waited for where all is done; None where something is left to do."""
    return next((wait for wait in _last_waits if not wait.is_over()), None)
