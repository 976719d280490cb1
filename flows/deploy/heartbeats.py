# SPDX-License-Identifier: Apache-2.0
"""How often a flow run says that it lives, and how long a silence means that it does not."""

import os

FREQUENCY = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
HEARTBEATS = {FREQUENCY: "30"}
"""Prefect's setting in an environment; no run can be quicker."""
SILENT_SECONDS = 60
"""Since the last heartbeat: a run that is killed is known to be dead within as many."""


def send_heartbeats() -> None:
    """Call it before the first flow of a process: its runs have heartbeats as often as `make up`'s server expects."""
    from prefect.context import refresh_global_settings_context

    os.environ.setdefault(FREQUENCY, HEARTBEATS[FREQUENCY])
    refresh_global_settings_context()
