# SPDX-License-Identifier: Apache-2.0
"""Python programs that begin with their imports done, as forks of one process that did them.

Importing torch, diffusers, MLflow and Prefect takes longer than what most programs of the tests do: up to half a minute
on a busy machine, and a test may start a dozen. What is not imported beforehand: the project, which a program takes
from its own folder or path, and Ray, which reads its settings from the environment then.
"""

import atexit
import gc
import importlib
import logging
import multiprocessing as mp
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from multiprocessing import connection, forkserver, reduction, resource_tracker
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import psutil

CONTEXT = mp.get_context("forkserver")
OF_RANKS = [
    "pytest",  # every fork looks for pytest's main module
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "diffusers.pipelines.wan.pipeline_wan",
    "peft",
]
OF_COMMANDS = [
    "tensordict",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "pandas",
    "matplotlib.pyplot",
    "prefect",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.server.api.server",
    "prefect.cli",
    "typer",
]
OF_STAGES = [
    "dvc.cli",
    "dvc.repo.reproduce",
    "pandas",
    "rapidocr" if sys.version_info >= (3, 13) else "rapidocr_onnxruntime",
]
WITHOUT_PREFECT = {"dvc"}
"""Modules that do not import it: what its import does to logging must not meet them in a fork."""
DRIVER = Path("/dev/nvidiactl")
"""There is no CUDA without it, but in Windows' Linux."""
_ONE_AT_A_TIME = Lock()
"""multiprocessing looks after all of its processes whenever one starts: two threads could read the same end."""


def preload(*more: Sequence[str]) -> None:
    """Import these, too; once it is known that tests start what needs them, and before the first fork.

    Ranks and examples do without: the modules of commands take as long again. Beside a GPU nothing is imported, and a
    program does it all itself: diffusers asks the driver as it is imported, and no fork may use CUDA after that.
    """
    CONTEXT.set_forkserver_preload([] if DRIVER.exists() else list(dict.fromkeys([*OF_RANKS, *chain(*more)])))


preload()


def serve_from_here(others: Sequence[str] = ()) -> None:
    """Import what ranks need, and make the process that forks a fork of this one, for all children of this one too.

    multiprocessing would start an interpreter for it, which imports all that once more, and another for each child.

    Args:
        others: modules that are imported beside.
    """
    for name in () if DRIVER.exists() else (*OF_RANKS, *others):
        importlib.import_module(name)
    resource_tracker.ensure_running()
    server = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, hold = os.pipe()
        if os.fork() == 0:
            os.close(hold)
            gc.enable()  # pytest may have begun without
            try:
                forkserver.main(listener.fileno(), alive, [])  # until nobody has the other end
            finally:
                os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, hold
    server.ensure_running = lambda: None


class Streams:
    """Open descriptors that a program gets as its standard streams: input, output and errors."""

    def __init__(self, descriptors: Sequence[int]):
        self.descriptors = descriptors

    def __reduce__(self) -> Any:
        """On the way into a fork, which has copies of them."""
        return _received, tuple(map(reduction.DupFd, self.descriptors))


def _received(*copies: Any) -> Streams:
    return Streams([copy.detach() for copy in copies])


class Program:
    """`python -m module ...` or `python -c code ...`, the leader of a process group of its own.

    Args:
        arguments: what would follow `python`.
        folder: it runs in.
        environment: all of it.
        log: a file for what it prints, or all of its streams.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, environment: dict[str, str], log: Path | Streams):
        self.log = log
        if isinstance(log, Path):
            log.touch()  # it can be read before the program has begun
        what = (tuple(arguments), str(folder), environment, log)
        self._process = CONTEXT.Process(target=_become, args=what, daemon=True)  # it ends, at the latest, with pytest
        with _ONE_AT_A_TIME:
            self._process.start()
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self._process.exitcode is None and not _runs(self.pid):
            self._process.join()  # the fork server, its parent, is about to tell
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutError: it still runs after `seconds`, with the end of what it printed; it goes on.
        """
        connection.wait([self.sentinel], seconds)
        with _ONE_AT_A_TIME:
            self._process.join(0)
        if self._process.exitcode is None:
            raise TimeoutError(f"no end after {seconds} s:\n{self.output()[-6000:]}")
        return self._process.exitcode

    def output(self) -> str:
        """What it has printed so far, errors too."""
        assert isinstance(self.log, Path)
        return self.log.read_text()

    def kill(self) -> None:
        """End it, and what it has started in its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has no group of its own yet
            self._process.kill()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _become(arguments: tuple[str, ...], folder: str, environment: dict[str, str], log: Path | Streams) -> None:
    mp.current_process()._config["daemon"] = False  # which could have no processes of multiprocessing itself
    gc.freeze()  # a collection would copy every page that is shared with the other forks
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the tests are
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _take_streams(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "prefect" in sys.modules:  # it has read the settings of the process that forks
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:  # it has read that, too
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    option, program, *rest = arguments
    sys.argv = [program, *rest]
    if program in WITHOUT_PREFECT:
        logging.getLogger().handlers.clear()
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, sys.modules["__main__"].__dict__)
    finally:
        # In an interpreter's order, which multiprocessing has not: Prefect sends its last logs in the first, and stops
        # its temporary server in the second.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _take_streams(log: Path | Streams) -> None:
    if isinstance(log, Streams):
        streams = log.descriptors
        for number in (0, sys.stdin.fileno()):
            os.dup2(streams[0], number)
    else:
        streams = [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)] * 3
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(streams[number], number)
        os.dup2(streams[number], stream.fileno())
    for descriptor in {*streams}:
        os.close(descriptor)
