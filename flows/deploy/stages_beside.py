# SPDX-License-Identifier: Apache-2.0
"""DVC's stages of a file, brought up to date beside other work, such as the servers' start."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from models.errors import DoubleflowError
from tasks.system.access import dvc_environment

END_SECONDS = 60
"""For a stage to end in order."""


class StageError(DoubleflowError, RuntimeError):
    """A data stage failed."""


class StagesBeside:
    """`dvc repro` of a file, which began when this was made; without a file there is nothing to wait for.

    Raises:
        StageError: from `check` and `wait`, when a stage has failed.
    """

    def __init__(self, file: Path | None):
        self.file, self.process = file, None
        if file is not None:
            command = [sys.executable, "-m", "dvc", "repro", "--quiet", str(file)]
            environment = os.environ | dvc_environment(Path.cwd())
            with _heeding_ctrl_c():
                # A group of its own: DVC leaves it to a terminal to interrupt its stage, and SIGTERM has none.
                self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def check(self) -> None:
        """Nothing has failed yet."""
        if code := self.process and self.process.poll():
            said = "see what it and its stage say above"
            raise StageError(f"`dvc repro {self.file}` failed with exit code {code}: {said}")

    def wait(self) -> None:
        """All is made."""
        if self.process is not None:
            self.process.wait()
        self.check()


@contextmanager
def _heeding_ctrl_c() -> Iterator[None]:
    """What is started here heeds it: a script's background command ignores it, and so would all that it starts."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def stages_beside(file: Path | None) -> Iterator[StagesBeside]:
    """The stages of a file beside the block, which waits for them before it needs what they make; they end with it."""
    stages = StagesBeside(file)
    try:
        yield stages
    finally:
        if stages.process is not None and stages.process.poll() is None:
            _interrupt(stages.process)


def _interrupt(process: subprocess.Popen) -> None:
    """As Ctrl-C does it, DVC and its stage; after `END_SECONDS` both are killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
