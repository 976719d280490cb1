# SPDX-License-Identifier: Apache-2.0
"""What is written behind a run is written in order, and what fails is the last and is never silent."""

import errno
import gc
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models.errors import DoubleflowError
from tasks.cli.terminal import sentence
from tasks.system import behind as module
from tasks.system.behind import Behind
from tasks.system.files import put_in_place

FLOW: ContextVar[str] = ContextVar("flow", default="none")


class Payload:
    """What a work holds on to."""


def fail() -> None:
    raise OSError("the disk is gone")


def test_works_are_done_in_order_while_their_giver_goes_on_and_see_its_context() -> None:
    done, go_on = [], threading.Event()
    FLOW.set("this one")
    behind = Behind()
    FLOW.set("a later one")
    held = behind.submit(go_on.wait, 60)
    behind.submit(lambda: done.append(("second", FLOW.get())))
    assert not held.done()
    assert done == []
    go_on.set()
    assert behind.wait(behind.submit(lambda: len(done))) == 1
    assert done == [("second", "this one")]


def test_nothing_is_begun_behind_what_failed_and_its_error_is_raised_by_whatever_comes_next() -> None:
    done, go_on = [], threading.Event()
    behind = Behind()
    behind.submit(go_on.wait, 60)
    behind.submit(fail)
    record = behind.submit(done.append, "a record that relies on it")
    go_on.set()
    for ask in (lambda: behind.wait(record), behind.settle, behind.check, lambda: behind.submit(done.append, "more")):
        with pytest.raises(OSError, match="the disk is gone"):
            ask()
    assert done == []


def test_what_a_run_and_its_writing_both_met_is_told_once() -> None:
    class Away(DoubleflowError, RuntimeError):
        pass

    def away() -> None:
        raise Away("the server is gone for 20 s")

    behind = Behind()
    behind.submit(away)
    with pytest.raises(Away, match="21 s") as raised, behind.settled():
        raise Away("the server is gone for 21 s")
    assert not getattr(raised.value, "__notes__", [])

    class Damaged(DoubleflowError, RuntimeError):
        pass

    with pytest.raises(Damaged) as other, behind.settled():
        raise Damaged("a checkpoint is no checkpoint")
    assert "the server is gone for 20 s" in other.value.__notes__[0], "what ended the run is something else"


@pytest.mark.parametrize("own", [False, True])
def test_an_end_waits_for_all_and_a_failing_one_keeps_its_own_error(own: bool) -> None:
    behind, done = Behind(), []
    with behind.settled():
        behind.submit(done.append, "written")
    assert done == ["written"]
    if own:
        behind.submit(fail)
        with pytest.raises(ZeroDivisionError) as raised, behind.settled():
            raise ZeroDivisionError
        assert "the disk is gone" in raised.value.__notes__[0]
    else:
        behind.submit(fail)
        with pytest.raises(OSError, match="the disk is gone") as gone, behind.settled():
            behind.settle()
        assert not hasattr(gone.value, "__notes__"), "it is not told of itself"


def test_what_a_work_holds_is_let_go_when_it_is_done() -> None:
    """An iteration's samples are not kept until the next one's are written."""
    behind, payload = Behind(), Payload()
    there = weakref.ref(payload)
    future = behind.submit(lambda kept: None, payload)
    behind.wait(future)
    del payload, future
    behind.submit(gc.collect)
    behind.settle()
    assert there() is None


def test_a_long_wait_is_spent_in_what_holds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an MLflow server that is away: the run's GPUs are given up until it is back, and an end does not wait."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    behind, away, asleep = Behind(), threading.Event(), []

    @contextmanager
    def sleeping() -> Iterator[None]:
        asleep.append("begun")
        away.clear()
        yield
        asleep.append("ended")

    away.set()
    behind.held_up = lambda: sleeping() if away.is_set() else None

    def ask() -> None:
        while away.is_set():
            pass

    behind.submit(ask)
    behind.settle()
    assert asleep == ["begun", "ended"]
    away.set()
    behind.submit(lambda: threading.Event().wait(0.5))
    with pytest.raises(KeyboardInterrupt) as raised, behind.settled():
        raise KeyboardInterrupt
    assert not hasattr(raised.value, "__notes__"), "the same command does it again"
    assert asleep == ["begun", "ended"], "who is to end in seconds puts nothing to sleep"


def test_what_held_a_wait_up_is_left_once_it_is_over_or_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are had again while the rest is still being written."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    behind, away, awake, asked = Behind(), [True] * 3, threading.Event(), []

    @contextmanager
    def sleeping() -> Iterator[None]:
        yield
        awake.set()

    behind.held_up = lambda: sleeping() if away and away.pop() else None
    assert behind.wait(behind.submit(awake.wait, 30)), "it was left while the work went on"

    done = behind.submit(lambda: time.sleep(0.1))
    behind.held_up = lambda: asked.append(done.done()) or (sleeping() if sum(asked) < 3 else None)
    behind.wait(done)
    assert sum(asked) <= 1, "nobody asks any more once the work is done"


