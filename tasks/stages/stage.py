# SPDX-License-Identifier: Apache-2.0
"""What every stage is made with: a Prefect task whose seconds are counted."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

from tasks.system.stopwatch import Stopwatch

P = ParamSpec("P")
R = TypeVar("R")


class Stage(Task[P, R]):
    """A Prefect task whose sequences are handed on as they are.

    Prefect looks for futures and states in each element of each argument, twice a call, down to the fields of data
    classes: for the prompts and noise keys of 2,048 samples .8 s of an iteration on two busy cores. A stage is never
    given futures. What is not a sequence, such as another stage's result, Prefect sees, and draws as an input.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage; see `Task`."""
        named = {name: value if name == "wait_for" else _unseen(value) for name, value in kwargs.items()}
        return super().__call__(*map(_unseen, args), **named)


def _unseen(value: Any) -> Any:
    return quote(value) if isinstance(value, list | tuple) else value


def stage(timing: str, task_name: str | None = None) -> Callable[[Callable[P, R]], Stage[Concatenate[Stopwatch, P], R]]:
    """Decorator of a stage: a Prefect task without cache and stored result, called with a stopwatch before its own
    arguments.

    What a stage takes of the GPUs is measured in the actors' methods that it calls, see
    `tasks.actors.memory.measures_gpu_memory`.

    Args:
        timing: what the stopwatch counts its seconds under, as in timing_s/update_actor.
        task_name: in Prefect; None is `timing` with dashes. A task run has it with the stopwatch's label: update 12.
    """

    def decorate(work: Callable[P, R]) -> Stage[Concatenate[Stopwatch, P], R]:
        @wraps(work)
        def timed(clock: Stopwatch, *args: P.args, **kwargs: P.kwargs) -> R:
            with clock.stage(timing):
                return work(*args, **kwargs)

        # Prefect binds a call's arguments by the signature, which would be that of `work` alone.
        own = inspect.signature(work)
        clock = inspect.Parameter("clock", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Stopwatch)
        timed.__signature__ = own.replace(parameters=[clock, *own.parameters.values()])  # type: ignore[attr-defined]
        name = task_name or timing.replace("_", "-")

        def run_name(parameters: dict[str, Any]) -> str:
            return f"{name} {parameters['clock'].label}".rstrip()

        named: Any = run_name  # Prefect's protocol for it has a class method, which no function has
        return Stage(timed, name=name, task_run_name=named, cache_policy=NO_CACHE, persist_result=False)

    return decorate
