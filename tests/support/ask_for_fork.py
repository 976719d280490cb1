# SPDX-License-Identifier: Apache-2.0
"""Stands in python's place where a fork of a process that has done the imports is to run the command instead.

    python -IS ask_for_fork.py SOCKET -m MODULE ARGUMENT ...

It is there as long as the fork, and ends as that does; see `forked_python.py`.
"""

import json
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)


def main(place: str, *arguments: str) -> None:
    """Have a fork run a module or code; anything else is python's own."""
    if arguments[:1] not in (("-m",), ("-c",)):
        os.execv(sys.executable, [sys.executable, *arguments])
    asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    code = answer(place, json.dumps(asked).encode())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def answer(place: str, asked: bytes) -> int:
    """The fork's exit code, negative for a signal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [len(asked).to_bytes(4, "big")], STREAMS)
        connection.sendall(asked)
        code = connection.recv(16)
    if not code:
        sys.exit("whoever makes the forks has ended")
    return int(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
