# SPDX-License-Identifier: Apache-2.0
"""Workers that are forks are what python would have started, and end as those do; real processes and a real Ray."""

import json
import os
import resource
import runpy
import shlex
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import ray_cluster
from tasks.actors.worker_forks import FORKS, SETUP, START, VARIABLE, forked_environment, forks_for, worker_forks
from tasks.config.trainer import RayConfig
from tasks.system.processes import identity
from tests.support.patience import PATIENCE, wait_until
from tests.support.processes import with_word

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
ROOT = Path(__file__).parents[3]
MASK = 0o027
MARKER = """
import os, sys
pid, environment = os.getpid(), dict(os.environ)
if environment.get("MAKES_THREAD"):
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
"""A module that takes long to import, say."""
FAKE_TORCH = """
import os
from types import SimpleNamespace

def device_count():
    cuda.asked.append(os.getpid())
    if os.environ.get("FAILS"):
        raise RuntimeError("no driver")
    return 3

def is_asked():
    return cuda.device_count is device_count

cuda = SimpleNamespace(asked=[], is_available=lambda: device_count() > 0, device_count=device_count, is_asked=is_asked)
"""
ASKS = """
from torch import cuda
try:
    found = [cuda.is_available(), cuda.device_count()]
except RuntimeError as error:
    found = str(error)
"""
"""A library that asks as it is imported, and what it asks."""
WORKER = """
import atexit, json, os, random, resource, signal, sys
from pathlib import Path

print("said to", sys.argv[1:], flush=True)
atexit.register(print, "at its end")
kernel = Path("/proc/self/environ").read_bytes().strip(b"\\0").split(b"\\0")
state = {
    "pid": os.getpid(), "main": sys.modules["__main__"].__file__, "name": __name__, "argv": sys.argv,
    "path": sys.path, "folder": os.getcwd(),
    "environment": dict(os.environ), "seen": dict(entry.decode().split("=", 1) for entry in kernel),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)), "oom": Path("/proc/self/oom_score_adj").read_text(),
    "children": signal.getsignal(signal.SIGCHLD), "input": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")),
}
streams = sorted(int(number) for number in os.listdir("/proc/self/fd"))
import numpy
numbers = [random.random(), numpy.random.random()]
marker = sys.modules.get("marker")
own = {"numbers": numbers, "imports": getattr(marker, "pid", None)}
if asks := sys.modules.get("asks"):
    own |= {"found": asks.found, "asked_before": [*asks.cuda.asked], "is_asked": asks.cuda.is_asked()}
alone = os.getsid(0) == os.getpid()
report = {"state": state, "own": own, "streams": streams[:3] == [0, 1, 2], "alone": alone}
aside = Path(sys.argv[1] + ".aside")
aside.write_text(json.dumps(report))
aside.rename(sys.argv[1])  # who looks for it finds all of it
sys.exit(7)
"""
RAYS = """
import json, sys
from pathlib import Path
aside = Path(sys.argv[2] + ".aside")
aside.write_text(json.dumps({"state": {"pid": 0}, "asked": sys.argv[1:]}))
aside.rename(sys.argv[2])
"""
"""In place of Ray's own program that sets a worker up."""
OWNER = """
import sys
from pathlib import Path
from tasks.actors.worker_forks import worker_forks

with worker_forks(Path(sys.argv[1]), sys.argv[2:]) as place:
    print(place, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a module that is found by everyone, and a worker's program."""
    (tmp_path / "marker.py").write_text(MARKER)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def limited() -> None:
    """As Ray starts a worker: as something else than the process that it is forked from."""
    os.nice(5)
    os.umask(MASK)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    Path("/proc/self/oom_score_adj").write_text("700")


def started(folder: Path, *command: str, after: Sequence[str] = (), **variables: str) -> tuple[dict[str, Any], str]:
    """What a worker that this command starts says of itself, and what is printed; `after` follows its arguments."""
    there = folder / "elsewhere"
    there.mkdir(exist_ok=True)
    report, printed = folder / "report.json", folder / "printed"
    report.unlink(missing_ok=True)
    with printed.open("w") as stream:
        process = subprocess.Popen(
            [*command, str(folder / "worker.py"), str(report), *after],
            cwd=there,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            preexec_fn=limited,
        )
        process.wait(PATIENCE)
    wait_until(report.exists, "the worker's report")
    said = json.loads(report.read_text())
    wait_until(lambda: identity(said["state"]["pid"]) is None, "the worker's end")
    return said, printed.read_text()


def ray_says(language: str = "PYTHON", **context: Any) -> tuple[str, str]:
    """What Ray adds to a worker's arguments, of its runtime environment."""
    return f"--language={language}", f"--serialized-runtime-env-context={json.dumps(context)}"


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told of forks; other libraries' threads may log, too."""
    return [record.getMessage() for record in caplog.records if record.name == worker_forks.__module__]


def newest_that_forks() -> psutil.Process:
    """Below this one; another one serves all tests."""
    return max(with_word(psutil.Process().children(), FORKS), key=psutil.Process.create_time)


