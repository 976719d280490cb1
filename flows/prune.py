# SPDX-License-Identifier: Apache-2.0
"""What dead runs have left on the disk: `python -m flows.prune` lists it, `--yes` removes it (make prune).

Nothing that a living process uses is listed, and nothing that a finished run's record needs: checkpoints, exported
weights and what is in MLflow stay. So do kept scores of the iteration of a run's newest checkpoint: they are kept until
MLflow has that iteration, and till then the run does not go on without them.
"""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from flows.deploy.service_record import ServiceError, recorded_in
from tasks.cli.terminal import Debug, in_a_sentence, run_command
from tasks.records.run_lock import run_lock
from tasks.records.run_store import CHECKPOINTS, NAME, SCORES, STAGES, CheckpointError, numbers_in
from tasks.system.files import bytes_on_disk
from tasks.system.processes import COPY, identity, maker_lives

RAY, RAY_LOGS, KEPT, VALIDATION, COPIES, WORKTREES, LOGS = KINDS = (
    "Ray's session folders of dead clusters",
    "logs of Ray's processes of old runs that failed",
    "kept stages of old runs (a run started again samples them anew)",
    "validation grids of old runs (MLflow has them, too)",
    "copies of weights that killed validation sweeps measured",
    "working copies of killed reproductions",
    "logs of services that have ended",
)
WORKTREE = "doubleflow-"
DAY = 86_400
RAY_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")
"""What Ray calls the folder of a session: when it began, and the number of the process that began it."""


@dataclass(frozen=True)
class Leftover:
    """One folder that nobody needs; of a run, that run's folder."""

    kind: str
    path: Path
    bytes: int
    run: Path | None = None


def leftovers(project: Path, temporary: Sequence[Path], days: float) -> list[Leftover]:
    """What could go.

    Args:
        project: the folder with runs/ and .services/.
        temporary: folders in which Ray and `reproduce` work.
        days: runs whose folder was changed since are left alone.
    """
    commands = " ".join(_used_texts())
    found = [(RAY, path) for folder in temporary for path in _ray_sessions(folder, commands)]
    found += [(RAY_LOGS, path) for folder in temporary for path in _ray_logs(folder, days)]
    found += [(WORKTREES, path) for folder in temporary for path in _worktrees(folder, commands)]
    found += [(COPIES, path) for path in _copies(project / "runs", days)]
    services = project / ".services"
    if services.is_dir() and not _locked(services / "lock") and not _services_live(services):
        found.append((LOGS, services))
    listed: list[tuple[str, Path, Path | None]]
    listed = [(kind, path, run) for run in _old_runs(project / "runs", days) for kind, path in _of_run(run)]
    listed += [(kind, path, None) for kind, path in found]
    return [Leftover(kind, path, bytes_on_disk(path), run) for kind, path, run in listed if path.is_dir()]


def remove(item: Leftover) -> bool:
    """Remove it, and have git forget a working copy; False where a run that it is of has begun to work, or it stays."""
    if item.run is not None:
        try:
            with run_lock(item.run):
                return _remove_of_run(item)
        except CheckpointError as error:
            typer.echo(f"{item.path} stays: {error}", err=True)
            return False
    gone = _remove_folder(item.path)
    if item.kind == WORKTREES:
        subprocess.run(["git", "worktree", "prune"], capture_output=True)
    return gone


def _remove_of_run(item: Leftover) -> bool:
    """Unless the run was at work since it was listed, and needs it by now."""
    assert item.run is not None
    if not item.path.is_dir() or (item.kind, item.path) not in _of_run(item.run):
        return False
    return _remove_folder(item.path)


def _remove_folder(path: Path) -> bool:
    """False, and a word of it, where something of it stays."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        return True
    typer.echo(f"{path} stays, or a part of it: it cannot be removed", err=True)
    return False


def _of_run(run: Path) -> list[tuple[str, Path]]:
    """Kind and folder of what an old run that nobody works on does without, where it is there."""
    return [*((KEPT, path) for path in _stages(run)), (VALIDATION, run / "validation")]


def _stages(run: Path) -> list[Path]:
    """The folders of its kept stages, but for the scores of its newest checkpoint's iteration."""
    kept, checkpoints = run / STAGES, run / CHECKPOINTS
    iterations = numbers_in(checkpoints) if checkpoints.is_dir() else []
    needed = [kept / SCORES / NAME.format(newest) for newest in iterations[-1:]]
    if not any(path.is_dir() for path in needed):
        return [kept]
    beside = [*kept.iterdir(), *(kept / SCORES).iterdir()]
    return sorted(path for path in beside if path not in (*needed, kept / SCORES))


