# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are whole or not there: also when the disk is full, and with two processes at one run."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tasks.records.run_lock import run_lock
from tasks.records.run_store import CheckpointError, CheckpointStore, RunState, verify
from tasks.system.files import READERS
from tasks.system.processes import ProcessIdentity

ROOT = Path(__file__).parents[3]
MEBIBYTE = 1 << 20
HOLD = """
import sys, time
from pathlib import Path
from tasks.records.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def state(iteration: int) -> RunState:
    return RunState(iteration, "config", "data", "run")


def writer(size: int):
    return lambda folder: (folder / "weights").write_bytes(os.urandom(size))


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
    with store.behind.settled():
        store.save_in_background(state(3), writer(10), lambda: None)
    assert store.iterations() == [2, 3]


def test_the_trainer_begins_no_checkpoint_before_the_last_one_is_whole(tmp_path: Path) -> None:
    """Its ranks write one at a time; and they begin none where something that was being written has failed."""
    store, go_on, seen = CheckpointStore(tmp_path), threading.Event(), []

    def begin(folder: Path) -> None:
        writer(10)(folder)
        seen.append(store.iterations())

    store.save_in_background(state(1), begin, lambda: go_on.wait(60) and None)
    threading.Timer(0.2, go_on.set).start()
    store.save_in_background(state(2), begin, lambda: None)
    store.settle()
    assert seen == [[], [1]]
    with pytest.raises(ZeroDivisionError):
        store.behind.wait(store.behind.submit(lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        store.save_in_background(state(3), begin, lambda: None)
    assert seen == [[], [1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_000001", "iter_000002"]


def test_all_that_is_written_in_the_background_is_written_within_the_context_given_for_it(tmp_path: Path) -> None:
    """Which counts its seconds: from the wait for the trainer's files to the checkpoint in its place."""
    store, seen = CheckpointStore(tmp_path), []

    @contextmanager
    def within() -> Iterator[None]:
        seen.append(("begun", store.iterations()))
        yield
        seen.append(("ended", store.iterations()))

    store.save_in_background(state(1), writer(10), lambda: seen.append(("written", store.iterations())), within)
    store.settle()
    assert seen == [("begun", []), ("written", []), ("ended", [1])]


@pytest.mark.parametrize("end", ["next save", "end", "failing end"])
def test_an_error_in_the_background_is_raised_by_whatever_comes_next(tmp_path: Path, end: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), writer(10))

    def fail() -> None:
        raise OSError("the disk is gone")

    if end == "failing end":  # the run's own error stays, with a note
        store.save_in_background(state(2), writer(10), fail)
        with pytest.raises(ZeroDivisionError) as raised, store.behind.settled():
            raise ZeroDivisionError
        assert "the disk is gone" in raised.value.__notes__[0]
    else:
        store.save_in_background(state(2), writer(10), fail)
        with pytest.raises(OSError, match="the disk is gone"):
            store.save(state(3), writer(10)) if end == "next save" else store.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["iter_000001"]


def test_what_a_killed_save_left_is_removed_and_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".writing-000003" / "trainer").mkdir(parents=True)
    (tmp_path / ".writing-000003" / "trainer" / "weights").write_bytes(b"half")
    assert CheckpointStore(tmp_path).iterations() == []
    assert list(tmp_path.iterdir()) == []


def test_one_changed_byte_is_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    file = store.save(state(2), writer(100)) / "trainer" / "weights"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"iter_000002 is damaged \(weights\): remove the folder to go on"):
        store.load(2, "config", "data")


@pytest.mark.parametrize(
    ("harm", "wrong"),
    [
        (lambda folder: os.truncate(folder / "1", 99), "1"),
        (lambda folder: (folder / "0").unlink(), "0"),
        (lambda folder: (folder / "0").rename(folder / "9"), "0, 9"),
        (lambda folder: (folder / "2").write_bytes((folder / "1").read_bytes()), "2"),
    ],
)
def test_a_file_that_is_cut_off_missing_or_anothers_is_damage(
    tmp_path: Path, harm: Callable[[Path], object], wrong: str
) -> None:
    """Of as many ranks' files as are not all digested at once."""
    store = CheckpointStore(tmp_path)

    def write(folder: Path) -> None:
        for rank in range(2 * READERS):
            (folder / str(rank)).write_bytes(os.urandom(100))

    harm(store.save(state(2), write) / "trainer")
    with pytest.raises(CheckpointError, match=rf"iter_000002 is damaged \({wrong}\): remove the folder to go on"):
        store.latest("config", "data")


of_another_run = pytest.mark.parametrize(
    ("config", "data", "complaint"),
    [("another", "data", "by another config"), ("config", "another", "from other prompts, embeddings or pairs")],
)


@of_another_run
def test_a_checkpoint_of_another_config_or_other_data_is_refused(
    tmp_path: Path, config: str, data: str, complaint: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(2), writer(10))
    with pytest.raises(CheckpointError, match=f"iter_000002 was made {complaint}: .*give the run another trainer.ex"):
        store.latest(config, data)


