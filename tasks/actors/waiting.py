# SPDX-License-Identifier: Apache-2.0
"""Waiting for Ray, as SIGTERM can end it.

Ray waits in C++. Of what a signal's handler raises meanwhile it passes on KeyboardInterrupt at once; anything else, as
Prefect's TerminationSignal, it keeps until the wait is over, and makes a SystemError of it. An update takes minutes. So
the driver waits in short pieces, with `get` and `wait` in place of `ray.get` and `ray.wait`.

At the end of a piece Ray gives up what it has received of an object that another machine holds, and the next piece
begins anew: once there is nothing to wait for but the way here, the pieces grow.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from tasks.actors.daemons import require_daemons
from tasks.system.signals import passed_on

PIECE_SECONDS = 0.2
"""While something is still computed."""


def get(answers: Any, seconds: float = float("inf"), beside: Sequence[ray.ObjectRef] = ()) -> Any:
    """`ray.get`: the first error of any of them is raised as soon as it is there; GetTimeoutError after `seconds`.

    Args:
        beside: not waited for, but an error of theirs is raised, too: it may be why the answers do not come. Their
            values are small, for they are brought here.

    Raises:
        ClusterError: a daemon of the cluster that this process has started has ended.
    """
    until, piece = time.monotonic() + seconds, PIECE_SECONDS
    while True:
        require_daemons()
        try:
            with passed_on():
                beside = unfinished(beside)
                piece = 2 * piece if _all_exist(answers) else PIECE_SECONDS
                return ray.get(answers, timeout=min(piece, max(0.0, until - time.monotonic())))
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError) or time.monotonic() >= until:  # raised where it ran, and brought here
                raise


def wait(answers: Sequence[ray.ObjectRef], count: int = 1) -> list[ray.ObjectRef]:
    """`ray.wait`: those that exist, on whatever machine, once `count` do; a failed one exists, too.

    Raises ClusterError as `get` does.
    """
    while True:
        require_daemons()
        with passed_on():
            ready = _existing(answers)
            if len(ready) >= count:
                return ready
            ray.wait(list(answers), num_returns=count, timeout=PIECE_SECONDS, fetch_local=False)


def come_first(answers: Sequence[ray.ObjectRef], others: Sequence[ray.ObjectRef]) -> bool:
    """Wait until all of `answers` or all of `others` exist, as `wait` does; do `answers`?"""
    while True:
        require_daemons()
        with passed_on():
            if _all_exist(answers):
                return True
            if _all_exist(others):
                return False
            awaited = [*answers, *others]
            one_more = min(len(_existing(awaited)) + 1, len(awaited))  # or all, since they were looked at
            ray.wait(awaited, num_returns=one_more, timeout=PIECE_SECONDS, fetch_local=False)


def unfinished(begun: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Those that are still being computed; the error of one that has failed is raised."""
    done = _existing(begun)
    ray.get(done)
    return [one for one in begun if one not in done]


def _all_exist(answers: ray.ObjectRef | Sequence[ray.ObjectRef]) -> bool:
    """Are all of them computed, or have failed? Does not wait."""
    refs = [answers] if isinstance(answers, ray.ObjectRef) else list(dict.fromkeys(answers))
    return len(_existing(refs)) == len(refs)


def _existing(refs: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Those that are computed or have failed; none of them is brought here for it."""
    return ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
