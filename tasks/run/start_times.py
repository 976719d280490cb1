# SPDX-License-Identifier: Apache-2.0
"""Where the seconds went until a process had made its first update."""

import time
from typing import ClassVar

import psutil


class StartTimes:
    """Seconds by part, each from the end of the one before.

    Attributes:
        parts: name -> seconds. The first run of a process counts the process' own start, imports and all.
    """

    _counts_process: ClassVar[bool] = True

    def __init__(self) -> None:
        """Begin: call it first of all."""
        self.parts: dict[str, float] = {}
        if StartTimes._counts_process:
            self.parts["the process"] = time.time() - psutil.Process().create_time()
            StartTimes._counts_process = False
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Count what has passed since the last mark as this part's."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def apart(self, part: str, seconds: float) -> None:
        """Count so many seconds of those since the last mark as this part's, and not the next one's."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds
        self._last += seconds

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    def told(self) -> str:
        """What a run says once its first update is done."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"the first update was done after {self.seconds:.1f} s: {parts}"
