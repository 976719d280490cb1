# SPDX-License-Identifier: Apache-2.0
"""How often a flow run says that it lives, and how long a silence means that it does not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.system.access import TEMPORARY_SERVER

FREQUENCY = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
HEARTBEATS = {FREQUENCY: "30"}
"""Prefect's setting in an environment; no run can be quicker."""
SILENT_SECONDS = 60
"""Since the last heartbeat: a run that is killed is known to be dead within as many."""


@contextmanager
def heartbeats() -> Iterator[None]:
    """The flow runs of the block have heartbeats as often as `make up`'s server expects.

    They have none on a server that a command has started for itself: nobody listens there, and at each flow run's end
    Prefect would wait for the second that the thread of its heartbeats sleeps.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    os.environ.setdefault(FREQUENCY, HEARTBEATS[FREQUENCY])
    refresh_global_settings_context()
    unheard = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if TEMPORARY_SERVER in os.environ else {}
    with temporary_settings(updates=unheard):
        yield