@of_another_run
def test_another_config_or_other_data_is_seen_by_the_record_alone(
    tmp_path: Path, config: str, data: str, complaint: str
) -> None:
    """In a moment, however large the files are; those that are missing are seen, too."""
    store = CheckpointStore(tmp_path)
    store.check_newest(config, data)
    store.save(state(1), writer(10))
    newest = store.save(state(2), writer(10)) / "trainer" / "weights"
    os.truncate(newest, 9)
    store.check_newest("config", "data")
    store.check_newest(config, data, after=2)
    with pytest.raises(CheckpointError, match=f"iter_000002 was made {complaint}: .*give the run another trainer.ex"):
        store.check_newest(config, data)
    newest.unlink()
    with pytest.raises(CheckpointError, match=r"iter_000002 is damaged \(weights\): remove the folder"):
        store.check_newest("config", "data")


def test_a_checkpoint_of_an_older_version_says_nothing_of_the_base_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used and that is told; one that does say it is compared."""
    store = CheckpointStore(tmp_path)
    store.save(state(1), writer(10))
    found = store.latest("config", "data-weights")
    assert found is not None
    assert found[0].iteration == 1
    assert "whether it was made from these base weights is not checked" in caplog.text
    caplog.clear()
    store.save(RunState(2, "config", "data-weights", "run"), writer(10))
    assert store.latest("config", "data-weights") is not None
    assert not caplog.text
    with pytest.raises(CheckpointError, match="from other weights"):
        store.latest("config", "data-others")


def test_what_reads_otherwise_than_it_was_written_is_no_checkpoint(tmp_path: Path) -> None:
    """As of a disk that loses writes: this file's content is another at each read. The older checkpoint stays."""

    def write(folder: Path) -> None:
        (folder / "weights").symlink_to("/proc/sys/kernel/random/uuid")

    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), writer(10))
    with pytest.raises(CheckpointError, match=r"is damaged \(weights\)"):
        store.save(state(2), write)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_000001"]


def stray(path: Path, kind: str) -> None:
    if kind == "file":
        path.touch()
    elif kind == "empty folder":  # where a disk is not mounted
        path.mkdir()
    else:
        path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("kind", ["dangling link", "file", "empty folder"])
def test_a_newest_entry_that_is_no_checkpoint_is_an_error_and_costs_no_good_one(tmp_path: Path, kind: str) -> None:
    """Without a word the run would begin again, and its new checkpoints would be the ones to go."""
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest("config", "data") is None
    for iteration in (1, 2):
        store.save(state(iteration), writer(10))
    stray(tmp_path / "iter_000009", kind)
    with pytest.raises(CheckpointError, match=r"iter_000009.*remove (it|the folder) to go on without it$"):
        CheckpointStore(tmp_path, keep=2).latest("config", "data")
    for iteration in (3, 4):
        store.save(state(iteration), writer(10))
    assert store.iterations() == [3, 4, 9]
    store.save(state(9), writer(10))  # gives way, as an older checkpoint would
    assert store.latest("config", "data")[0] == state(9)
    assert store.iterations() == [4, 9]


@pytest.mark.parametrize("kind", ["dangling link", "file", "empty folder"])
def test_what_only_has_the_name_takes_no_checkpoints_place(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), writer(10))
    for iteration in (2, 3):
        stray(tmp_path / f"iter_{iteration:06d}", kind)
    store.save(state(4), writer(10))
    assert store.load(1, "config", "data")[0] == state(1)
    store.remove(through=3)
    assert store.iterations() == [4]


def test_the_checkpoint_just_saved_stays_whatever_is_newer(tmp_path: Path) -> None:
    """As where a run went on from an older one: those after it are not counted, and are not its to remove."""
    store = CheckpointStore(tmp_path, keep=1)
    for iteration in (7, 2, 3):
        store.save(state(iteration), writer(10))
    assert store.iterations() == [3, 7]


def test_a_checkpoint_that_lies_behind_a_link_is_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "here", keep=1)
    moved = store.save(state(1), writer(10)).rename(tmp_path / "moved")
    (tmp_path / "here/iter_000001").symlink_to(moved)
    assert store.latest("config", "data")[0] == state(1)
    store.save(state(2), writer(10))
    assert store.iterations() == [2]
    assert moved.is_dir(), "of a link only the link goes"


