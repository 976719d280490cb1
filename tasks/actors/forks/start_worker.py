# SPDX-License-Identifier: Apache-2.0
"""Starts a Ray worker in place of python: as a fork of the process that has done the imports, else as python would.

    python -P start_worker.py SOCKET worker.py ARGUMENT ...

Ray starts this program for every worker, which tells Ray its own process id. So once the fork goes on as the worker,
this program has nothing left to do.
"""

import json
import os
import resource
import socket
import sys

WAIT_SECONDS = 30.0
"""For a fork, while the process that forks still imports. Ray gives up a worker that says nothing for 60."""
STREAMS = (0, 1, 2)


def main(place: str, *arguments: str) -> None:
    """Hand the worker over to a fork, or become it."""
    if not is_forked(place, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


def is_forked(place: str, arguments: tuple[str, ...]) -> bool:
    """Does a fork go on as the worker? It begins once both know: one that nobody waits for any more ends."""
    asked = json.dumps(of_this_process() | {"arguments": arguments}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_SECONDS)
        try:
            connection.connect(place)
            socket.send_fds(connection, [len(asked).to_bytes(4)], STREAMS)
            connection.sendall(asked)
            if not connection.recv(1):
                return False
            connection.sendall(b"go")
        except OSError:
            return False
    return True


def of_this_process() -> dict[str, object]:
    """What a process inherits, and python makes of it."""
    umask = os.umask(0)  # it can be read by setting it alone
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    return {
        "executable": sys.executable,
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits()},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": [*os.sched_getaffinity(0)],
        "oom_score_adj": oom_score_adj,
    }


def limits() -> list[str]:
    """Names of the limits that a process may have here."""
    return [name for name in dir(resource) if name.startswith("RLIMIT_")]


if __name__ == "__main__":
    main(*sys.argv[1:])
