"""Checkpoints: complete, or not there.

A checkpoint is written aside, flushed, verified against the digests in its own record and then renamed into place;
a run killed at any moment leaves whole checkpoints and at most one folder that nobody reads. Written in the background,
it takes the same steps in a thread.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.errors import DoubleflowError
from tasks.clock import Stopwatch
from tasks.processes import ProcessIdentity
from tasks.update import TrainerGroup

RECORD = "state.json"
WEIGHTS = "trainer"
FORMAT = 1
FAILING_WAIT_S = 60.0


class CheckpointError(DoubleflowError, RuntimeError):
    """A checkpoint cannot be used."""


@dataclass(frozen=True)
class RunState:
    """What a run needs to go on, beside the trainer's own files.

    Attributes:
        iteration: the last one that is in the weights. It is also the data cursor and the window's state: both are
            functions of (seed, iteration).
        config_digest: of the config that made it.
        data_digest: of the prompts and embeddings it was made from.
        mlflow_run_id: the run that it continues.
        metrics: of the update that made the weights: MLflow has the iteration only after its validation.
        format: version of this record.
    """

    iteration: int
    config_digest: str
    data_digest: str
    mlflow_run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT


class CheckpointStore:
    """The checkpoints of one run, `folder`/iter_000010 and so on; or other files of its iterations.

    Args:
        folder: is created.
        keep: newest checkpoints that stay; None keeps all.
        content: folder of each checkpoint in which its files are, beside the record.
    """

    def __init__(self, folder: Path, keep: int | None = None, content: str = WEIGHTS):
        self.folder, self.keep, self.content = folder, keep, content
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("iter_")) for path in self.folder.glob("iter_*"))

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of that iteration is."""
        return self.folder / f"iter_{iteration:06d}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint; on any error nothing is left and the older ones stay.

        Args:
            state: its record. An older checkpoint of the same iteration gives way.
            write: writes the files (a trainer's) into the (existing) folder it is given.
        """
        self.settle()
        return self._finish(self._begin(state, write), state)

    def save_in_background(
        self, state: RunState, start_writing: Callable[[Path], None], wait_until_written: Callable[[], None]
    ) -> None:
        """The same in a thread of its own; the checkpoint is there once `settle` has returned.

        Args:
            state: its record.
            start_writing: returns when the trainer may go on.
            wait_until_written: returns when the trainer's files are complete; called in the thread.
        """
        self.settle()
        aside = self._begin(state, start_writing)
        self._under_way = self._thread.submit(self._finish, aside, state, wait_until_written)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the checkpoint that is being written, if there is one; its error is raised here.

        Raises:
            TimeoutError: it is not complete after so many seconds.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result(timeout_s)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Context whose end waits for what is being written: nobody ends the trainer before.

        After an error it waits for FAILING_WAIT_S at most: what failed may be the trainer, which answers no more.
        """
        try:
            yield
        except BaseException as error:
            try:
                self.settle(FAILING_WAIT_S)
            except Exception as of_checkpoint:
                error.add_note(f"the checkpoint that was being written is lost too: {of_checkpoint!r}")
            raise
        self.settle()

    def _begin(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """The folder aside with the files, or with their beginnings."""
        aside = self.folder / f".writing-{state.iteration:06d}"
        with _removed_on_error(aside):
            (aside / self.content).mkdir(parents=True)
            write(aside / self.content)
        return aside

    def _finish(self, aside: Path, state: RunState, wait_until_written: Callable[[], None] = lambda: None) -> Path:
        """The checkpoint in its place, once its files are complete."""
        with _removed_on_error(aside):
            wait_until_written()
            record = asdict(state) | {"files": _digests(aside / self.content)}
            (aside / RECORD).write_text(json.dumps(record, indent=1))
            _flush(aside)
            verify(aside, self.content)
            shutil.rmtree(self.path(state.iteration), ignore_errors=True)
            aside.rename(self.path(state.iteration))
            _flush_folder(self.folder)
        for old in self.iterations()[: -self.keep] if self.keep else []:
            shutil.rmtree(self.path(old))
        return self.path(state.iteration)

    def remove(self, through: int) -> None:
        """Remove the checkpoints of iterations up to that one."""
        for iteration in self.iterations():
            if iteration <= through:
                shutil.rmtree(self.path(iteration))

    def latest(self, config_digest: str, data_digest: str) -> tuple[RunState, Path] | None:
        """The newest checkpoint, see `load`; None if there is no checkpoint."""
        return self.load(self.iterations()[-1], config_digest, data_digest) if self.iterations() else None

    def load(self, iteration: int, config_digest: str, data_digest: str) -> tuple[RunState, Path] | None:
        """The record and the files' folder of one checkpoint; None if it is not there.

        Raises:
            CheckpointError: its files are not what its record says, or another config or other data made it.
        """
        folder = self.path(iteration)
        if not folder.is_dir():
            return None
        record = verify(folder, self.content)
        record.pop("files")
        state = RunState(**record)
        for what, stored, present in (
            ("by another config", state.config_digest, config_digest),
            ("from other prompts or embeddings", state.data_digest, data_digest),
        ):
            if stored != present:
                raise CheckpointError(f"{folder} was made {what}: give the run another trainer.experiment_name")
        return state, folder / self.content


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is created; the kernel gives it back when this process ends, however it ends.

    Who holds it, or held it last, is in its `.lock`: host, and pid, start and boot of the process.

    Raises:
        CheckpointError: another process holds it, or its file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process works on {folder}{_owner(lock)}: end it first, or wait for it"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be locked, which keeps a second process from it: its file system "
                f"{_file_system(folder)} says {error.strerror!r}; mount it with locks, or set "
                "trainer.default_local_dir to a folder of another one"
            ) from error
        lock.truncate(0)
        json.dump({"host": socket.gethostname()} | ProcessIdentity.of(os.getpid())._asdict(), lock)
        lock.flush()
        yield


def _owner(lock: TextIO) -> str:
    """What the holder has written of itself, in brackets; nothing where it is only about to."""
    lock.seek(0)
    try:
        owner = json.loads(lock.read())
        return f" (pid {owner['pid']} on {owner['host']})"
    except (ValueError, KeyError, TypeError):
        return ""


def _file_system(folder: Path) -> str:
    """Its kind and where it is mounted."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    nearest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return "of an unknown kind" if nearest is None else f"{nearest.fstype} at {nearest.mountpoint}"


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(folder: Path, content: str = WEIGHTS) -> dict[str, Any]:
    """The record of a checkpoint whose files are whole."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / RECORD} cannot be read: {error}; remove the folder to go on without it"
        ) from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {record.get('format')}, this version reads {FORMAT}")
    found = _digests(folder / content)
    if found != record["files"]:
        wrong = sorted(name for name in {*found, *record["files"]} if found.get(name) != record["files"].get(name))
        raise CheckpointError(f"{folder} is damaged ({', '.join(wrong)}): remove the folder to go on without it")
    return record


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@task(name="save-checkpoint", cache_policy=NO_CACHE, persist_result=False)
def save_checkpoint(
    clock: Stopwatch, store: CheckpointStore, trainer: TrainerGroup, state: RunState, in_background: bool
) -> None:
    """Write policy, optimiser and run state of an iteration: the update is kept. The one before is complete then.

    Args:
        in_background: return once the ranks have copied their state to host memory, and write from there.
    """
    with clock.stage("save_checkpoint"):
        if in_background:
            store.save_in_background(state, trainer.start_saving, trainer.wait_until_saved)
        else:
            store.save(state, trainer.save)
