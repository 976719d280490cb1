# SPDX-License-Identifier: Apache-2.0
"""A connection to a Prefect server that breaks at the worst moment."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

ENDS_RUN = re.compile(rb'POST \S*/flow_runs/[\w-]+/set_state .*"type":\s*"COMPLETED"', re.DOTALL)
CREATES_RUN = re.compile(rb"POST \S*/deployments/[\w-]+/create_flow_run .*\r\n\r\n\{", re.DOTALL)


@dataclass
class LostAnswers:
    """Hands bytes on both ways, but for the answers to some requests, each lost once.

    The server has done what was asked when the connection breaks, and a client asks again, as Prefect's does.

    Attributes:
        server: host and port of the server.
        port: where this listens, on loopback.
        requests: of those, as bytes of a connection, the answers are lost.
        lost: paths of the requests whose first answer was lost.
    """

    server: tuple[str, int]
    port: int
    requests: re.Pattern[bytes]
    lost: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        """Where a client finds the server."""
        return f"http://127.0.0.1:{self.port}"

    def serve(self, listener: socket.socket) -> None:
        """Until the listener is shut down."""
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve_one, args=(client,), daemon=True).start()

    def _serve_one(self, client: socket.socket) -> None:
        breaks = threading.Event()
        with client, socket.create_connection(self.server) as server:
            back = threading.Thread(target=self._hand_back, args=(server, client, breaks), daemon=True)
            back.start()
            said = b""
            with suppress(OSError):
                while part := client.recv(65536):
                    said = said[-65536:] + part
                    new = {asked[0].split()[1].decode() for asked in self.requests.finditer(said)} - self.lost
                    if new:
                        self.lost |= new
                        breaks.set()
                    server.sendall(part)
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _hand_back(self, server: socket.socket, client: socket.socket, breaks: threading.Event) -> None:
        with suppress(OSError):
            while part := server.recv(65536):
                if breaks.is_set():
                    break
                client.sendall(part)
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def lost_answers(host: str, port: int, requests: re.Pattern[bytes]) -> Iterator[LostAnswers]:
    """On a free port of loopback, during the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = LostAnswers((host, port), listener.getsockname()[1], requests)
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
