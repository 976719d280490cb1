# SPDX-License-Identifier: Apache-2.0
"""A wrong RAY_ADDRESS is told in seconds: Ray alone tries for minutes."""

import socket
from functools import partial
from threading import Thread

import pytest

from tasks.actors import cluster
from tasks.actors.cluster import ray_cluster
from tasks.actors.ray_address import ClusterError, require_listener
from tasks.config.trainer import RayConfig


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"  # bound, and nobody listens
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(cluster, "require_listener", partial(require_listener, seconds=0.1))
        said = rf"nobody answers at RAY_ADDRESS {address} \(.*refused\): start the cluster"
        with pytest.raises(ClusterError, match=said), ray_cluster(RayConfig()):
            pass
        with pytest.raises(ClusterError, match="ray://127"):
            require_listener(f"ray://{address}", 0.1)
    with pytest.raises(ClusterError, match=r"no-such-host\.invalid:6379"):
        require_listener("no-such-host.invalid:6379", 0.1)
    with pytest.raises(ClusterError, match=":99999"):
        require_listener("127.0.0.1:99999", 0.1)


@pytest.mark.parametrize("answer", [bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"HTTP/1.1 400 Bad Request", None])
def test_somebody_there(answer: bytes | None) -> None:
    """Ray's head answers as HTTP/2 does; Ray would wait for minutes for one that is silent, or something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while answer is not None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None and answer[3] == 4:
            require_listener(address, 600)
        else:
            said = r"timed out|no answer" if answer is None else "somebody listens who is not Ray"
            with pytest.raises(ClusterError, match=said):
                require_listener(address, 0.5 if answer is None else 5)
    require_listener("auto")
