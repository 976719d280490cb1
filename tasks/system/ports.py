# SPDX-License-Identifier: Apache-2.0
"""A port for a server that begins seconds after it was chosen."""

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

LOOPBACK = "127.0.0.1"
KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives of its own accord, to whoever asks for any and to each connection."""
AFTER_RAYS = 20000
"""Up to here Ray's workers listen."""


def free_port() -> int:
    """A port of loopback at which nobody listens, and that no connection is given until somebody does: a Ray cluster
    makes hundreds of them, and one could have any other port by then."""
    given = int(KERNELS.read_text().split()[0]) if KERNELS.is_file() else 0
    while True:
        # Where the kernel gives such low ones, too, any has to do.
        port = SystemRandom().randrange(AFTER_RAYS, given) if given > AFTER_RAYS else 0
        with suppress(OSError):  # it is taken: another one
            return bound(port)


def bound(port: int) -> int:
    """The port of loopback, once it was held for a moment. Raises OSError where it is taken, or barred."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))
        return int(probe.getsockname()[1])
