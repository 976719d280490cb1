# SPDX-License-Identifier: Apache-2.0
"""The process whose forks are Ray's workers: it imports, once, what each of them would.

    python fork_workers.py DESCRIPTOR MODULE ...

It imports libraries alone: not the project, which a worker finds on its own path, and not Ray, which reads from the
environment as it is loaded whose worker it is. It ends when nobody holds the other end of its standard input any more,
and prints what its owner is to tell.
"""

import atexit
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

Request = dict[str, Any]
"""What `start_worker.of_this_process` says, and its arguments."""

WHILE_IMPORTING = {
    "OMP_NUM_THREADS": "1",  # Ray's own choice for a worker, which it makes before that one imports anything
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator would start a thread
}
"""Variables that libraries read as they are loaded, where the environment does not have them."""
WAIT_SECONDS = 30.0
"""For whoever asks to say what, and to go on."""
NOT_READ = ("RAY_", "__RAY_", "PREFECT_", "MLFLOW_", "DOUBLEFLOW_", "DVC_", "PYTEST_")
NOT_READ_YET = {
    *("_", "SHLVL", "PWD", "OLDPWD", "SPT_NOENV"),
    "PYTHONPATH",  # a worker brings its path
    "PYTHONBREAKPOINT",  # by a breakpoint; Ray sets it
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),  # as CUDA begins
}
"""What no import here reads; of any other variable a worker must have what these imports had."""

_kept: list[Any] = []
"""What C reads must stay."""


def main(listens: str, *modules: str) -> None:
    """Fork until the owner is gone; in a fork, be the worker.

    Args:
        listens: descriptor of the socket where forks are asked for; whoever asks during the imports waits for them.
        modules: that are imported.
    """
    atexit.register(end_at_once)  # the first, so the last that is called
    del sys.path[0]  # this file's folder
    environment = dict(os.environ)
    with socket.socket(fileno=int(listens)) as listener:
        for name, value in WHILE_IMPORTING.items():
            os.environ.setdefault(name, value)
        import_all(modules)
        gc.collect()
        gc.freeze()  # a fork's collections would copy every page
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
        request = next_fork(listener, environment)
    if request is not None:
        runpy.run_path(request["arguments"][0], run_name="__main__")


def import_all(modules: Sequence[str]) -> None:
    """Import these, in this order; whoever asks torch meanwhile whether there is a GPU is answered by a fork.

    diffusers asks. CUDA, once asked, is of no use in a fork, and NVML leaves a thread.
    """
    with ExitStack() as answered:
        for module in modules:
            imported = import_module(module)
            if module == "torch":
                answered.enter_context(answers_kept(imported.cuda))


@contextmanager
def answers_kept(cuda: ModuleType) -> Iterator[None]:
    """In this block `torch.cuda` says how many GPUs there are, and has not asked here: a fork has, unless it failed."""
    count = count_in_a_fork(cuda)
    asks = {"is_available": cuda.is_available, "device_count": cuda.device_count}
    if count is not None:
        cuda.__dict__.update(is_available=lambda: count > 0, device_count=lambda: count)
    try:
        yield
    finally:
        cuda.__dict__.update(asks)


def count_in_a_fork(cuda: ModuleType) -> int | None:
    """How many GPUs torch sees; None where it failed to say."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, str(cuda.device_count() if cuda.is_available() else 0).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        answer = said.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None


def end_at_once() -> None:
    """Do without the end of every module, which would take a fork longer than its start: it copies their pages."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # nobody asks how a fork ended


def next_fork(listener: socket.socket, environment: dict[str, str]) -> Request | None:
    """Fork whenever a worker is asked for. In a fork: what it is to be. None when the owner is gone."""
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_SECONDS)  # others wait meanwhile
            request, streams = receive_request(connection)
            if request is not None and not refuses(request, environment) and os.fork() == 0:
                begin(request, streams, connection)
                return request
        for stream in streams:
            os.close(stream)


def receive_request(connection: socket.socket) -> tuple[Request | None, list[int]]:
    """What is asked for, and the streams that it is to have; None if whoever asks has ended."""
    streams: list[int] = []
    said = bytearray()
    try:
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        while len(said) < int.from_bytes(head):
            part = connection.recv(1 << 16)
            if not part:
                return None, streams
            said += part
        return (json.loads(said) if head else None), streams
    except OSError:
        return None, streams


def refuses(request: Request, environment: dict[str, str]) -> bool:
    """Would a fork be another process than python starts? The owner is told why; whoever asks starts python."""
    reasons = [*differences(request, environment)]
    if len(os.listdir("/proc/self/task")) > 1:
        reasons.append("it has threads, of which a fork has none")
    if any(name.startswith("/dev/nvidia") for name in open_files()):  # torch may have loaded CUDA without beginning it
        reasons.append("it has begun CUDA, which a fork cannot use")
    if reasons:
        print("; ".join(reasons), flush=True)
    return bool(reasons)


def open_files() -> Iterator[str]:
    """Names of what this process has open."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself
            yield os.readlink(f"/proc/self/fd/{number}")


def differences(request: Request, environment: dict[str, str]) -> list[str]:
    """What a worker has otherwise than this process had it for its imports."""
    found, wanted = [], request["environment"]
    if request["executable"] != sys.executable:
        found.append(f"its interpreter is {request['executable']}")
    for name in sorted({*environment, *wanted}):
        if environment.get(name) != wanted.get(name) and not name.startswith(NOT_READ) and name not in NOT_READ_YET:
            found.append(f"its {name} is another")  # the value may be a secret
    return found


def begin(request: Request, streams: list[int], connection: socket.socket) -> None:
    """Be what is asked for, in a fork, if whoever asked still waits: else it is about to be that itself."""
    try:
        become(request)
        connection.sendall(b"?")
        if not connection.recv(2):
            raise TimeoutError("it was not ready in time")
    except OSError as error:
        print(error, flush=True)
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def become(request: Request) -> None:
    """The process that python would be in place of the one that asked."""
    os.setsid()  # what ends a worker's whole group must not end this one's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.sched_setaffinity(0, request["cpus"])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    take_environment(request["environment"])
    worker = request["arguments"][0]
    sys.argv = request["arguments"]
    sys.path[:] = [os.path.dirname(os.path.realpath(worker)), *request["path"]]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # its own, as for Python's `random`, which sees to that itself after a fork


def take_environment(environment: dict[str, str]) -> None:
    """Have this environment and no other, where the kernel shows it: a worker is found by a mark in it, and Ray finds
    the place of a process's title by it.

    Raises:
        OSError: it is larger than the room that this process was started with.
    """
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    strings = [os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()]
    every = b"".join(strings)
    if len(every) >= end - start:
        raise OSError(f"its environment has {len(every)} bytes, and there is room for {end - start}")
    os.environ.clear()  # nobody reads the place any more
    os.environ.update(environment)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, every, len(every))
    pointers = (ctypes.c_void_p * (len(strings) + 1))()
    for number, string in enumerate(strings):
        pointers[number], start = start, start + len(string)
    ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value = ctypes.addressof(pointers)
    _kept.append(pointers)


if __name__ == "__main__":
    main(*sys.argv[1:])
