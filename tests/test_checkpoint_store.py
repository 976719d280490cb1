"""Checkpoints are whole or not there: also when the disk is full, and with two processes at one run."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.checkpoint import CheckpointError, CheckpointStore, RunState, alone
from tasks.processes import ProcessIdentity

ROOT = Path(__file__).parent.parent
MEBIBYTE = 1 << 20
HOLD = """
import sys, time
from pathlib import Path
from tasks.checkpoint import alone

with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def state(iteration: int) -> RunState:
    return RunState(iteration, "config", "data", "run")


def writer(size: int):
    return lambda folder: (folder / "weights").write_bytes(os.urandom(size))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; it needs the right to mount one, which a container's root has."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(small_disk: Path) -> None:
    store = CheckpointStore(small_disk, keep=2)
    store.save(state(1), writer(MEBIBYTE // 2))
    with pytest.raises(OSError, match="No space left"):
        store.save(state(2), writer(MEBIBYTE))
    assert [path.name for path in small_disk.iterdir()] == ["iter_000001"]
    found, _ = CheckpointStore(small_disk, keep=2).latest("config", "data")
    assert found.iteration == 1
    store.save(state(2), writer(MEBIBYTE // 4))  # there is room again: nothing was left behind
    assert store.iterations() == [1, 2]


def test_the_next_save_and_the_end_wait_for_the_one_before(tmp_path: Path) -> None:
    store, go_on = CheckpointStore(tmp_path, keep=2), threading.Event()
    store.save_in_background(state(1), writer(10), lambda: go_on.wait(60) and None)
    assert store.iterations() == []
    assert [path.name for path in tmp_path.iterdir()] == [".writing-000001"]
    threading.Timer(0.2, go_on.set).start()
    store.save(state(2), writer(10))
    assert store.iterations() == [1, 2]
    with store.settled():
        store.save_in_background(state(3), writer(10), lambda: None)
    assert store.iterations() == [2, 3]


@pytest.mark.parametrize("end", ["next save", "end", "failing end"])
def test_an_error_in_the_background_is_raised_by_whatever_comes_next(tmp_path: Path, end: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), writer(10))

    def fail() -> None:
        raise OSError("the disk is gone")

    if end == "failing end":  # the run's own error stays, with a note
        store.save_in_background(state(2), writer(10), fail)
        with pytest.raises(ZeroDivisionError) as raised, store.settled():
            raise ZeroDivisionError
        assert "the disk is gone" in raised.value.__notes__[0]
    else:
        store.save_in_background(state(2), writer(10), fail)
        with pytest.raises(OSError, match="the disk is gone"):
            store.save(state(3), writer(10)) if end == "next save" else store.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["iter_000001"]


def test_a_run_has_one_process_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    owner = rf"another process works on .* \(pid {process.pid} on {re.escape(socket.gethostname())}\): end it first"
    for _ in range(2):  # who asks in vain leaves the record as it is
        with pytest.raises(CheckpointError, match=owner), alone(tmp_path):
            pass
    process.kill()
    process.wait()
    with alone(tmp_path):
        record = json.loads((tmp_path / ".lock").read_text())
        assert record.pop("host") == socket.gethostname()
        assert ProcessIdentity(**record).process() == psutil.Process()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As NFS 3 without its lock daemon answers."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    kind = subprocess.check_output(["df", "--output=fstype", tmp_path], text=True).split()[-1]
    sentence = rf"cannot be locked, .* file system {kind} at /.* says '{os.strerror(code)}'; .*default_local_dir"
    with pytest.raises(CheckpointError, match=sentence), alone(tmp_path):
        pass
