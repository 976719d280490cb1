# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster whose daemon does not come up in time, as on a machine that is too busy for it."""

import tempfile
import threading
from contextlib import suppress

import psutil
import pytest

from tasks.actors.cluster import ClusterError, ray_cluster
from tasks.config.trainer import RayConfig
from tasks.system.processes import runs


def stop_the_daemon(over: threading.Event, stopped: list[psutil.Process]) -> None:
    """Hold Ray's raylet of this process as soon as it is there."""
    while not over.is_set() and not stopped:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == "raylet":
                    child.suspend()
                    stopped.append(child)
        over.wait(0.005)


@pytest.mark.slow
def test_a_daemon_that_is_late_is_told_in_a_sentence_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    over, stopped = threading.Event(), list[psutil.Process]()
    watch = threading.Thread(target=stop_the_daemon, args=(over, stopped))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        watch.start()
        try:
            with (
                pytest.raises(ClusterError, match="Ray did not start on this machine within its time"),
                ray_cluster(RayConfig(num_cpus=1, forked_workers=False)),
            ):
                pass
        finally:
            over.set()
            watch.join()
    assert [runs(process) for process in stopped] == [False]
