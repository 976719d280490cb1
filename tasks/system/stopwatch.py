# SPDX-License-Identifier: Apache-2.0
"""Where an iteration's time went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by stage.

    Stages are timed inside their task, so what is left of the iteration's wall time is orchestration: Prefect's task
    runs and the driver's own bookkeeping.
    """

    def __init__(self, label: object = "") -> None:
        """Begin the iteration's time; `label` is what it is the time of, as an iteration's number."""
        self.label = str(label)
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def finished(self) -> dict[str, float]:
        """Seconds by stage and, as `step`, since the watch was made."""
        return self.seconds | {"step": time.perf_counter() - self._begun}
