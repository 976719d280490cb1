# SPDX-License-Identifier: Apache-2.0
"""The processes of `make up`: one is started in a session of its own with a log, waited for, and ended."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import httpx
import psutil
import typer

from flows.deploy import service_log
from flows.deploy.service_record import HERE, Recorded, ServiceError, living_processes, recorded_processes, write_record
from tasks.system import ports
from tasks.system.processes import boot_id, identity, runs, wait_or_kill

START_SECONDS, END_SECONDS = 120, 30
LARGEST_LOG = 10_000_000
PORT_NUMBERS = 65536
LOG_WRITERS: dict[str, subprocess.Popen] = {}


def require_free_port(name: str, port: int) -> None:
    """Raise ServiceError where another process listens at the port, or this user may not; `name` is that of the
    server."""
    try:
        ports.bound(port)
    except OSError as error:
        barred = isinstance(error, PermissionError)
        why = f"may not be used by this user ({error.strerror}), as those below 1024" if barred else "is taken"
        raise ServiceError(
            f"port {port} for {name} {why}: choose another with --{name}-port, "
            f"`make up {name.upper()}_PORT={free_port((port + 1) % PORT_NUMBERS)}`"  # 0, of the last one: any
        ) from error


def free_port(wanted: int) -> int:
    """This port, or where another process listens at it, or this user may not, any that is free."""
    try:
        return ports.bound(wanted) if wanted else ports.free_port()
    except OSError:
        return ports.free_port()


def start_process(name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """A process of a session of its own, so that Ctrl-C in this terminal does not reach it."""
    log = [sys.executable, "-S", service_log.__file__, str(HERE / f"{name}.log"), str(LARGEST_LOG)]
    # It outlives this command: whoever reads that one's output through a pipe would wait for it.
    nowhere = subprocess.DEVNULL
    writer = subprocess.Popen(log, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    assert writer.stdin is not None
    with writer.stdin as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdout=pipe, stderr=pipe, start_new_session=True
        )
    LOG_WRITERS[name] = writer
    # One that has ended already is recorded, too: `wait_until_healthy` says why.
    entry = Recorded(process.pid, identity(process.pid) or f"{boot_id()}/ended", socket.gethostname())
    write_record(recorded_processes() | {name: entry})


def wait_until_healthy(name: str, url: str, check: Callable[[], None]) -> None:
    """Return when the URL answers. Raises ServiceError, with the log's end, where the process ends or is silent.

    Args:
        check: called again and again meanwhile; what it raises ends the wait.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and name in living_processes():
        check()
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    if name not in living_processes():
        with suppress(subprocess.TimeoutExpired):
            LOG_WRITERS[name].wait(END_SECONDS)  # it writes the last words
    raise ServiceError(f"{name} did not start: {(HERE / f'{name}.log').read_text(errors='replace')[-2000:]}")


def end_process(process: psutil.Process) -> None:
    """Ask it to end; after `END_SECONDS` it and what it has started are killed."""
    family = [process]
    with suppress(psutil.NoSuchProcess):  # it has just ended by itself
        family += process.children(recursive=True)
        process.terminate()
    wait_or_kill(family, END_SECONDS)


def ask_to_end(processes: Collection[psutil.Process]) -> None:
    """Ask them to end, and wait `END_SECONDS` for it."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(runs(process) for process in processes):
        time.sleep(0.2)
    for process in filter(runs, processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end_leftovers() -> set[str]:
    """End what recorded processes that were killed have left, and say so; their names.

    MLflow's server is a child of the command that was started, and lives on at its port. What is left is all of that
    command's session, whose number no other process gets as long as one is in it.
    """
    found = {}
    for name, entry in recorded_processes().items():
        if entry.host == socket.gethostname() and not entry.ended and identity(entry.pid) is None:
            found[name] = [one for one in psutil.process_iter() if _session(one) == entry.pid and runs(one)]
    for name, left in found.items():
        if left:
            typer.echo(f"{name} was killed: ending what it has left (pid {', '.join(str(one.pid) for one in left)})")
            ask_to_end(left)
    return {name for name, left in found.items() if left}


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None