@contextmanager
def closing_with(work: Callable[[], None]) -> Iterator[None]:
    """Calls it after the block, however that ends."""
    try:
        yield
    finally:
        work()


def heard(behind: Behind) -> bool:
    """Has it heard of a signal?"""
    try:
        behind.check()
    except KeyboardInterrupt:
        return True
    return False


def test_after_a_signal_an_end_waits_for_seconds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a checkpoint that a trainer writes when its update is done: it is begun again by the same command."""
    monkeypatch.setattr(module, "STOPPED_WAIT_S", 0.05)
    behind, done, begun = Behind(), [], threading.Event()

    def write() -> None:
        begun.set()
        while not heard(behind):
            time.sleep(0.01)
        done.append("written")

    def take_away() -> None:
        assert done == ["written"], "the work that is under way has ended, and the next one is not begun"

    behind.submit(write)
    assert begun.wait(60)
    behind.submit(done.append, "the next one")
    with pytest.raises(KeyboardInterrupt) as raised, closing_with(take_away), behind.left(), behind.settled():
        raise KeyboardInterrupt
    assert not hasattr(raised.value, "__notes__"), "the same command does it again"
    assert done == ["written"]


def test_a_failing_end_waits_longer_than_a_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error leaves time for what is under way to be written; a signal may leave none."""
    monkeypatch.setattr(module, "STOPPED_WAIT_S", 0.0)
    behind, done = Behind(), []

    def write() -> None:
        time.sleep(0.2)
        done.append("written")

    behind.submit(write)
    with pytest.raises(ZeroDivisionError) as raised, behind.settled():
        raise ZeroDivisionError
    assert done == ["written"]
    assert not hasattr(raised.value, "__notes__"), "nothing is lost"


def test_what_a_failing_end_does_not_wait_for_is_told_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAILING_WAIT_S", 0.0)
    behind, go_on = Behind(), threading.Event()
    behind.submit(go_on.wait, 60)
    with pytest.raises(ZeroDivisionError) as raised, behind.settled():
        raise ZeroDivisionError
    go_on.set()
    assert "takes too long" in raised.value.__notes__[0]


def test_a_full_disk_is_told_once_and_in_a_sentence() -> None:
    """The run's own files and those that are written behind it meet it together, and an actor's comes through Ray."""
    from ray.exceptions import RayTaskError  # here: this module's tests start no Ray

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/state.json")

    def ended_by(work: Callable[[], object]) -> None:
        with (behind := Behind()).settled():
            behind.submit(full)
            work()

    with pytest.raises(OSError, match="No space") as raised:
        ended_by(full)
    assert not getattr(raised.value, "__notes__", [])
    told = "a disk is full: [Errno 28] No space left on device: '/runs/state.json'"
    assert sentence(raised.value) == told
    from_actor = RayTaskError("save", "its frames", raised.value).as_instanceof_cause()
    assert sentence(from_actor) == told
    with pytest.raises(ZeroDivisionError) as other:
        ended_by(lambda: 1 / 0)
    assert "No space left" in other.value.__notes__[0], "what ended the run is something else"
    assert sentence(other.value) is None


def test_where_a_write_finds_no_room_is_said(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names the file that cannot be opened, not the one that cannot grow."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    nameless = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert sentence(nameless) == f"a disk is full: {nameless} ({small_disk} has 1 MB left)"


def copied_by_shutil(folder: Path) -> None:
    """A folder, as an export's parts that are not trained."""
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "weights").write_bytes(bytes(2**21))
        shutil.copytree(source, folder)


def saved_by_numpy(file: Path) -> None:
    """Into a file, whose name numpy would change."""
    with file.open("wb") as stream:
        np.save(stream, np.zeros(2**18))


@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write_bytes(bytes(2**21)),
        saved_by_numpy,
        lambda file: save_file({"weights": torch.zeros(2**19)}, file),
        copied_by_shutil,
    ],
    ids=["python", "numpy", "safetensors", "shutil"],
)
def test_whoever_fills_a_disk_it_is_said_which(small_disk: Path, write: Callable[[Path], object]) -> None:
    """Not the one that has the least room of those that every run writes into: a run's folder may be on another."""
    place = small_disk / "kept.npy"
    with pytest.raises(OSError, match="No space left") as raised, put_in_place(place) as aside:
        write(aside)
    assert sentence(raised.value) == f"a disk is full: [Errno 28] No space left on device: '{place}'"
    assert not [*small_disk.iterdir()]


def test_a_folder_that_nothing_may_be_written_into_is_told_in_a_sentence() -> None:
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS), "/runs/checkpoints")
    told = "a file or folder cannot be used: [Errno 30] Read-only file system: '/runs/checkpoints'"
    assert sentence(refused) == told
    assert sentence(OSError(errno.EPERM, os.strerror(errno.EPERM))) is None, "of no file: a defect, which has frames"
