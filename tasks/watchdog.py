"""Ends what a driver started on this machine when the driver is killed and cannot do it itself.

A process that gets SIGKILL runs no handler, and those of its children that made themselves independent (Ray's
daemons and agents, Prefect's temporary server) live on. The watchdog is a small process at the other end of a pipe:
when the driver dies, however it dies, the kernel closes the pipe.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GRACE_SECONDS = 5
DONE = "done"


@contextmanager
def watchdog() -> Iterator[None]:
    """Should this process die within the block, the processes that it had started by the block's beginning end too."""
    family = [(child.pid, child.create_time()) for child in psutil.Process().children(recursive=True)]
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write("".join(f"{pid} {created!r}\n" for pid, created in family))
    process.stdin.flush()
    try:
        yield
    finally:
        process.stdin.write(f"{DONE}\n")
        process.stdin.close()
        process.wait()


def main() -> None:
    """Read pids and their start times until the pipe ends; unless it ends with `done`, end these processes."""
    lines = sys.stdin.read().split("\n")
    if DONE in lines:
        return
    orphans = list(_alive(line.split() for line in lines if line))
    for orphan in orphans:
        orphan.terminate()
    _, left = psutil.wait_procs(orphans, timeout=GRACE_SECONDS)
    for orphan in left:
        orphan.kill()


def _alive(records: Iterator[list[str]]) -> Iterator[psutil.Process]:
    """Processes that still are who they were: a pid may have gone to another one."""
    for pid, created in records:
        try:
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                yield process
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
