# SPDX-License-Identifier: Apache-2.0
"""Python's collector of cycles, which waits while a driver or an actor imports.

What imports make stays, a few million objects, and the collector looks through all of them again and again, in vain:
0.7 s of the 5 of `import flows.train`. So its steps are large from `flows` on in a driver, and in an actor from
`tasks.actors` on, with which its imports begin, to the end of its loading. Afterwards they are the usual ones there: a
cycle that nobody needs any more may hold memory of a GPU.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

LARGE_STEPS = 50_000
"""New objects, in place of 700."""
USUAL_STEPS = gc.get_threshold()


def take_large_steps() -> None:
    """Have this process collect garbage seldom; an actor's until it has loaded."""
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
