# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: complete, or not there.

A checkpoint is written aside, flushed, verified against the digests in its own record and then renamed into place; an
old one is renamed before it is removed. A run killed at any moment leaves whole checkpoints and at most one folder that
nobody reads. Written in the background, a checkpoint takes the same steps behind the run.
"""

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from models.errors import DoubleflowError, naming_the_disk
from tasks.data.digests import record_digest
from tasks.system.behind import Behind
from tasks.system.files import flush, move_in_place, remove, sha256_of_each

RECORD = "state.json"
WEIGHTS = "trainer"
RECORD_DIGEST = "record_sha256"
"""Of the record's other keys; records of older versions have none."""
FORMAT = 1
CHECKPOINTS, STAGES = "checkpoints", "stages"
"""Folders in a run's own: of its checkpoints, and of the finished stages of iterations that have none yet."""
SCORES = "reward"
"""Folder of the iterations' scores in that of the stages."""
NAME = "iter_{:06d}"
"""Folder of an iteration's checkpoint, or of another file of it."""

log = logging.getLogger(__name__)


class CheckpointError(DoubleflowError, RuntimeError):
    """A checkpoint cannot be used."""


@dataclass(frozen=True)
class RunState:
    """What a run needs to go on, beside the trainer's own files.

    Attributes:
        iteration: the last one that is in the weights. It is also the data cursor and the window's state: both are
            functions of (seed, iteration).
        config_digest: of the config that made it.
        data_digest: of the prompts, embeddings and pairs it was made from, "-", and of the weights that it began with,
            see `tasks.run.preflight.Inputs`; records of older versions have the first part alone.
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

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


_STATE = TypeAdapter(RunState)


def numbers_in(folder: Path, prefix: str = "iter_") -> list[int]:
    """The iterations of the folder's entries that have exactly the name that a store gives, ascending."""
    pattern = re.compile(re.escape(prefix) + "([0-9]{6}|[1-9][0-9]{6,})")
    return sorted(int(found[1]) for path in folder.iterdir() if (found := pattern.fullmatch(path.name)))


