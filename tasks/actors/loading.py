# SPDX-License-Identifier: Apache-2.0
"""Waiting for actors to load their models, which one may never do: a download that hangs, a file system that is gone.

Ray waits for ever. An actor that has no process yet is left to it: it waits for room on the cluster, behind other runs.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from models.errors import DoubleflowError
from tasks.actors.waiting import get, wait

FIELD = "ray_init.start_timeout_s"
LOOK_SECONDS = 1.0


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
    while True:
        try:
            found: list[Any] = get(list(answers), min(LOOK_SECONDS, seconds))
            return found
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # raised where it ran, and brought here
                raise
        answered = wait(answers, 0)
        late = [number for number, answer in enumerate(answers) if answer not in answered]
        now = time.monotonic()
        since |= {number: now for number in late if number not in since and _has_process(actors[number])}
        hung = [number for number in late if now - since.get(number, now) >= seconds]
        if hung:
            for number in hung:
                ray.kill(actors[number])
            told = ", ".join(names[number] for number in hung)
            raise NotLoaded(
                f"{told}: not loaded within {FIELD} {seconds:g} s; see that what is loaded can be reached from there, "
                "or allow more"
            )


def _has_process(actor: Any) -> bool:
    """Else it waits for room. Ray's own list of actors needs its dashboard."""
    return bool(ray._private.state.actors(actor._actor_id.hex()).get("Pid"))
