# SPDX-License-Identifier: Apache-2.0
"""A `python` for the commands of other programs, whose processes begin with their imports done.

A stage of DVC is a command, `python -m ...`: an interpreter that imports torch, diffusers and the OCR for five seconds,
and computes for one. Here it is a fork of the process of `forked.py`, with the folder, environment and standard streams
of the command. The project is imported from its own path, as by python.
"""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from tests.support.forked import Program, Streams

CLIENT = Path(__file__).with_name("ask_for_fork.py")


@contextmanager
def forked_python() -> Iterator[Path]:
    """The command, until the block ends; its folder may stand first on PATH."""
    with TemporaryDirectory(prefix="python-") as name, socket.socket(socket.AF_UNIX) as listener:
        place, command = Path(name) / "asks", Path(name) / "python"
        listener.bind(str(place))
        listener.listen()
        asks = shlex.join([sys.executable, "-IS", str(CLIENT), str(place)])
        command.write_text(f'#!/bin/sh\nexec {asks} "$@"\n')
        command.chmod(0o700)
        Thread(target=_accept, args=(listener,), daemon=True).start()
        yield command
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):  # at the end
        while True:
            Thread(target=_serve, args=(listener.accept()[0],), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """One fork; it does not outlive the command that asks for it."""
    with connection:
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as sent:
            asked = json.loads(sent.read(int.from_bytes(head, "big")))
        program = Program(asked["arguments"], Path(asked["folder"]), asked["environment"], Streams(streams))
        for stream in streams:
            os.close(stream)
        if connection in wait([connection, program.sentinel]):
            program.kill()
        with suppress(BrokenPipeError):
            connection.sendall(str(program.wait()).encode())
