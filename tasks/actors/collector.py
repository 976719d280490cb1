# SPDX-License-Identifier: Apache-2.0
"""Python's collector of cycles, which waits while an actor imports and loads.

What imports make stays, a million objects and more, and the collector would look through all of them again and again,
in vain. So its steps are large from `tasks.actors` on, with which an actor's imports begin, to the end of its loading.
Afterwards they are the usual ones: a cycle that nobody needs any more may hold memory of a GPU.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

LARGE_STEPS = 50_000
"""New objects; as those of a driver, in `flows`."""
USUAL_STEPS = gc.get_threshold()


def take_large_steps() -> None:
    """Of this process, until its actor has loaded."""
    gc.set_threshold(LARGE_STEPS)


def collects_once_loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of the method that loads what an actor has: after it the collector takes its usual steps."""

    @functools.wraps(load)
    def loading(*arguments: Any, **named: Any) -> Any:
        try:
            return load(*arguments, **named)
        finally:
            gc.set_threshold(*USUAL_STEPS)

    return loading