def _ray_sessions(folder: Path, commands: str) -> Iterator[Path]:
    """Every process of a cluster, and each of its workers, has the session's folder in its command or environment."""
    of_ray = [folder] if folder.name == "ray" else folder.glob("ray*")
    found = [Path(here, name) for one in of_ray for here, inner, _ in os.walk(one) for name in inner]
    for path in sorted(path for path in found if RAY_SESSION.fullmatch(path.name)):
        with suppress(FileNotFoundError):  # a cluster that has just ended
            if not path.is_symlink() and _own(path) and path.name not in commands and _quiet(path):
                yield path


def _ray_logs(folder: Path, days: float) -> Iterator[Path]:
    """What `tasks.actors.ray_files.working_folder` leaves after an error: a folder with logs alone."""
    for path in sorted(folder.glob("ray-*")):
        with suppress(OSError):  # somebody's own that may not be read, or one that has just gone
            alone = not path.is_symlink() and _own(path) and [entry.name for entry in path.iterdir()] == ["logs"]
            if alone and (path / "logs/raylet.out").is_file() and _is_old(path, days):
                yield path


def _quiet(path: Path) -> bool:
    """Is it older than an hour, or does its starter, whose number ends its name, no longer run?"""
    starter = path.name.rpartition("_")[2]
    if starter.isdigit() and identity(int(starter)) is None:
        return True
    return time.time() - path.stat().st_mtime > 3600


def _worktrees(folder: Path, commands: str) -> Iterator[Path]:
    for path in sorted(folder.glob(f"{WORKTREE}*")):
        number = path.name.removeprefix(WORKTREE).partition("-")[0]
        alive = number.isdigit() and identity(int(number)) is not None
        is_copy = (path / "code/.git").is_file() or (path / ".git").is_file()
        if is_copy and not path.is_symlink() and _own(path) and not alive and str(path) not in commands:
            yield path


def _copies(folder: Path, days: float) -> Iterator[Path]:
    for path in sorted(folder.glob(f"{COPY}*")):
        lives = maker_lives(path.name, COPY)
        if lives is None:  # made on another machine
            lives = time.time() - path.lstat().st_mtime < days * DAY
        if not lives and not path.is_symlink() and _own(path):
            yield path


def _old_runs(folder: Path, days: float) -> Iterator[Path]:
    """Runs that nobody works on and that nothing was written to for so long."""
    for record in sorted(folder.glob("*/run.json")):
        run = record.parent
        if _own(run) and not _locked(run / ".lock") and _is_old(run, days):
            yield run


def _is_old(run: Path, days: float) -> bool:
    try:
        newest = max(path.lstat().st_mtime for path in (run, *run.glob("*"), *run.glob("*/*")))
    except FileNotFoundError:  # what goes while it is looked at is somebody's work
        return False
    return time.time() - newest > days * DAY


def _locked(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks: then nobody knows
            return True
    return False


def _services_live(folder: Path) -> bool:
    """Does one of them run, maybe on another machine, or is their record no longer to be read?"""
    here = socket.gethostname()
    try:
        return any(process.alive or process.host != here for process in recorded_in(folder / "pids.json").values())
    except ServiceError:
        return True


def _used_texts() -> Iterator[str]:
    """Commands, working folders and Ray's variables of this user's processes."""
    for process in psutil.process_iter():
        try:
            yield " ".join(process.cmdline())
            yield process.cwd()
            yield " ".join(value for name, value in process.environ().items() if name.startswith("RAY"))
        except (psutil.Error, OSError):
            continue


def _own(path: Path) -> bool:
    return path.lstat().st_uid == os.geteuid()


def main(
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    days: Annotated[float, typer.Option(min=0, help="Age from which a run's folder counts as old.")] = 14.0,
    debug: Debug = False,
) -> None:
    """List what dead runs have left, what it costs, and remove it if asked to."""
    with in_a_sentence(debug):
        _list_and_remove(yes, days)


def _list_and_remove(yes: bool, days: float) -> None:
    """The same, with a line for each kind and folder."""
    ray = os.environ.get("RAY_TMPDIR")
    temporary = dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp"), *([Path(ray)] if ray else [])])
    here = Path.cwd()
    if not any((here / name).is_dir() for name in ("runs", ".services")):
        typer.echo(
            f"{here} has no runs/ and no .services/, so nothing of runs and services is there to look at", err=True
        )
    items = leftovers(here, list(temporary), days)
    for kind in KINDS:
        of_kind = [item for item in items if item.kind == kind]
        typer.echo(f"{sum(item.bytes for item in of_kind) / 1e6:10.1f} MB in {len(of_kind):4} {kind}")
        for item in of_kind:
            typer.echo(f"{item.bytes / 1e6:10.1f} MB   {item.path}")
    if yes:
        items = [item for item in items if remove(item)]
    verb = "removed" if yes else "to be removed by --yes"
    typer.echo(f"{sum(item.bytes for item in items) / 1e6:10.1f} MB {verb}")


if __name__ == "__main__":
    run_command(main)