def test_a_fork_is_the_process_that_python_would_be(folder: Path) -> None:
    """But for what it has imported, and for its numbers, which are its own."""
    variables = {"RAY_JOB_ID": "07", "PYTHONPATH": f"{folder}:/nowhere", "CUDA_VISIBLE_DEVICES": ""}
    with worker_forks(folder, ["numpy", "marker"]) as place:
        asks = (sys.executable, "-P", START, str(place))
        forked, printed = started(folder, *asks, **variables)
        forks = newest_that_forks()
        held = forks.num_fds()
        path = {"PYTHONPATH": variables["PYTHONPATH"]}
        rest = {name: value for name, value in variables.items() if name not in path}
        with_environment = ray_says(**forked_environment(place), env_vars=rest, command_prefix=[])
        another, _ = started(folder, sys.executable, SETUP, after=with_environment, **path)
        wait_until(lambda: forks.num_fds() == held, "the end of what it holds of a worker")
    plain, printed_by_python = started(folder, sys.executable, **variables)
    imports = forked["own"]["imports"]
    assert imports not in (None, forked["state"]["pid"])
    assert plain["own"]["imports"] is None
    assert another["own"]["imports"] == imports
    assert len({*forked["own"]["numbers"], *another["own"]["numbers"], *plain["own"]["numbers"]}) == 6
    assert forked["alone"], "what ends its group ends nobody else"
    for each in (forked, another, plain):
        del each["state"]["pid"]
        assert each["streams"]
        for shown in (each["state"]["seen"], each["state"]["environment"]):
            shown.pop("LC_CTYPE", None)  # python's own, after its start
    assert forked["state"] == another["state"] == plain["state"]
    assert forked["state"]["seen"] == forked["state"]["environment"], "whoever looks for its mark finds it"
    assert printed == printed_by_python
    assert printed.endswith("at its end\n")


def test_what_ray_has_more_to_do_for_than_to_start_a_fork_is_left_to_rays_own_program(folder: Path) -> None:
    rays = folder / "path" / "ray"
    (rays / "_private" / "workers").mkdir(parents=True)
    (rays / "__init__.py").write_text("raise RuntimeError('it takes long to import')")
    (rays / "_private" / "workers" / "setup_worker.py").write_text(RAYS)
    forked = {**forked_environment(folder / "forks"), "env_vars": {}}
    python = shlex.quote(sys.executable)
    for asked in (
        ray_says(),
        ray_says(py_executable=python),
        ray_says(py_executable=f"{python} -P {START}.other {folder}"),
        ray_says(py_executable=f"{python} -P {START} {folder} more"),
        ray_says(**forked, command_prefix=["nice"]),
        ray_says(**forked, a_later_versions="setting"),
        ray_says(**forked | {"env_vars": {"PLACE": "${HOME}/place"}}),
        ray_says(**forked | {"env_vars": {"PYTHONPATH": "/elsewhere"}}),
        ray_says("JAVA", **forked),
        (),
    ):
        found, _ = started(folder, sys.executable, SETUP, after=asked, PYTHONPATH=str(folder / "path"))
        assert found["asked"] == [str(folder / "worker.py"), str(folder / "report.json"), *asked]


@pytest.mark.parametrize(
    ("variables", "owners", "why"),
    [
        ({"OMP_NUM_THREADS": "2"}, {}, "its OMP_NUM_THREADS is another"),
        ({"HOME": "/elsewhere"}, {}, "its HOME is another"),
        ({"MAKES_THREAD": "1"}, {"MAKES_THREAD": "1"}, "it has threads, of which a fork has none"),
        ({"RAY_LONG": "x" * 100_000}, {}, "its environment has 10"),
    ],
)
def test_what_a_fork_would_have_otherwise_is_told_once_and_python_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    owners: dict[str, str],
    why: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in owners.items():
        monkeypatch.setenv(name, value)
    with worker_forks(folder, ["marker"]) as place:
        for _ in range(2):
            asked, _ = started(folder, sys.executable, "-P", START, str(place), **variables)
            assert asked["own"]["imports"] is None
            assert asked["state"]["environment"].items() >= variables.items()
            assert asked["state"]["umask"] == MASK, "else what it writes could be written by every user"
    (told,) = told_in(caplog)
    assert why in told


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_asks_for_gpus_during_the_imports_asks_nobody_in_that_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """CUDA, once asked, is of no use in a fork, and NVML leaves a thread: a fork is asked, which may fail."""
    (folder / "torch.py").write_text(FAKE_TORCH)
    (folder / "asks.py").write_text(ASKS)
    if fails:
        monkeypatch.setenv("FAILS", "1")
    with worker_forks(folder, ["torch", "asks"]) as place:
        said, _ = started(folder, sys.executable, "-P", START, str(place))
    assert said["own"]["found"] == ("no driver" if fails else [True, 3])
    assert len(said["own"]["asked_before"]) == fails
    assert said["own"]["is_asked"], "a worker asks for itself"


