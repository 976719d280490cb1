# SPDX-License-Identifier: Apache-2.0
"""Whether somebody listens at RAY_ADDRESS, found out without Ray, whose import takes a second and whose no minutes."""

import os
import socket
import threading
import time

from models.errors import DoubleflowError

ANSWER_SECONDS = 8.0
"""For somebody to listen there; Ray itself goes on trying for minutes, and does not heed SIGTERM meanwhile."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of HTTP/2 begins, as Ray's are, with settings that are empty (RFC 9113, 3.4)."""
SETTINGS = 4
"""The kind of the frame with which a server answers it, in the frame's fourth byte."""


class ClusterError(DoubleflowError, RuntimeError):
    """The cluster cannot hold the run."""


def check_ray_address() -> None:
    """Where RAY_ADDRESS is set, somebody listens there. Raises ClusterError."""
    if address := os.environ.get("RAY_ADDRESS"):
        require_listener(address)


def require_listener(address: str, seconds: float = ANSWER_SECONDS) -> None:
    """Wait until somebody listens at `host:port` or `ray://host:port`; an address of another kind passes.

    Raises:
        ClusterError: nobody does within the time, or the host has no address.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    deadline, reason = time.monotonic() + seconds, ""
    while not reason or time.monotonic() < deadline:
        reason = _refusal(host.strip("[]"), int(port), deadline)
        if not reason:
            return
        time.sleep(max(0.0, min(1.0, deadline - time.monotonic())))
    raise ClusterError(
        f"nobody answers at RAY_ADDRESS {address} ({reason}): start the cluster, correct the address, or unset "
        "RAY_ADDRESS for a cluster of the run's own"
    )


def _refusal(host: str, port: int, deadline: float) -> str:
    """Why no connection is made; empty where one is. A name is looked up in a thread: a name server may be silent."""
    answers: list[str] = []

    def connect() -> None:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())) as connection:
                answers.append(_strangeness(connection))
        except (OSError, OverflowError) as error:
            answers.append(str(error))

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(max(0.1, deadline - time.monotonic()))
    return answers[0] if answers else "no answer"


def _strangeness(connection: socket.socket) -> str:
    """Why it is not Ray who listens; empty where it may be. What is encrypted is left to Ray."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return ""
    connection.sendall(GREETING)
    answer = connection.recv(9)
    return "" if answer[3:4] == bytes([SETTINGS]) else "somebody listens who is not Ray"
