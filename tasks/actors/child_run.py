# SPDX-License-Identifier: Apache-2.0
"""A training run as a process of its own: what happens to it happens to nobody else.

It is the fork of a process that has done the imports, which take longer than a short run, and joins a Ray cluster that
is there already.
"""

import atexit
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from types import ModuleType

import psutil
import ray
from prefect.context import refresh_global_settings_context

from models.errors import DoubleflowError
from tasks.actors.cluster import ray_cluster
from tasks.actors.daemons import require_daemons
from tasks.actors.ray_address import ClusterError
from tasks.actors.watchdog import watchdog
from tasks.actors.worker_forks import VARIABLE
from tasks.config.tree import TrainConfig
from tasks.system.late_mlflow import MlflowClient, mlflow_tags

END_SECONDS = 60
POLL_SECONDS = 1.0
COMMANDS, COMMAND = "tasks.cli.commands", "flows.train"
IMPORTED = ("flows.train", "flows.sweep", "mlflow.store.tracking.sqlalchemy_store", "peft", "prefect.task_engine")
"""What a run's driver needs; a module that is missing here costs seconds, nothing else."""

_FORKS = multiprocessing.get_context("forkserver")
_asking = Lock()
"""Threads that ask after their children at the same time could take the answer from each other."""


class ChildDied(DoubleflowError, RuntimeError):
    """A child run ended with an error or was killed."""


@contextmanager
def shared_place(config: TrainConfig, runs: int) -> Iterator[dict[str, str]]:
    """What child runs have in common, `runs` of them at a time: a process that they are forks of, and a Ray cluster.

    The cluster is the one at RAY_ADDRESS, or one that is started here and ends with the block. A driver that is killed
    takes all of it along.

    Returns:
        the variables by which a child joins the cluster.

    Raises:
        ClusterError: one that is started here has too few GPUs for so many runs.
    """
    if "RAY_ADDRESS" in os.environ:
        with watchdog(), _imported():
            yield {}
        return
    reserved, there = math.ceil(runs * config.reward.num_cpus), config.ray_init.num_cpus or os.cpu_count() or 1
    cpus = max(reserved, there) if reserved else config.ray_init.num_cpus
    place = config.ray_init.model_copy(update={"num_cpus": cpus})
    with ray_cluster(place, uses_gpus=config.gpus_needed() > 0) as forks, _imported():
        _require_gpus(config, runs)
        shared = {} if forks is None else {VARIABLE: str(forks)}
        yield {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} | shared


@contextmanager
def _imported() -> Iterator[None]:
    """The process that runs are forks of has done their imports. It is killed afterwards: at its own end it would take
    all of these modules down, many seconds on a busy machine."""
    _FORKS.set_forkserver_preload(list(IMPORTED))
    try:
        yield
    finally:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # a zombie too; multiprocessing itself asks for its exit code
                if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                    child.kill()


def _require_gpus(config: TrainConfig, runs: int) -> None:
    """Runs that wait for each other's GPUs with some of them in hand would wait for ever."""
    needed, there = runs * config.gpus_needed(), ray.cluster_resources().get("GPU", 0.0)
    if runs > 1 and needed > there and config.ray_init.gpu_pool is None:
        raise ClusterError(
            f"search.parallel {runs} runs need {needed:g} GPUs at a time, but the Ray cluster has {there:g}: lower it, "
            "or set ray_init.gpu_pool, for whose slots runs wait"
        )


class ChildRun:
    """`python -m flows.train --config FILE` in the background.

    Args:
        config_file: a config as JSON.
        run_dir: the run's folder, where its record appears.
        log: where its output goes; appended.
        client: MLflow.
        parent: MLflow run that the child is nested under.
        environment: variables that the child has beside those of this process.
    """

    def __init__(
        self,
        config_file: Path,
        run_dir: Path,
        log: Path,
        client: MlflowClient,
        parent: str,
        environment: Mapping[str, str],
    ):
        self.run_dir, self.log, self.client, self.parent = run_dir, log, client, parent
        what = (("--config", str(config_file)), log, {**os.environ, **environment})
        self.process = _FORKS.Process(target=_train, args=what)
        with _asking, _no_main_module():
            self.process.start()
        self.run_id: str | None = None

    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        with _asking:
            return self.process.exitcode

    def new_values(self, metric: str) -> Iterator[tuple[int, float]]:
        """(step, value) as they come, each step once, until the child has ended.

        Raises:
            ChildDied: it did not end well; the message has the end of its output.
            ClusterError: what all runs share is gone with a daemon of the cluster that this process has started.
        """
        seen: set[int] = set()
        ended = False
        while not ended:
            require_daemons()
            ended = self.exit_code() is not None  # asked first: what it logged at its end is read below
            for step, value in sorted(self._values(metric).items()):
                if step not in seen:
                    seen.add(step)
                    yield step, value
            if not ended:
                self._wait()
        if self.exit_code():
            raise ChildDied(f"the run ended with {self.exit_code()}, see {self.log}: {self.log.read_text()[-1500:]}")

    def _values(self, metric: str) -> dict[int, float]:
        record = self.run_dir / "run.json"
        if self.run_id is None and record.is_file():
            self.run_id = json.loads(record.read_text())["mlflow_run_id"]
            if self.run_id is not None:  # else it is to go on in a new one, and has not begun to
                self.client.set_tag(self.run_id, mlflow_tags.MLFLOW_PARENT_RUN_ID, self.parent)
        if self.run_id is None:
            return {}
        return {point.step: point.value for point in self.client.get_metric_history(self.run_id, metric)}

    def interrupt(self) -> None:
        """Ask it to end; MLflow calls the run KILLED.

        Not as Ctrl-C does: what a script starts in the background ignores that, with all that it starts itself.
        """
        if self.exit_code() is None and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Ask it to end, and wait for it. One that does not is killed."""
        self.interrupt()
        deadline = time.monotonic() + END_SECONDS
        while self.exit_code() is None and self.process.pid is not None:
            if time.monotonic() > deadline:
                os.kill(self.process.pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> None:
        """Until it has ended, `POLL_SECONDS` at most."""
        wait([self.process.sentinel], POLL_SECONDS)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """A fork would begin with running the main module of the process that asks for it: here the sweep's."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _train(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """What the fork becomes: the command, with a session of its own, as if it had been started from a shell."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    refresh_global_settings_context()  # its settings are of the environment of before
    _be_command(arguments)
    try:
        import_module(COMMANDS).main("train")
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing does not


def _be_command(arguments: Sequence[str]) -> None:
    """For whoever asks what this process was started as: `python -m flows.train` with these arguments."""
    sys.argv = [COMMAND, *arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__spec__ = find_spec(COMMAND)


@contextmanager
def child_run(
    config_file: Path, run_dir: Path, log: Path, client: MlflowClient, parent: str, environment: Mapping[str, str]
) -> Iterator[ChildRun]:
    """A child run that ends with the block. With this process it ends in a `shared_place`."""
    child = ChildRun(config_file, run_dir, log, client, parent, environment)
    try:
        yield child
    finally:
        child.stop()
