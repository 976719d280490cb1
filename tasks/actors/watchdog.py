# SPDX-License-Identifier: Apache-2.0
"""Ends what a driver started on this machine when the driver is killed and cannot do it itself.

A process that gets SIGKILL runs no handler, and those of its children that made themselves independent (Ray's
daemons and agents, Prefect's temporary server) live on. The watchdog is a small process at the other end of a pipe:
when the driver dies, however it dies, the kernel closes the pipe. It knows what to end by a mark in the environment,
which a process hands on to all that it starts.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tasks.system.processes import ProcessIdentity, wait_or_kill

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 5
DONE = "done"
MARK = "DOUBLEFLOW_STARTED_BY"
ROUNDS = 3
"""A daemon that is being ended may just have started another process: so look again."""
TIDY = ("tasks.actors.watchdog", "multiprocessing.resource_tracker")


@contextmanager
def watchdog(folder: Path | None = None) -> Iterator[None]:
    """Should this process die within the block, the processes end too that it had started before and starts in it.

    Threads may have blocks of their own at the same time: each ends what any of them has started.

    Args:
        folder: is removed then, and the one around it if that is empty.
    """
    family = list(_identities(psutil.Process().children(recursive=True)))
    mark = _mark()
    own = {name: value for name, value in os.environ.items() if name != MARK}  # not below any other one's block
    command = [sys.executable, "-m", "tasks.actors.watchdog", mark, *([] if folder is None else [str(folder)])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True, env=own, cwd=ROOT)
    assert process.stdin is not None
    process.stdin.write("".join(f"{member}\n" for member in family))
    process.stdin.flush()
    try:
        yield
    finally:
        process.stdin.write(f"{DONE}\n")
        process.stdin.close()
        process.wait()


def _mark() -> str:
    """This process's, from now on in its environment. One for all its threads, which share the environment."""
    os.environ[MARK] = str(ProcessIdentity.of(os.getpid()))
    # For setproctitle, by which Ray's agents set their titles: else they write over the environment that is read here.
    os.environ["SPT_NOENV"] = "1"
    return os.environ[MARK]


def main(mark: str, folder: str | None = None) -> None:
    """Read processes' identities until the pipe ends; unless it ends with `done`, end these and the marked, and remove
    the folder that they worked in."""
    lines = sys.stdin.read().split("\n")
    if DONE in lines:
        return
    family = [ProcessIdentity.parsed(line).process() for line in lines if line]
    end_marked(mark, [process for process in family if process is not None])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            Path(folder).parent.rmdir()


def end_marked(mark: str, orphans: Iterable[psutil.Process] = ()) -> None:
    """End these processes and all that carry the mark: by SIGTERM, and those that stay by SIGKILL."""
    orphans = list(orphans)
    for _ in range(ROUNDS):
        orphans = list({*orphans, *marked(mark)})
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.terminate()
        orphans = wait_or_kill(orphans, GRACE_SECONDS)


def end_family(family: Collection[psutil.Process], seconds: float) -> None:
    """Kill processes and wait until they are gone, so many seconds at most.

    Those among them that tidy up after others, and end with them, are not killed: watchdogs, and multiprocessing's
    trackers of shared memory.
    """
    for member in family:
        with suppress(psutil.NoSuchProcess):
            if not any(name in word for name in TIDY for word in member.cmdline()):
                member.kill()
    psutil.wait_procs(family, timeout=seconds)


def _identities(processes: list[psutil.Process]) -> Iterator[ProcessIdentity]:
    """Of those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield ProcessIdentity.of(process.pid)


def marked(mark: str, variable: str = MARK) -> Iterator[psutil.Process]:
    """This user's processes that carry the mark in this variable, and what is below them, whatever its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(variable) == mark:
                yield from (process, *process.children(recursive=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
