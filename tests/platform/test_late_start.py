# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster whose daemon does not come up in time, as on a machine that is too busy for it, or comes up late."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

from tasks.actors import late_daemons
from tasks.actors.cluster import ClusterError, ray_cluster
from tasks.config.trainer import RayConfig
from tasks.system.processes import runs

RAYS_OWN = 30.0
"""Seconds that Ray waits by itself."""


def hold_the_daemon(over: threading.Event, held: list[psutil.Process], seconds: float | None) -> None:
    """Hold Ray's raylet of this process as soon as it is there, for so long or for good."""
    while not over.is_set() and not held:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == "raylet" and runs(child):  # not that of the test before
                    child.suspend()
                    held.append(child)
        over.wait(0.005)
    if seconds is not None and not over.wait(seconds):
        held[0].resume()


@contextmanager
def held_daemon(seconds: float | None) -> Iterator[list[psutil.Process]]:
    over, held = threading.Event(), list[psutil.Process]()
    watch = threading.Thread(target=hold_the_daemon, args=(over, held, seconds))
    watch.start()
    try:
        yield held
    finally:
        over.set()
        watch.join()


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the test alone."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield


def test_a_daemon_that_does_not_come_is_told_in_a_sentence_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_daemons, "LATEST_SECONDS", 0)
    with (
        held_daemon(None) as held,
        pytest.raises(ClusterError, match="Ray did not start on this machine within its time"),
        ray_cluster(RayConfig(num_cpus=1, forked_workers=False)),
    ):
        pass
    assert [runs(process) for process in held] == [False]


def test_one_that_is_later_than_ray_waits_is_waited_for() -> None:
    began = time.monotonic()
    with held_daemon(RAYS_OWN + 3) as held, ray_cluster(RayConfig(num_cpus=1, forked_workers=False)):
        assert time.monotonic() - began > RAYS_OWN
        assert len(ray.nodes()) == 1
    assert [runs(process) for process in held] == [False]


@pytest.mark.slow  # Ray waits for its own daemon, which has ended, for half a minute
def test_a_full_disk_of_rays_files_is_said_and_which(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="r-") as short:  # the names of Ray's sockets are to be short
        (link := Path(short) / "d").symlink_to(small_disk)
        monkeypatch.setenv("RAY_TMPDIR", str(link))
        (small_disk / "another's").write_bytes(bytes(2**20 - 2**16))
        with (
            pytest.raises(OSError, match="No space left") as raised,
            ray_cluster(RayConfig(num_cpus=1, forked_workers=False)),
        ):
            pass
    assert raised.value.filename.startswith(str(link))
