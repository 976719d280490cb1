# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster whose daemon does not come up in time, as on a machine that is too busy for it, or comes up late."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

from tasks.actors import late_daemons
from tasks.actors.cluster import ClusterError, ray_cluster
from tasks.actors.daemons import require_daemons
from tasks.config.trainer import RayConfig
from tasks.system.processes import runs

RAYS_OWN = 30.0
"""Seconds that Ray waits by itself."""


def is_daemon(child: psutil.Process) -> bool:
    return child.name() == "raylet"


def is_agent(child: psutil.Process) -> bool:
    """The program that the daemon waits for."""
    return not is_daemon(child) and any(word.endswith("dashboard/agent.py") for word in child.cmdline())


def below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def hold(
    over: threading.Event,
    held: list[psutil.Process],
    seconds: float | None,
    is_meant: Callable[[psutil.Process], bool],
    before: set[psutil.Process],
    number: int,
) -> None:
    """Hold so many of Ray's processes below this one, but none of before, as soon as each is there: the last of them so
    long, or all for good."""
    while not over.is_set() and len(held) < number:
        for child in below() - before - {*held}:
            with suppress(psutil.Error):
                if is_meant(child):
                    child.suspend()
                    held.append(child)
        over.wait(0.005)
    if seconds is not None and not over.wait(seconds):
        held[-1].resume()


@contextmanager
def held_daemon(
    seconds: float | None, is_meant: Callable[[psutil.Process], bool] = is_daemon, number: int = 1
) -> Iterator[list[psutil.Process]]:
    over, held = threading.Event(), list[psutil.Process]()
    before = below()  # with the cluster that tests share
    watch = threading.Thread(target=hold, args=(over, held, seconds, is_meant, before, number))
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


def test_one_that_gives_up_is_started_again_as_long_as_there_is_time() -> None:
    """As on a host where its agent takes more than the 15 seconds that it waits for that, and then does so again."""
    with held_daemon(None, is_agent, 2) as held, ray_cluster(RayConfig(num_cpus=1, forked_workers=False)):
        assert len(held) == 2
        require_daemons()  # those that gave up are not missed
        assert len([node for node in ray.nodes() if node["Alive"]]) == 1
        assert [child.name() for child in psutil.Process().children() if is_daemon(child) and runs(child)] == ["raylet"]
    assert [runs(process) for process in held] == [False, False]


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
