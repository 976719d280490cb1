# SPDX-License-Identifier: Apache-2.0
"""Ends what a driver started on this machine when the driver is killed and cannot do it itself.

A process that gets SIGKILL runs no handler, and those of its children that made themselves independent (Ray's
daemons and agents, Prefect's temporary server) live on. The watchdog is a small process at the other end of a pipe:
when the driver dies, however it dies, the kernel closes the pipe. It knows what to end by a mark in the environment,
which a process hands on to all that it starts.

It is nobody's child: a worker of Ray's that ends in order kills its children first, and what those had started would
live on.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from tasks.system.processes import ProcessIdentity, wait_or_kill, wait_until_ended
from tasks.system.signals import kept_from_below

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 5
DONE = "done"
MARK = "DOUBLEFLOW_STARTED_BY"
BETWEEN = ";"
"""Between a process's own mark and those that it was started with: who ends all below it knows what is far below, too,
where nobody is left in between."""
APART = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh")
"""Starts a command that has this process's pipes and is not its child; in the background a shell gives no input of its
own accord."""
ENDS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
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
    mark = _marked_environment()
    own = {name: value for name, value in os.environ.items() if name != MARK}  # not below any other one's block
    command = [sys.executable, "-m", "tasks.actors.watchdog", mark, *([] if folder is None else [str(folder)])]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with kept_from_below(*ENDS):  # a batch system tells all of a job's processes, and this one is the last of them
        process = subprocess.Popen([*APART, *command], start_new_session=True, env=own, cwd=ROOT, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    process.wait()  # the shell
    _write(process.stdin, *map(str, family))
    try:
        yield
    finally:
        _write(process.stdin, DONE)
        with suppress(OSError):  # likewise
            process.stdin.close()
        process.stdout.read()  # until it is gone
        process.stdout.close()


def _write(pipe: IO[str], *lines: str) -> None:
    """To the watchdog, unless somebody has killed it: what its driver does is none the worse for that."""
    with suppress(OSError):
        pipe.write("".join(f"{line}\n" for line in lines))
        pipe.flush()


def own_mark() -> str:
    """The mark of this process, within a `watchdog` of its own."""
    return os.environ[MARK].split(BETWEEN)[0]


def _marked_environment() -> str:
    """This process's mark, from now on in its environment. One for all its threads, which share the environment."""
    mark = str(ProcessIdentity.of(os.getpid()))
    above = [other for other in os.environ.get(MARK, "").split(BETWEEN) if other not in ("", mark)]
    os.environ[MARK] = BETWEEN.join([mark, *above])
    # For setproctitle, by which Ray's agents set their titles: else they write over the environment that is read here.
    os.environ["SPT_NOENV"] = "1"
    return mark


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
    """End these processes and all that carry the mark: by SIGTERM, and those that stay by SIGKILL.

    Not those that tidy up: the watchdog of an actor that ends here has just begun to end what only it knows.
    """
    orphans = list(orphans)
    for _ in range(ROUNDS):
        orphans = [one for one in {*orphans, *marked(mark)} if not _tidies_up(one)]
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.terminate()
        orphans = wait_or_kill(orphans, GRACE_SECONDS)


def end_family(family: Collection[psutil.Process], seconds: float) -> None:
    """Kill processes and wait until they are gone, so many seconds at most.

    Those among them that tidy up after others, and end with them, are not killed.
    """
    for member in family:
        with suppress(psutil.NoSuchProcess):
            if not _tidies_up(member):
                member.kill()
    wait_until_ended(family, seconds)


def _tidies_up(process: psutil.Process) -> bool:
    """A watchdog, or multiprocessing's tracker of shared memory: what it looks after ends, and then so does it."""
    with suppress(psutil.NoSuchProcess):
        return any(name in word for name in TIDY for word in process.cmdline())
    return False


def _identities(processes: list[psutil.Process]) -> Iterator[ProcessIdentity]:
    """Of those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield ProcessIdentity.of(process.pid)


def marked(mark: str, variable: str = MARK) -> Iterator[psutil.Process]:
    """This user's processes that carry the mark in this variable, and what is below them, whatever its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if mark in process.environ().get(variable, "").split(BETWEEN):
                yield from (process, *process.children(recursive=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
