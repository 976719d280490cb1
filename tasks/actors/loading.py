# SPDX-License-Identifier: Apache-2.0
"""Waiting for actors to load their models, which one may never do: a download that hangs, a file system that is gone.

Ray waits for ever, at the first start and where it starts an actor again. An actor that has no process yet is left to
it: it waits for room on the cluster, behind other runs.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from models.errors import DoubleflowError
from tasks.actors.waiting import get, wait

FIELD = "ray_init.start_timeout_s"
LOOK_SECONDS = 1.0
MOST_STARTS = 5
"""Processes of an actor that die one after the other before one has loaded; with a machine that is lost goes one."""


class NotLoaded(DoubleflowError, RuntimeError):
    """An actor's process is there, and has not loaded in time."""


def get_loaded(
    names: Sequence[str], actors: Sequence[Any], answers: Sequence[ray.ObjectRef], seconds: float
) -> list[Any]:
    """What actors answer once they have loaded; an actor's error is raised here.

    Args:
        names: what each is called, as in "rollout worker 0".
        actors: who was asked.
        answers: one of each.
        seconds: for an actor to load, from when its process is found to be there.

    Raises:
        NotLoaded: one has not, and is killed.
    """
    since: dict[int, float] = {}
    begun: dict[int, int] = {}
    while True:
        try:
            found: list[Any] = get(list(answers), min(LOOK_SECONDS, seconds))
            return found
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # raised where it ran, and brought here
                raise
        answered = wait(answers, 0)
        late = [number for number, answer in enumerate(answers) if answer not in answered]
        states, now = {number: _state_of(actors[number]) for number in late}, time.monotonic()
        begun = {number: _starts(state) for number, state in states.items()} | begun
        since = {number: now for number, state in states.items() if _has_process(state)} | since
        dying = [number for number, state in states.items() if _starts(state) - begun[number] >= MOST_STARTS]
        hung = [number for number in late if now - since.get(number, now) >= seconds]
        for number in dying or hung:
            ray.kill(actors[number])
        if dying:
            raise dies_at_once([names[number] for number in dying])
        if hung:
            raise not_loaded([names[number] for number in hung], seconds)


def not_loaded(names: Sequence[str], seconds: float) -> NotLoaded:
    """The error of actors that have not loaded in so many seconds."""
    return NotLoaded(
        f"{', '.join(names)}: not loaded within {FIELD} {seconds:g} s; see that what is loaded can be reached from "
        "there, or allow more"
    )


def dies_at_once(names: Sequence[str]) -> NotLoaded:
    """The error of actors whose processes died one after the other before they had loaded."""
    return NotLoaded(
        f"{', '.join(names)}: {MOST_STARTS} processes died one after the other as they began; the logs of Ray's "
        f"workers say why. On a cluster of several machines each needs the folder {os.getcwd()}, from which a config's "
        "paths count, and a trainer.compile_cache that can be written"
    )


class LoadWatch:
    """Looks at actors that Ray starts again, of which one may hang while it loads, or die each time that it begins; one
    that does is ended.

    Args:
        seconds: for an actor to load, from when its process is seen to be there.

    Attributes:
        error: names those that were ended, once there are any.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.error: NotLoaded | None = None
        self._since: dict[tuple[str, int], float] = {}
        self._starts: dict[str, int] = {}
        self._deaths: dict[str, int] = {}

    def look(self, actors: Mapping[str, Any]) -> None:
        """Note which of the actors, by what they are called, load now, and end those that have for too long."""
        now, states = time.monotonic(), {name: _state_of(actor) for name, actor in actors.items()}
        starts = {name: _starts(state) for name, state in states.items()}
        for name, state in states.items():  # of several deaths since the last look some may be of processes that lived
            died = starts[name] > self._starts.get(name, starts[name])
            self._deaths[name] = 0 if state.get("State") == "ALIVE" else self._deaths.get(name, 0) + died
        self._starts = starts
        loading = [(name, starts[name]) for name, state in states.items() if _is_loading_again(state)]
        self._since = {start: self._since.get(start, now) for start in loading}
        dying = [name for name in states if self._deaths[name] >= MOST_STARTS]
        hung = [name for (name, _), since in self._since.items() if now - since >= self.seconds]
        if dying:
            self.error = dies_at_once(dying)
        if hung:
            self.error = not_loaded([f"{name}, which was started again" for name in hung], self.seconds)
        for name in {*dying, *hung}:  # their calls fail then
            ray.kill(actors[name])


@contextmanager
def limited_again(seconds: float) -> Iterator[None]:
    """For an actor that loads in a method: where the block takes longer in a process that Ray has started again, the
    actor ends, and for good, for the next process would hang, too. See `ended_for_good`."""
    context = ray.get_runtime_context()
    if seconds == inf or not context.was_current_actor_reconstructed:
        yield
        return
    timer = threading.Timer(seconds, ray.kill, (context.current_actor,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ended_for_good(actor: Any) -> bool:
    """Has `ray.kill` ended it? One that dies otherwise is started again, as often as it may be."""
    cause = _state_of(actor).get("DeathCause")
    return cause is not None and "ray.kill" in cause.actor_died_error_context.error_message


def _has_process(state: Mapping[str, Any]) -> bool:
    """Else it waits for room; an earlier process of its has left its number, but no address."""
    return bool(state.get("Address", {}).get("IPAddress"))


def _starts(state: Mapping[str, Any]) -> int:
    """How often it was started again."""
    return int(state.get("NumRestarts", 0))


def _is_loading_again(state: Mapping[str, Any]) -> bool:
    """Has it been started again, and is its constructor at work?"""
    return state.get("State") == "RESTARTING" and _has_process(state)


def _state_of(actor: Any) -> dict[str, Any]:
    """What Ray's head knows of it. Ray's own list of actors needs its dashboard."""
    found: dict[str, Any] = ray._private.state.actors(actor._actor_id.hex())
    return found
