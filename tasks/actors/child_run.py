# SPDX-License-Identifier: Apache-2.0
"""A training run as a process of its own: what happens to it happens to nobody else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from models.errors import DoubleflowError
from tasks.actors.watchdog import watchdog

END_SECONDS = 60


class ChildDied(DoubleflowError, RuntimeError):
    """A child run ended with an error or was killed."""


class ChildRun:
    """`python -m flows.train --config FILE` in the background.

    Args:
        config_file: a config as JSON.
        run_dir: the run's folder, where its record appears.
        log: where its output goes; appended.
        client: MLflow.
        parent: MLflow run that the child is nested under.
    """

    def __init__(self, config_file: Path, run_dir: Path, log: Path, client: MlflowClient, parent: str):
        self.run_dir, self.log, self.client, self.parent = run_dir, log, client, parent
        command = [sys.executable, "-m", "flows.train", "--config", str(config_file)]
        with log.open("a") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        self.run_id: str | None = None

    def new_values(self, metric: str, every_seconds: float = 1.0) -> Iterator[tuple[int, float]]:
        """(step, value) as they come, each step once, until the child has ended.

        Raises:
            ChildDied: it did not end well; the message has the end of its output.
        """
        seen: set[int] = set()
        ended = False
        while not ended:
            ended = self.process.poll() is not None  # asked first: what it logged at its end is read below
            for step, value in sorted(self._values(metric).items()):
                if step not in seen:
                    seen.add(step)
                    yield step, value
            if not ended:
                time.sleep(every_seconds)
        if self.process.returncode:
            raise ChildDied(f"the run ended with {self.process.returncode}: {self.log.read_text()[-1500:]}")

    def _values(self, metric: str) -> dict[int, float]:
        record = self.run_dir / "run.json"
        if self.run_id is None and record.is_file():
            self.run_id = json.loads(record.read_text())["mlflow_run_id"]
            self.client.set_tag(self.run_id, MLFLOW_PARENT_RUN_ID, self.parent)
        if self.run_id is None:
            return {}
        return {point.step: point.value for point in self.client.get_metric_history(self.run_id, metric)}

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C does; MLflow calls the run KILLED."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Ask it to end, and wait for it. One that does not is killed."""
        if self.process.poll() is not None:
            return
        self.interrupt()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def child_run(config_file: Path, run_dir: Path, log: Path, client: MlflowClient, parent: str) -> Iterator[ChildRun]:
    """A child run that ends with the block, and with this process."""
    child = ChildRun(config_file, run_dir, log, client, parent)
    with watchdog():
        try:
            yield child
        finally:
            child.stop()
