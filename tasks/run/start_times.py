# SPDX-License-Identifier: Apache-2.0
"""Where the seconds went until a process had made its first update."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import psutil

MANY_MODULES = 1000
"""So many that are compiled anew take two seconds or more of each process."""
LEAST_TOLD_S = 1.0
"""What of a part took less is not told apart."""


def uncompiled_modules() -> int:
    """Modules of this process whose compiled code is not on the disk, so that the next process compiles them again."""
    specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
    return sum(not Path(spec.cached).is_file() for spec in specs if spec and spec.has_location and spec.cached)


class StartTimes:
    """Seconds by part, each from the end of the one before.

    Attributes:
        parts: name -> seconds. The first run of a process counts the process' own start, imports and all.
        is_told: has `told` been called, as it is once?
    """

    _counts_process: ClassVar[bool] = True

    def __init__(self) -> None:
        """Begin: call it first of all."""
        self.parts: dict[str, float] = {}
        self.is_told = False
        self._inside: dict[str, Mapping[str, float]] = {}
        if StartTimes._counts_process:
            self.parts["the process"] = time.time() - psutil.Process().create_time()
            StartTimes._counts_process = False
        self._last = time.perf_counter()

    def mark(self, part: str, inside: Mapping[str, float] | None = None) -> None:
        """Count what has passed since the last mark as this part's.

        Args:
            inside: name -> seconds of what it consisted of, some of it side by side.
        """
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._inside[part] = inside or {}
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
        """What a run says once its first update is done, whether or not that made a step."""
        self.is_told = True
        parts = ", ".join(f"{part} {seconds:.1f}{self._told_inside(part)}" for part, seconds in self.parts.items())
        said = f"the first update was done after {self.seconds:.1f} s: {parts}"
        modules = uncompiled_modules()
        if modules < MANY_MODULES:
            return said
        kept = "not written (PYTHONDONTWRITEBYTECODE)" if sys.dont_write_bytecode else "not there and cannot be written"
        return f"{said}; each process compiled {modules} modules anew, as their __pycache__ is {kept}"

    def _told_inside(self, part: str) -> str:
        long = {name: seconds for name, seconds in self._inside.get(part, {}).items() if seconds >= LEAST_TOLD_S}
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in long.items())
        return f" ({told})" if told else ""
