# SPDX-License-Identifier: Apache-2.0
"""Python programs that begin with their imports done, as forks of one process that did them.

Importing torch, diffusers, MLflow and Prefect takes longer than what most programs of the tests do: up to half a minute
on a busy machine, and a test may start a dozen. What is not imported beforehand: the project, which a program takes
from its own folder or path, and Ray, which reads its settings from the environment then.
"""

import atexit
import gc
import importlib
import multiprocessing as mp
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

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
    "typer",
]
CONTEXT.set_forkserver_preload(OF_RANKS)


def preload_commands() -> None:
    """Import what flows need too; once it is known that tests start some, and before the first fork.

    Ranks and examples do without: it takes as long again.
    """
    CONTEXT.set_forkserver_preload([*OF_RANKS, *OF_COMMANDS])


def serve_from_here() -> None:
    """Import what ranks need, and make the process that forks a fork of this one, for all children of this one too.

    multiprocessing would start an interpreter for it, which imports all that once more, and another for each child.
    """
    for name in OF_RANKS:
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
            try:
                forkserver.main(listener.fileno(), alive, [])  # until nobody has the other end
            finally:
                os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, hold
    server.ensure_running = lambda: None


class Program:
    """`python -m module ...` or `python -c code ...`, the leader of a process group of its own.

    Args:
        arguments: what would follow `python`.
        folder: it runs in.
        environment: all of it.
        log: a file for what it prints.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, environment: dict[str, str], log: Path):
        self._log = log
        what = (tuple(arguments), str(folder), environment, str(log))
        self._process = CONTEXT.Process(target=_become, args=what, daemon=True)  # it ends, at the latest, with pytest
        self._process.start()
        self.pid = self._process.pid

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
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"no end after {seconds} s:\n{self.output()[-6000:]}")
        return self._process.exitcode

    def output(self) -> str:
        """What it has printed so far, errors too."""
        return self._log.read_text()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _become(arguments: tuple[str, ...], folder: str, environment: dict[str, str], log: str) -> None:
    mp.current_process()._config["daemon"] = False  # which could have no processes of multiprocessing itself
    gc.freeze()  # a collection would copy every page that is shared with the other forks
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "prefect" in sys.modules:  # it has read the settings of the process that forks
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    option, program, *rest = arguments
    sys.argv = [program, *rest]
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, sys.modules["__main__"].__dict__)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends without