class CheckpointStore:
    """The checkpoints of one run, `folder`/iter_000010 and so on; or other files of its iterations.

    Args:
        folder: is created.
        keep: newest checkpoints that stay; None keeps all.
        content: folder of each checkpoint in which its files are, beside the record.
        behind: who writes in the background, in order with what else is written there; None makes one.
    """

    def __init__(self, folder: Path, keep: int | None = None, content: str = WEIGHTS, behind: Behind | None = None):
        """Make the folder, and remove what a killed run has left half written or half removed."""
        self.folder, self.keep, self.content = folder, keep, content
        self.behind = behind or Behind()
        self._under_way: Future[Path] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise CheckpointError(
                f"{folder} is no folder, or a link to one that is not there: mount or move back what it leads to, or "
                "remove it to begin without checkpoints"
            ) from error
        remove(*(self._aside(iteration) for iteration in numbers_in(folder, ".writing-")))
        self._remove_renamed()

    def iterations(self) -> list[int]:
        """Iterations whose name a checkpoint has, ascending; other names are nobody's."""
        return numbers_in(self.folder)

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of that iteration is."""
        return self.folder / NAME.format(iteration)

    def _aside(self, iteration: int) -> Path:
        """Where it is until it is whole."""
        return self.folder / f".writing-{iteration:06d}"

    def _old(self, iteration: int) -> Path:
        """Where it is while it is removed."""
        return self.folder / f".old-{iteration:06d}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint, after all that is written in the background; on any error nothing is left and the older
        ones stay.

        Args:
            state: its record. An older checkpoint of the same iteration gives way.
            write: writes the files (a trainer's) into the (existing) folder it is given.
        """
        self.behind.settle()
        return self._finish(self._begin(state, write), state)

    def save_in_background(
        self,
        state: RunState,
        start_writing: Callable[[Path], None],
        wait_until_written: Callable[[], None],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """The same in the background; the checkpoint is there once `settle` has returned.

        Args:
            state: its record.
            start_writing: returns when the trainer may go on.
            wait_until_written: returns when the trainer's files are complete; called in the background.
            within: a context for what is done there.
        """
        self.settle()
        self.behind.check()
        aside = self._begin(state, start_writing)

        def finish() -> Path:
            with within():
                return self._finish(aside, state, wait_until_written)

        self._under_way = self.behind.submit(finish)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; its error is raised here."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self.behind.wait(under_way)

    def _begin(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """The folder aside with the files, or with their beginnings."""
        aside = self._aside(state.iteration)
        with _removed_on_error(aside):
            aside.mkdir()  # and not what is around it: a run whose folder is gone would go on without its older ones
            (aside / self.content).mkdir()
            write(aside / self.content)
        return aside

    def _finish(self, aside: Path, state: RunState, wait_until_written: Callable[[], None] = lambda: None) -> Path:
        """The checkpoint in its place, once its files are complete."""
        with _removed_on_error(aside):
            wait_until_written()
            record = asdict(state) | {"files": _digests(aside / self.content)}
            (aside / RECORD).write_text(json.dumps(record | {RECORD_DIGEST: record_digest(record)}, indent=1))
            flush(aside)
            verify(aside, self.content)
            if self.path(state.iteration).exists():
                self._remove([state.iteration])
            move_in_place(aside, self.path(state.iteration))
        self._let_old_ones_go(state.iteration)
        return self.path(state.iteration)

    def _let_old_ones_go(self, saved: int) -> None:
        """Keep the newest up to the one just saved; what only has a checkpoint's name takes the place of none."""
        if self.keep:
            earlier = [iteration for iteration in self.iterations() if iteration <= saved]
            whole = [iteration for iteration in earlier if (self.path(iteration) / RECORD).is_file()]
            self._remove(whole[: -self.keep])

    def remove(self, through: int) -> None:
        """Remove the checkpoints of iterations up to that one; what cannot be removed is told, and tried again when
        the next are."""
        self._remove([iteration for iteration in self.iterations() if iteration <= through])

    def _remove(self, iterations: Sequence[int]) -> None:
        """What is removed in part has no checkpoint's name by then."""
        self._remove_renamed()  # first: one of the same iteration would be in the way
        for iteration in iterations:
            with _told(self.path(iteration)):
                self.path(iteration).rename(self._old(iteration))
            self._remove_renamed(iteration)

    def _remove_renamed(self, *iterations: int) -> None:
        """Of these iterations, or all that are left."""
        for iteration in iterations or numbers_in(self.folder, ".old-"):
            with _told(self._old(iteration)):
                remove(self._old(iteration))

    def latest(self, config_digest: str, data_digest: str) -> tuple[RunState, Path] | None:
        """The newest checkpoint, see `load`; None only if nothing has a checkpoint's name."""
        return self.load(self.iterations()[-1], config_digest, data_digest) if self.iterations() else None

    def check_newest(self, config_digest: str, data_digest: str, after: int = 0) -> None:
        """What a moment tells of the newest checkpoint, if it is of an iteration after that one: by its record it is of
        this config and this data, and all of its files are there. What is in them, `load` compares.

        Raises:
            CheckpointError: as `load`.
        """
        newest = max(self.iterations(), default=0)
        folder = self.path(newest)
        if newest <= after or not _is_there(folder):
            return
        _, files = self._record(newest, config_digest, data_digest)
        lost = sorted(name for name in files if not (folder / self.content / name).is_file())
        if lost:
            raise _lost(folder, lost)

    def load(self, iteration: int, config_digest: str, data_digest: str) -> tuple[RunState, Path] | None:
        """The record and the files' folder of one checkpoint; None if nothing is there.

        Raises:
            CheckpointError: it is no folder or cannot be reached, its record or files are not what was written, or
                another config or other data made it.
        """
        folder = self.path(iteration)
        if not _is_there(folder):
            return None
        state, files = self._record(iteration, config_digest, data_digest)
        _compare(folder, self.content, files)
        if not _part(state.data_digest, 1) and _part(data_digest, 1):
            log.warning("%s is of an older version: whether it was made from these base weights is not checked", folder)
        return state, folder / self.content

    def _record(self, iteration: int, config_digest: str, data_digest: str) -> tuple[RunState, dict[str, str]]:
        """The state and the files' digests in a checkpoint's record, which is of that iteration, config and data."""
        folder = self.path(iteration)
        state, files = _recorded(folder)
        if state.iteration != iteration:
            raise CheckpointError(
                f"{folder / RECORD} is of iteration {state.iteration}, the folder's name of {iteration}: give it the "
                "name that it had, or remove it to go on without it"
            )
        other = "by another config:" if state.config_digest != config_digest else None
        if other := other or other_data(state.data_digest, data_digest):
            raise CheckpointError(f"{folder} was made {other} give the run another trainer.experiment_name")
        return state, files


def other_data(stored: str, present: str) -> str | None:
    """What of the data of one `RunState.data_digest` is another than in a second, after "made", and what may be done
    about it, before what else may; None where nothing is.

    What a record of an older version does not tell is not compared.
    """
    if _part(stored, 0) != _part(present, 0):
        return "from other prompts, embeddings or pairs: bring those back, or"
    if _part(stored, 1) not in ("", _part(present, 1)):
        # A run's weights are exported over those before.
        return (
            "from other weights in model.path, model.initial_weights or actor.teacher_path: bring those back, of a run "
            "that was made longer since from MLflow, which has each version of its weights "
            "(models:/<experiment_name>/<version>), or"
        )
    return None


def _part(data_digest: str, number: int) -> str:
    """Of the data (0) or the weights (1); empty where a record of an older version has none of the weights."""
    return (*data_digest.split("-"), "")[number]


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What cannot be removed in the block is a warning, for what is newer is whole; no word of what is gone after all,
    as where somebody else removes it."""
    try:
        yield
    except OSError as error:
        if os.path.lexists(path):
            log.warning("%s cannot be removed yet, and is tried again when the next one goes: %s", path, error)


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        with naming_the_disk(folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return dict(zip((str(path.relative_to(folder)) for path in files), sha256_of_each(files), strict=True))


def verify(folder: Path, content: str = WEIGHTS) -> RunState:
    """The state in the record of a checkpoint; it and the files are what was written.

    Raises:
        CheckpointError: they are not, or cannot be read.
    """
    state, files = _recorded(folder)
    _compare(folder, content, files)
    return state


def _recorded(folder: Path) -> tuple[RunState, dict[str, str]]:
    """The state in a checkpoint's record, and the digest of each of its files by name."""
    record = _read_record(folder / RECORD)
    files = record.pop("files", None)
    if not isinstance(files, dict):
        raise _damaged(folder / RECORD, "it lists no files")
    try:
        return _STATE.validate_json(json.dumps(record)), files
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise _damaged(folder / RECORD, faults) from error


def _compare(folder: Path, content: str, files: dict[str, str]) -> None:
    """Raise CheckpointError where a checkpoint's files are not those of these digests."""
    try:
        found = _digests(folder / content)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}; remove the folder to go on without it") from error
    if found != files:
        wrong = sorted(name for name in {*found, *files} if found.get(name) != files.get(name))
        raise _lost(folder, wrong)


def _read_record(file: Path) -> dict[str, Any]:
    """A checkpoint's record without the digest of itself, which is compared."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; remove the folder to go on without it") from error
    if not isinstance(record, dict):
        raise _damaged(file, "it is no JSON object")
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {record.get('format')}, this version reads {FORMAT}")
    if RECORD_DIGEST in record and record.pop(RECORD_DIGEST) != record_digest(record):
        raise _damaged(file, "its digest is of another content")
    return record


def _damaged(file: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged ({fault}): remove the folder to go on without it")


def _lost(folder: Path, files: list[str]) -> CheckpointError:
    return CheckpointError(f"{folder} is damaged ({', '.join(files)}): remove the folder to go on without it")


def _is_there(path: Path) -> bool:
    """Is the folder there? Raises CheckpointError where something else is, such as a link to an unmounted disk."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return True
        fault = "is no folder"
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return False
        fault = f"leads to nothing that can be reached ({error.strerror})"
    raise CheckpointError(
        f"{path} has the name of a checkpoint and {fault}: mount or move back what belongs there, or remove it to go "
        "on without it"
    )
