# SPDX-License-Identifier: Apache-2.0
"""Waiting for Ray, as SIGTERM can end it.

Ray waits in C++. Of what a signal's handler raises meanwhile it passes on KeyboardInterrupt at once; anything else, as
Prefect's TerminationSignal, it keeps until the wait is over, and makes a SystemError of it. An update takes minutes. So
the driver waits in short pieces, with `get` and `wait` in place of `ray.get` and `ray.wait`.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from tasks.system.signals import passed_on

PIECE_SECONDS = 0.2


def get(answers: Any, seconds: float = float("inf")) -> Any:
    """`ray.get`: the first error of any of them is raised as soon as it is there; GetTimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            with passed_on():
                return ray.get(answers, timeout=PIECE_SECONDS)
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError) or time.monotonic() >= until:  # raised where it ran, and brought here
                raise


def wait(answers: Sequence[ray.ObjectRef], count: int = 1) -> list[ray.ObjectRef]:
    """`ray.wait`: those that are there, once `count` are; a failed one is there, too."""
    while True:
        with passed_on():
            ready, _ = ray.wait(list(answers), num_returns=len(answers), timeout=0)
            if len(ready) >= count:
                return ready
            ray.wait(list(answers), num_returns=count, timeout=PIECE_SECONDS)
