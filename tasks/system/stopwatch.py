# SPDX-License-Identifier: Apache-2.0
"""Where an iteration's time went."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LEFT = "orchestration"
"""The part of an iteration's time that is in no stage."""


class Stopwatch:
    """Adds up seconds by stage.

    Stages are timed inside their task, so what is left of the iteration's wall time is orchestration: Prefect's task
    runs and the driver's own bookkeeping.

    Attributes:
        label: what it is the time of, as an iteration's number.
        seconds: by stage; those of a stage within another one count there alone.
        behind: by stage what was done meanwhile in another thread, and took nothing of the iteration's time.
        inside: by name what other processes did within a stage, as they counted it. They work side by side, so it is
            part of no sum.
    """

    def __init__(self, label: object = "", begun: float | None = None) -> None:
        """Begin the iteration's time: now, or at this reading of `time.perf_counter`."""
        self.label = str(label)
        self.seconds: dict[str, float] = {}
        self.behind: dict[str, float] = {}
        self.inside: dict[str, float] = {}
        self._begun = time.perf_counter() if begun is None else begun
        self._ended: float | None = None
        self._within: list[float] = []  # of each stage that is open: seconds of the stages within it

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        start = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._within.pop()
            if self._within:
                self._within[-1] += took

    @contextmanager
    def stage_behind(self, name: str) -> Iterator[None]:
        """Time a block that runs in another thread; only one thread may."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.behind[name] = self.behind.get(name, 0.0) + time.perf_counter() - start

    def add_inside(self, stage: str, seconds: Mapping[str, float]) -> None:
        """Count what other processes did, as <stage>/<name>."""
        for name, value in seconds.items():
            key = f"{stage}/{name}"
            self.inside[key] = self.inside.get(key, 0.0) + value

    def finished(self) -> dict[str, float]:
        """End the time: seconds by stage, `orchestration`, which is what they leave, and `step`, the sum of all."""
        self._ended = time.perf_counter()
        step = self._ended - self._begun
        return self.seconds | {LEFT: step - sum(self.seconds.values()), "step": step}

    def followed(self, label: object) -> "Stopwatch":
        """The next iteration's, whose time begins where this one's ended: no second is between two iterations."""
        return Stopwatch(label, self._ended)
