# SPDX-License-Identifier: Apache-2.0
"""The server that Prefect has started for a command is there as long as the command is, whatever ends it before.

A batch system that stops a job, as Slurm's `scancel` does, tells all of its processes: the server too, and the command
has still to say how its flow run ended. Prefect would ask an address at which nobody is for two minutes.
"""

import atexit
import logging
import signal
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

log = logging.getLogger(__name__)

OF_A_TERMINAL = frozenset({signal.SIGINT, signal.SIGHUP})
"""Blocked where the server is started, which inherits that: it is to be there until the command has ended."""
LOOK_SECONDS = 0.5
"""Between two looks at whether it is there."""


def keep_temporary_server() -> None:
    """Have it started again, at its address and with its data, whenever it ends before this process does."""
    from prefect.server.api.server import SubprocessASGIServer

    ends = Event()
    Thread(target=_keep, args=(SubprocessASGIServer(), ends), daemon=True).start()
    atexit.register(ends.set)  # called before Prefect's own, which stops the server


def _keep(server: "SubprocessASGIServer", ends: Event) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
    while not ends.wait(LOOK_SECONDS):
        process = server.server_process
        if process is None:
            return
        if process.poll() is None or ends.wait(LOOK_SECONDS) or server.server_process is not process:
            continue  # it is there, or was stopped and is forgotten a moment later
        log.warning("Prefect's temporary server has ended (%d) and is started again", process.returncode)
        server.running = False
        try:
            server.start()
        except Exception as error:  # its port is another's now, or it does not begin: the flow's next step tells it
            log.warning("Prefect's temporary server does not start again: %s", error)
            return
        atexit.register(ends.set)  # Prefect has registered its own anew
