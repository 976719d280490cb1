"""Checkpoints are whole or not there: also when the disk is full, and with two processes at one run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.checkpoint import CheckpointError, CheckpointStore, RunState, alone

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


def test_a_run_has_one_process_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match="another process works on"), alone(tmp_path):
        pass
    process.kill()
    process.wait()
    with alone(tmp_path):
        pass