def refuse_to_remove(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Whole folders: as NFS does where a file in one is still read, or any system where another removes it, too.

    The first file of each goes before that is seen.
    """

    def refuse(folder: Path) -> None:
        next(path for path in Path(folder).rglob("*") if path.is_file()).unlink()
        raise OSError(code, os.strerror(code), str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.ENOENT])
def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """The new one is whole, and of the old one, half of which is gone, nothing has a checkpoint's name."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), writer(10))
    with monkeypatch.context() as refusing:
        refuse_to_remove(refusing, code)
        store.save_in_background(state(2), writer(10), lambda: None)
        store.behind.settle()
        assert verify(store.path(2)) == state(2)
        assert store.iterations() == [2]
        (told,) = [record.getMessage() for record in caplog.records]
        assert f"{os.strerror(code)}: '{tmp_path}/.old-000001'" in told
        CheckpointStore(tmp_path, keep=1)  # as the same command started again; it may not remove it, either
        assert len(caplog.records) == 2
        assert (tmp_path / ".old-000001").is_dir()
    store.save(state(3), writer(10))
    assert [path.name for path in tmp_path.iterdir()] == ["iter_000003"]
    assert len(caplog.records) == 2


def test_a_folder_that_cannot_be_renamed_stays_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several the others go; one that somebody else has removed by then is gone, which needs no word."""
    store, rename = CheckpointStore(tmp_path), Path.rename
    for iteration in (1, 2, 3):
        store.save(state(iteration), writer(10))

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "iter_000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        if path.name == "iter_000002":
            shutil.rmtree(path)
        return rename(path, target)

    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "rename", refuse)
        store.remove(through=3)
    assert store.iterations() == [1]
    assert verify(store.path(1)) == state(1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "iter_000001" in told
    store.remove(through=3)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_checkpoints_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="checkpoints is no folder, or a link to one that is not there: mount"):
        CheckpointStore(tmp_path / "checkpoints")


def test_other_names_are_nobodys(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(state(2), writer(10))
    others = ["iter_x", "iter_000002.bak", "iter_3", "iter_0000004", "iter_-00005", "notes", ".writing-notes"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".writing-x").touch()
    (tmp_path / ".writing-000003").touch()  # what a killed run leaves has this name
    (tmp_path / ".writing-000004").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.iterations() == [2]
    for iteration in (3, 1_000_000):
        store.save(state(iteration), writer(10))
    assert store.latest("config", "data")[0] == state(1_000_000)
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".writing-x", "iter_1000000"}


def changed_record(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**record, **changes}))


METRICS = {"loss": 0.1, "nan": float("nan"), "inf": float("inf"), "count": 3}


@pytest.mark.parametrize("change", [{"iteration": 1}, {"metrics": {"loss": 0.2}}, {"mlflow_run_id": "another"}])
def test_a_changed_record_is_found_by_its_own_digest(tmp_path: Path, change: dict[str, object]) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(RunState(2, "config", "data", "run", METRICS), writer(10))
    found = store.latest("config", "data")[0]
    assert {**found.metrics, "nan": 0} == {**METRICS, "nan": 0}
    changed_record(path, **change)
    with pytest.raises(CheckpointError, match=r"000002/state.json is damaged \(its digest is of another content\)"):
        store.latest("config", "data")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"iteration": 999}, "is of iteration 999, the folder's name of 2"),
        ({"iteration": 1}, "is of iteration 1, the folder's name of 2"),
        ({"iteration": "2"}, r"damaged \(iteration: .*integer"),
        ({"iteration": True}, r"damaged \(iteration: .*integer"),
        ({"metrics": None}, r"damaged \(metrics: "),
        ({"metrics": {"a": "b"}}, r"damaged \(metrics.a: "),
        ({"config_digest": 3}, r"damaged \(config_digest: "),
        ({"mlflow_run_id": None}, r"damaged \(mlflow_run_id: "),
        ({"more": 1}, r"damaged \(more: "),
        ({"files": None}, "it lists no files"),
        ({"files": []}, "it lists no files"),
        ({"format": 2}, "has format 2, this version reads 1"),
    ],
)
def test_a_record_without_a_digest_is_read_and_its_values_checked(
    tmp_path: Path, change: dict[str, object], complaint: str | None
) -> None:
    """As older versions wrote it."""
    store = CheckpointStore(tmp_path)
    path = store.save(state(2), writer(10))
    record = json.loads((path / "state.json").read_text())
    record.pop("record_sha256", None)
    (path / "state.json").write_text(json.dumps(record | change))
    if complaint is None:
        assert store.latest("config", "data")[0] == state(2)
    else:
        with pytest.raises(CheckpointError, match=f"iter_000002/state.json .*{complaint}"):
            store.latest("config", "data")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"iteration"', b"\xff", b'{"format": 1, "files": {}}', None]
)
def test_a_record_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    store = CheckpointStore(tmp_path)
    file = store.save(state(2), writer(10)) / "state.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"iter_000002/state.json .*: .*remove the folder to go on without it"):
        store.latest("config", "data")


def test_a_run_has_one_process_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    owner = rf"another process works on .* \(pid {process.pid} on {re.escape(socket.gethostname())}\): end it first"
    for _ in range(2):  # who asks in vain leaves the record as it is
        with pytest.raises(CheckpointError, match=owner), run_lock(tmp_path):
            pass
    process.kill()
    process.wait()
    with run_lock(tmp_path):
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
    with pytest.raises(CheckpointError, match=sentence), run_lock(tmp_path):
        pass
