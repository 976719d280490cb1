# SPDX-License-Identifier: Apache-2.0
"""DVC's stages of a file, brought up to date beside other work, such as the servers' start."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from models.errors import DoubleflowError
from tasks.system.access import dvc_environment

END_SECONDS = 60
"""For a stage to end in order."""


class StageError(DoubleflowError, RuntimeError):
    """A data stage failed."""


@contextmanager
def stages_beside(file: Path | None) -> Iterator[Callable[[], None]]:
    """`dvc repro` of a file beside the block, which calls what it gets before it needs what the stages make.

    They end with the block. Without a file there is nothing to wait for. What it gives raises StageError.
    """
    if file is None:
        yield lambda: None
        return
    command = [sys.executable, "-m", "dvc", "repro", "--quiet", str(file)]
    environment = os.environ | dvc_environment(Path.cwd())
    # A group of its own: DVC leaves it to a terminal to interrupt its stage, and SIGTERM has none.
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def wait() -> None:
        if code := process.wait():
            raise StageError(f"`dvc repro {file}` failed with exit code {code}: see what it and its stage say above")

    try:
        yield wait
    finally:
        if process.poll() is None:
            _interrupt(process)


def _interrupt(process: subprocess.Popen) -> None:
    """As Ctrl-C does it, DVC and its stage; after `END_SECONDS` both are killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