def test_another_interpreter_has_no_forks_of_this_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = folder / "python"
    other.symlink_to(Path(sys.executable).resolve())
    path = os.pathsep.join([str(folder), *site.getsitepackages()])
    with worker_forks(folder, ["marker"]) as place:
        asked, _ = started(folder, str(other), "-P", START, str(place), PYTHONPATH=path)
    assert asked["own"]["imports"] is None
    (told,) = told_in(caplog)
    assert f"its interpreter is {other}" in told


def test_who_asks_and_goes_has_no_worker_and_others_have_theirs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has gone over to be the worker itself, which would be there twice."""
    report = folder / "report.json"
    arguments = [str(folder / "worker.py"), str(report)]
    asked = json.dumps(runpy.run_path(START)["of_this_process"]() | {"arguments": arguments}).encode()

    def ask(said: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(place))
            socket.send_fds(connection, [len(asked).to_bytes(4)], [0, 1, 2])
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1)

    with worker_forks(folder, ["marker"]) as place:
        assert ask(asked[:-1]) == b""
        assert ask(asked) == b"?"
        wait_until(lambda: told_in(caplog) or report.exists(), "word of it")
        wait_until(lambda: not newest_that_forks().children(), "its end")
    assert not report.exists()
    (told,) = told_in(caplog)
    assert "it was not ready in time" in told


def test_without_the_process_that_forks_python_starts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its end is told; that of the block is none."""
    with worker_forks(folder, ["marker"]) as place:
        forks = newest_that_forks()
        assert not told_in(caplog)
        forks.kill()
        asked, _ = started(folder, sys.executable, "-P", START, str(place))
        assert asked["own"]["imports"] is None
        wait_until(lambda: told_in(caplog), "word of its end")
    (told,) = told_in(caplog)
    assert "has ended" in told
    asked, _ = started(folder, sys.executable, "-P", START, str(place))  # nor is there a socket any more
    assert asked["own"]["imports"] is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_that_forks_ends_with_its_owner(folder: Path, end: signal.Signals) -> None:
    """And what it was asked for before: nobody waits for it."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-c", OWNER, str(folder), "marker"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        (forks,) = psutil.Process(owner.pid).children()
        owner.send_signal(end)
        forks.wait(PATIENCE)
    assert not forks.is_running()


class Looks:
    """An actor that tells how it began, and computes."""

    def began(self) -> dict[str, Any]:
        had = "torch" in sys.modules
        import torch  # here: did somebody import it before?

        torch.manual_seed(7)
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
        loss = layer(torch.randn(32, 64)).std()
        bits = [value.numpy().tobytes() for value in torch.autograd.grad(loss, [*layer.parameters()])]
        title = " ".join(psutil.Process().cmdline()).strip()
        return {"had": had, "pid": os.getpid(), "threads": torch.get_num_threads(), "bits": bits, "title": title}

    def has(self) -> set[str]:
        return set(sys.modules)

    def seed(self) -> int:
        import torch

        return torch.initial_seed()


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A cluster with a process of its own that forks: this one. Of what it could import it has torch."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tasks.actors.worker_forks.IMPORTED", ("torch",))
    with ray_cluster(RayConfig(num_cpus=2)):
        yield newest_that_forks()


@pytest.mark.ray
def test_actors_are_forks_and_come_back_and_begin_anyhow(
    own_cluster: psutil.Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Two in one place; one is killed; the process that forks is killed; and one that is to have threads."""
    assert with_word(psutil.Process().children(), SETUP), "Ray imports itself first"
    group = ActorGroup(Looks, 2, 0, max_restarts=-1, max_task_retries=-1)
    first, second = group.call_all("began")
    assert first["had"]
    assert second["had"]
    assert [psutil.Process(each["pid"]).ppid() for each in (first, second)] == [own_cluster.pid] * 2
    assert first["title"].startswith("ray::Looks"), first["title"]
    assert group.call_all("seed") == [7, 7]
    (threaded,) = ActorGroup(Looks, 1, 0, num_cpus=2).call_all("began")
    assert (threaded["had"], threaded["threads"]) == (False, 2)
    assert first["threads"] == 1

    os.kill(first["pid"], signal.SIGKILL)
    again, still = group.call_all("began")
    assert again["had"]
    assert still["pid"] == second["pid"]
    assert not told_in(caplog)

    own_cluster.kill()
    (python,) = ActorGroup(Looks, 1, 0).call_all("began")
    assert not python["had"]
    assert "has ended" in caplog.text
    (still,) = group.call_all("began")[1:]
    assert still["pid"] == second["pid"], "a worker that has begun goes on"
    assert python["bits"] == first["bits"] == again["bits"]
    assert any(any(value) for value in python["bits"])


@pytest.mark.ray
def test_workers_that_are_not_to_be_forks_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with forks_for(RayConfig(num_cpus=1, forked_workers=False), False, tmp_path / "forks") as forks:
        assert forks is None
    with ray_cluster(RayConfig(num_cpus=1), uses_gpus=True) as forks:
        assert forks is None
        assert not ray.get_runtime_context().runtime_env, "nothing to do before a worker begins"
        assert not with_word(psutil.Process().children(), SETUP), "Ray's own program sets them up"
        (modules,) = ActorGroup(Looks, 1, 0).call_all("has")
    assert "torch" not in modules
