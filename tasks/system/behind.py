# SPDX-License-Identifier: Apache-2.0
"""Writing behind: what an iteration leaves is written in order by a thread, while the next iteration goes on."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

from models.errors import DoubleflowError, full_disk

T = TypeVar("T")
FAILING_WAIT_S = 60.0
STOPPED_WAIT_S = 1.5
"""Where a signal ends the block, which is to be heeded in seconds: a checkpoint that a busy trainer has not written by
then is begun again."""
LEAVING_S = 10.0
"""For the one work that a signal meets."""
LOOK_S = 1.0
"""Between two looks at why a wait takes long."""


class Behind:
    """Works that are done one after the other in a thread, in the order in which they were given.

    A work that fails is the last one: those behind it are not begun, so that nothing stands on the disk that relies on
    what does not. Its error is raised where the next work is given or waited for.

    The thread is a daemon: a process that ends with an error does not wait for it, and leaves what a kill leaves.

    Attributes:
        held_up: where a wait takes long, asked now and then for a context to go on waiting in, or None.
    """

    def __init__(self) -> None:
        """Nothing is begun yet. The works see the context variables of now, so a flow's log and page."""
        self.held_up: Callable[[], AbstractContextManager[None] | None] = lambda: None
        self._context = copy_context()
        self._given: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._last: Future | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Give a work; its result is the future's. The error of an earlier one is raised here."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="behind", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._last = future
        self._given.put((future, lambda: work(*arguments)))
        return future

    def check(self) -> None:
        """Raise the error of a work that failed."""
        if self._error is not None:
            raise self._error

    def wait(self, future: "Future[T]", timeout_s: float | None = None) -> T:
        """The result of a work.

        Raises:
            TimeoutError: it is not there after so many seconds; or, with a timeout, something holds the works up.
        """
        left = timeout_s
        while not wait_for([future], LOOK_S if left is None else min(LOOK_S, left)).done:
            left = None if left is None else left - LOOK_S
            meanwhile = self.held_up()
            if (left is not None and left <= 0) or (meanwhile is not None and timeout_s is not None):
                raise TimeoutError("what is written in the background takes too long")
            if meanwhile is not None:
                with meanwhile:
                    while not wait_for([future], LOOK_S).done and self.held_up() is not None:
                        pass
        return future.result()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all is done that was given; the error of what failed is raised here. See `wait`."""
        if self._last is not None:
            self.wait(self._last, timeout_s)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Context whose end waits for all that was given: nobody ends what a work needs before.

        After an error it waits for FAILING_WAIT_S at most, for what failed may be what the works wait for; after a
        signal for STOPPED_WAIT_S.
        """
        try:
            yield
        except BaseException as error:
            try:
                self.settle(FAILING_WAIT_S if isinstance(error, Exception) else STOPPED_WAIT_S)
            except Exception as of_writing:
                late = isinstance(of_writing, TimeoutError) and not isinstance(error, Exception)  # see `left`
                # Both met what is told: a machine that is lost, a disk that is full.
                same = isinstance(error, DoubleflowError) and type(of_writing) is type(error)
                same |= None not in (full_disk(error), full_disk(of_writing))
                if of_writing is not error and not late and not same:
                    error.add_note(f"what was being written in the background is lost too: {of_writing!r}")
            raise
        self.settle()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context after which, where a signal ends it, no work is begun, and the one that is under way has ended.

        It stands around `settled`, and within what takes away what a work needs, as the connection to Ray.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException as signal:
            self._error = self._error or signal
            if self._last is not None:
                wait_for([self._last], LEAVING_S)
            raise

    def _go_on(self) -> None:
        while True:
            self._do(*self._given.get())  # a work that is done, and all that it holds, is kept in no variable here

    def _do(self, future: Future, work: Callable[[], Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        try:
            result = self._context.run(work)
        except BaseException as error:  # whatever it is: the driver raises it
            self._error = error
            future.set_exception(error)
        else:
            future.set_result(result)
