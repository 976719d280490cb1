# SPDX-License-Identifier: Apache-2.0
"""Ray's workers begin as forks of a process that has done their imports, which is most of what their start takes.

Ray starts a worker by the command that a runtime environment names in python's place, here `forks/start_worker.py`. It
asks `forks/fork_workers.py` for a fork, and starts python where there is none: the worker is there later then, and the
log says why. Where the cluster is started here, `forks/setup_worker.py` does so before Ray imports itself for it.
"""

import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import ray

from tasks.actors.interpreter import own_environment
from tasks.config.trainer import RayConfig

log = logging.getLogger(__name__)

VARIABLE = "DOUBLEFLOW_WORKER_FORKS"
"""Where the socket is, for those who share the process that forks: a sweep's runs."""
PROGRAMS = Path(__file__).parent / "forks"
FORKS = str(PROGRAMS / "fork_workers.py")
START = str(PROGRAMS / "start_worker.py")
SETUP = str(PROGRAMS / "setup_worker.py")
IMPORTED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tensordict", "safetensors.torch", "peft"),
    *("diffusers.pipelines.qwenimage.pipeline_qwenimage", "PIL.Image", "psutil", "pydantic.main"),
    # For Ray itself, which is not imported here.
    *("google.protobuf.json_format", "google.protobuf.timestamp_pb2", "jsonschema", "msgpack", "pydantic.v1"),
    *("logging.handlers", "pdb"),
)
"""What the actors of a run import; a module that is missing here costs seconds, nothing else."""
ROOM = 1 << 16
"""Bytes for the environment of a fork, beside that of this process."""


def forks_for(config: RayConfig, uses_gpus: bool, folder: Path | None) -> AbstractContextManager[Path | None]:
    """Where the workers of a cluster are asked for as forks: a process that several runs share, or one of its own.

    None for a cluster that was started elsewhere, which may have other machines; and none in an environment with vLLM,
    where the imports of here fail unless vLLM's own come first.

    Args:
        config: says so, or leaves it open.
        uses_gpus: does the run?
        folder: of a cluster that is started here.
    """
    shared, asked = os.environ.get(VARIABLE), config.forked_workers
    if asked == "auto":
        asked = sys.platform == "linux" and not uses_gpus
    if not asked or (shared is None and folder is None) or find_spec("vllm") is not None:
        return nullcontext()
    if shared is not None:
        return nullcontext(Path(shared))
    assert folder is not None
    folder.mkdir(mode=0o700)
    return worker_forks(folder)


@contextmanager
def worker_forks(folder: Path, modules: Sequence[str] | None = None) -> Iterator[Path]:
    """A process whose forks become workers, until the block ends, or this process however it ends; its socket.

    Workers that have begun go on. That it ends within the block is told.

    Args:
        folder: for the socket; nobody else may enter it.
        modules: that it imports, by default `IMPORTED`.
    """
    place = folder / "forks"
    with _started(place, IMPORTED if modules is None else modules) as process:
        ended: list[bool] = []
        teller = Thread(target=_tell, args=(process, ended), daemon=True)
        teller.start()
        try:
            yield place
        finally:
            ended.append(True)
            process.kill()  # at its own end it would take all of these modules down
            teller.join()
            place.unlink(missing_ok=True)


def _started(place: Path, modules: Sequence[str]) -> "subprocess.Popen[str]":
    """The process; from now on somebody listens at the socket, or there is nobody."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(128)
        return subprocess.Popen(
            [sys.executable, FORKS, str(listener.fileno()), *modules],
            env=os.environ | {"DOUBLEFLOW_ROOM": " " * ROOM},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )


def _tell(process: "subprocess.Popen[str]", ended: list[bool]) -> None:
    """Each reason once why a worker was no fork, and that there will be none any more."""
    assert process.stdout is not None
    told = set()
    for line in process.stdout:
        if line not in told:
            told.add(line)
            log.warning("a worker starts some seconds later, as it has to import everything itself: %s", line.strip())
    if not ended:
        log.warning(
            "the process whose forks become workers has ended: from now on each starts later, with imports of its own"
        )


def forked_environment(place: Path) -> dict[str, str]:
    """Ray's runtime environment for workers that ask at this socket."""
    return {"py_executable": shlex.join([sys.executable, "-P", START, str(place)])}


@contextmanager
def set_up_at_once() -> Iterator[None]:
    """A cluster that is started in this block has workers ask for their forks without importing Ray before."""
    constants = ray._private.ray_constants
    name = constants.SETUP_WORKER_FILENAME
    constants.SETUP_WORKER_FILENAME = SETUP  # Ray joins it to a folder of its own, which a whole path leaves out
    try:
        yield
    finally:
        constants.SETUP_WORKER_FILENAME = name


def started_by_python(num_cpus: float) -> dict[str, Any]:
    """Ray's options for an actor that takes so many CPUs, where workers are forks.

    Ray gives it as many OpenMP threads, which is read as the libraries are loaded: a fork has one, as Ray gives to all
    that take fewer than two.
    """
    asked = ray.get_runtime_context().runtime_env.get("py_executable", "")
    if num_cpus < 2 or START not in asked or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"runtime_env": own_environment(sys.executable)}
