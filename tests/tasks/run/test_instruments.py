# SPDX-License-Identifier: Apache-2.0
"""What tracing costs an iteration is the profiler's time, and not the driver's own."""

from typing import Any

import pytest

from tasks.config.trainer import ProfileConfig
from tasks.run import instruments
from tasks.system.stopwatch import Stopwatch


class Watched(Stopwatch):
    """Knows which stages are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def stage(self, name: str) -> Any:
        """As the original's, noted while it lasts."""
        watch, within = self, super().stage(name)

        class Stage:
            def __enter__(self) -> None:
                watch.open.append(name)
                within.__enter__()

            def __exit__(self, *error: Any) -> None:
                within.__exit__(*error)
                watch.open.remove(name)

        return Stage()


class Kept:
    """In a tracker's place."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def log_bytes(self, data: bytes, name: str) -> None:
        self.files[name] = data


def test_starting_and_writing_a_trace_is_the_profilers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept, seen = Watched(), Kept(), []

    def start(group: Any, numbers: Any, settings: Any) -> dict[int, Any]:
        seen.append(("start", [*clock.open]))
        return dict.fromkeys(numbers)

    def collect(actors: Any) -> dict[int, bytes]:
        seen.append(("collect", [*clock.open]))
        return dict.fromkeys(actors, b"trace")

    monkeypatch.setattr(instruments, "start_traces", start)
    monkeypatch.setattr(instruments, "collect_traces", collect)
    settings: Any = ProfileConfig(iterations=(3,), ranks=(0, 1))
    for iteration in (2, 3):
        with instruments.profiled({"trainer": object()}, "trainer", settings, iteration, kept, clock):  # type: ignore
            seen.append((f"iteration {iteration}", [*clock.open]))
    assert seen == [("iteration 2", []), ("start", ["profile"]), ("iteration 3", []), ("collect", ["profile"])]
    assert [*kept.files] == ["profile/000003/trainer_0.json.gz", "profile/000003/trainer_1.json.gz"]
