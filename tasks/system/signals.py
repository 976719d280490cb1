# SPDX-License-Identifier: Apache-2.0
"""SIGTERM: once is enough."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeded_once() -> Iterator[None]:
    """A SIGTERM that ends the block is the last one that is heeded, so that what follows is done whole.

    Who ends a process may say so more than once, as Prefect's worker does: the second SIGTERM would interrupt the
    process while it tells MLflow and Prefect of its end. SIGKILL remains. Whoever had set a handler sets it again.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
