# SPDX-License-Identifier: Apache-2.0
"""What a killed driver had started ends with it; real processes and a real SIGKILL."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tasks.actors.watchdog import MARK, end_family, watchdog
from tasks.system.processes import ProcessIdentity, identity, runs, wait_until_ended
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until
from tests.support.processes import kill_all, named, words_of

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
SLEEPER = "import time; time.sleep(7200)"
DAEMON = """
import subprocess, sys, time
own = {"PATH": "/usr/bin:/bin"}  # nobody can read in its environment whose it is
agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(7200)"], env=own, start_new_session=True)
print(agent.pid, flush=True)
time.sleep(7200)
"""
DRIVER = """
import subprocess, sys, time
from tasks.actors.watchdog import watchdog
sleeper, daemon = sys.argv[1:]
def start(code):
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
before = start(sleeper)
with watchdog():
    within = start(daemon)
    print(before.pid, within.pid, within.stdout.readline().strip(), flush=True)
    if sys.stdin.readline().strip() == "wait":
        time.sleep(7200)
"""


def watchdogs(mark: str) -> list[psutil.Process]:
    """Those of a driver, which are nobody's children."""
    return [one for one in psutil.process_iter() if {"tasks.actors.watchdog", mark} <= {*words_of(one)}]


def test_what_ends_all_of_a_job_does_not_end_its_watchdog() -> None:
    """As `scancel`, and then SIGKILL: it would have nobody left."""
    with watchdog():
        (own,) = watchdogs(os.environ[MARK])
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            own.send_signal(kind)
        with pytest.raises(psutil.TimeoutExpired):
            own.wait(1)
        assert runs(own)
    wait_until(lambda: not runs(own), "its end with the block")


def test_a_block_whose_watchdog_was_killed_ends_as_it_would() -> None:
    with watchdog():
        (own,) = watchdogs(os.environ[MARK])
        own.kill()
        wait_until_ended([own], PATIENCE)


# A driver's process that forks imports nothing here: that would take six seconds, and is not the question.
RAY_DRIVER = """
import time
import ray
from tasks.actors import worker_forks
from tasks.actors.cluster import ray_cluster
from tasks.config.trainer import RayConfig
worker_forks.IMPORTED = ()
with ray_cluster(RayConfig(num_cpus=1)):
    print(ray.get_runtime_context().gcs_address, "started", flush=True)
    time.sleep(7200)
"""


INTERRUPTED_DRIVER = """
import os, signal, threading, time
from contextlib import suppress
import psutil
from prefect.exceptions import TerminationSignal
from tasks.actors import worker_forks
from tasks.actors.cluster import ray_cluster
from tasks.actors.watchdog import MARK
from tasks.config.trainer import RayConfig
from tests.support.processes import named

def stop(number, frame):
    raise TerminationSignal(number)

def send():
    while not named(psutil.Process().children(), "raylet"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

def marked():
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]:
                yield process.name()

def send_once(sent=[]):
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))

worker_forks.IMPORTED = ()
signal.signal(signal.SIGTERM, stop)
BEGIN
try:
    with ray_cluster(RayConfig(num_cpus=1)):
        time.sleep(600)
except BaseException as error:
    print("found:", type(error).__name__, signal.getsignal(signal.SIGTERM) is stop, list(marked()), flush=True)
"""


SERVER = """
import subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(7200)"], start_new_session=True)
print(engine.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
STARTER = """
import subprocess, sys
from tasks.actors.watchdog import watchdog
with watchdog():
    started = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    print(started.stdout.readline().decode().strip(), flush=True)
    sys.stdin.readline()
"""
"""A driver of an actor, or an actor of a server; it tells what that tells, which is its engine's pid at last."""


BEGETTER = """
import signal, subprocess, sys, time
from pathlib import Path

def beget(number, frame):
    late = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(7200)"], start_new_session=True)
    Path(sys.argv[1]).write_text(f"{late.pid}\\n")
    sys.exit()

signal.signal(signal.SIGTERM, beget)
print(flush=True)
time.sleep(7200)
"""
HOLDER = """
import time
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=1)
print(held.name, flush=True)
time.sleep(7200)
"""


ENDING_DRIVER = """
import subprocess, sys
import psutil, ray
from tasks.actors import worker_forks
from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import ray_cluster
from tasks.actors.ray_address import require_listener
from tasks.actors.waiting import get
from tasks.config.trainer import RayConfig
from tasks.system.processes import runs

class Holder:
    def begin(self):
        command = [sys.executable, "-c", "import time; time.sleep(7200)"]
        return subprocess.Popen(command, start_new_session=True).pid

worker_forks.IMPORTED = ()
with ray_cluster(RayConfig(num_cpus=1)):
    require_listener(ray.get_runtime_context().gcs_address, 600)  # it knows Ray's head
    begun = psutil.Process(get(ActorGroup(Holder, 1, 0).actors[0].begin.remote()))
print("found:", runs(begun), flush=True)
"""


TWICE_ENDED_DRIVER = """
import os, signal
from tasks.actors import cluster, worker_forks
from tasks.config.trainer import RayConfig

def ending(family, seconds):
    os.kill(os.getpid(), signal.SIGTERM)
    end_family(family, seconds)

end_family, cluster.end_family = cluster.end_family, ending
worker_forks.IMPORTED = ()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as after a first one
with cluster.ray_cluster(RayConfig(num_cpus=1)):
    pass
print("found: all is told", flush=True)
"""


DEAF_HEAD_DRIVER = """
import os, signal, sys
import psutil, ray
from tasks.actors import cluster, worker_forks
from tasks.config.trainer import RayConfig
from tasks.system.processes import wait_until_ended
from tests.support.processes import named

worker_forks.IMPORTED = ()
cluster.LEAVING_SECONDS = 1.0
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
head = None
if sys.argv[1:]:
    head, cluster.LET_GO_SECONDS = psutil.Process(int(sys.argv[1])), 1.0  # nothing of it is killed
with cluster.ray_cluster(RayConfig(num_cpus=1)):
    begun = psutil.Process().children(recursive=True)
    head = head or named(begun, "gcs_server")[0]
    head.suspend()
os.kill(os.getpid(), signal.SIGTERM)
print("found:", heard, wait_until_ended(begun, 600), flush=True)
"""


CLOCK_STEP = """
import sys
if "-c" not in sys.orig_argv:  # as the driver and all others are started
    from psutil import _pslinux
    before = _pslinux.boot_time
    _pslinux.boot_time = lambda: before() + 3600
"""
"""For Python's start: what a watchdog sees of the clock was set by an hour since the driver looked at it."""


def start_fork(code, folder):
    """A driver for whom Prefect is imported already."""
    return Program(["-c", code], ROOT, os.environ | {"PYTHONPATH": str(ROOT)}, folder / "output")


def found_by(program):
    """What it tells, in a line; others who have the same file may speak after it."""
    assert program.wait(PATIENCE) == 0, program.output()
    return program.output().partition("found: ")[2].partition("\n")[0]


def start(*code, path=ROOT):
    command, env = [sys.executable, "-c", *code], os.environ | {"PYTHONPATH": str(path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **pipes)


def watchdogs_of(pid):
    """They are nobody's children."""
    for process in psutil.process_iter():
        words = words_of(process)
        if words[1:3] == ["-m", "tasks.actors.watchdog"] and ProcessIdentity.parsed(words[3]).pid == pid:
            yield process


@pytest.fixture
def driver(request, tmp_path):
    """A driver with a process that it started before the block, a daemon within, and the daemon's agent."""
    code, where = DRIVER, getattr(request, "param", "clock goes on")
    if where == "clock is set":
        (tmp_path / "sitecustomize.py").write_text(CLOCK_STEP)
    if where == "folder with tasks of its own":  # which a program that begins there would import
        (folder := tmp_path / "folder").mkdir()
        (folder / "tasks.py").touch()
        code = DRIVER.replace("sleeper, daemon =", f"import os\nos.chdir({str(folder)!r})\nsleeper, daemon =")
    process = start(code, SLEEPER, DAEMON, path=f"{tmp_path}{os.pathsep}{ROOT}")
    started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(started) == 3
    yield process, started
    process.kill()
    process.wait()
    kill_all(started)


@pytest.mark.parametrize("driver", ["clock goes on", "clock is set", "folder with tasks of its own"], indirect=True)
def test_all_that_a_killed_driver_started_ends(driver):
    """Its whole process group is killed, as batch systems do it."""
    process, started = driver
    os.killpg(process.pid, signal.SIGKILL)
    left = wait_until_ended(started, PATIENCE)
    assert not left


@pytest.mark.ray
def test_rays_agents_end_too_when_their_raylet_was_faster(tmp_path):
    """It dies with the driver, by Ray's own doing; its agents may live for a minute, looking for a head that is gone.

    They are suspended here, so that they end by the watchdog or not at all.
    """
    program = start_fork(RAY_DRIVER, tmp_path)
    wait_until(lambda: " started\n" in program.output() or program.poll() is not None, "Ray's start", every=0.1)
    process = psutil.Process(program.pid)
    family = process.children(recursive=True)
    (raylet,) = named(family, "raylet")
    agents = raylet.children()  # and workers, as far as they have been started
    (guard,) = watchdogs_of(process.pid)
    assert len(agents) >= 2
    try:
        guard.suspend()
        for one in agents:
            with suppress(psutil.NoSuchProcess):  # a worker that was about to end
                one.suspend()
        process.kill()
        process.wait()
        assert not wait_until_ended([raylet], PATIENCE)
        guard.resume()
        assert not wait_until_ended([guard], PATIENCE)
        assert not [one for one in agents if runs(one)]
    finally:
        kill_all(agents)


def engine_of(process):
    return psutil.Process(int(process.stdout.readline()))


def assert_ends(engine):
    try:
        assert not wait_until_ended([engine], PATIENCE)
    finally:
        kill_all([engine])


def test_an_engine_ends_whose_server_was_killed_before_the_actor():
    """Ray's worker does it that way when its driver is gone: it kills its children and then ends."""
    actor = start(STARTER, SERVER, "7200")
    engine = engine_of(actor)
    for child in psutil.Process(actor.pid).children():
        child.kill()
    actor.kill()
    actor.wait()
    assert_ends(engine)


def test_an_engine_ends_with_the_driver_whose_server_had_ended():
    """It is below nobody, and what the driver's watchdog ends must not have been the only one to know of it."""
    driver = start(STARTER, STARTER, SERVER, "0")
    engine = engine_of(driver)
    driver.kill()
    driver.wait()
    assert_ends(engine)


def test_what_is_started_by_one_that_is_being_ended_ends_too(tmp_path):
    driver = start(STARTER, BEGETTER, str(tmp_path / "late"))
    driver.stdout.readline()
    driver.kill()
    driver.wait()
    late = wait_until(lambda: (tmp_path / "late").is_file() and (tmp_path / "late").read_text().strip(), "its start")
    try:
        wait_until(lambda: identity(int(late)) is None, "its end", every=0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(late), signal.SIGKILL)


def test_shared_memory_of_a_family_that_is_killed_goes_with_it():
    """Its tracker outlives it for that moment."""
    with start(HOLDER) as holder:
        memory = Path("/dev/shm") / holder.stdout.readline().strip()
        assert memory.is_file()
        family = [psutil.Process(holder.pid), *psutil.Process(holder.pid).children()]
        assert len(family) == 2
        # The holder does not wait for it, and until it is another program it cannot be told from the holder's own.
        wait_until(lambda: any("resource_tracker" in word for word in family[1].cmdline()), "the tracker", every=0.01)
        end_family(family, PATIENCE)
    try:
        assert not memory.exists()
    finally:
        memory.unlink(missing_ok=True)


def test_what_a_driver_leaves_behind_in_peace_lives_on(driver):
    process, started = driver
    process.communicate("done\n", timeout=PATIENCE)
    assert process.returncode == 0
    left = wait_until_ended(started, 1)
    assert set(left) == set(started)


def test_blocks_of_threads_end_in_any_order(monkeypatch):
    monkeypatch.setenv(MARK, "of whoever has started this process")
    first, second = watchdog(), watchdog()
    first.__enter__()
    second.__enter__()
    assert os.environ[MARK].split()[0] == str(os.getpid())
    first.__exit__(None, None, None)
    assert os.environ[MARK].split()[0] == str(os.getpid())
    second.__exit__(None, None, None)


@pytest.mark.ray
@pytest.mark.parametrize(
    "begin",
    [
        pytest.param("threading.Thread(target=send, daemon=True).start()", id="between two steps"),
        pytest.param("os.register_at_fork(after_in_parent=send_once)", id="in a hook of a fork"),
        pytest.param(
            """
import ray
ends = ray.shutdown
ray.shutdown = lambda: (os.kill(os.getpid(), signal.SIGTERM), ends())
threading.Thread(target=send, daemon=True).start()
""",
            id="and again while it ends",
        ),
    ],
)
def test_sigterm_while_ray_starts_is_heard_and_leaves_nothing(tmp_path, begin):
    """Ray's own handler, which is there before `ray.init` is done, would exit with 15, and its agents live on. And what
    a handler raises within a hook is printed and lost."""
    program = start_fork(INTERRUPTED_DRIVER.replace("BEGIN", begin), tmp_path)
    assert found_by(program) == "TerminationSignal True []"


@pytest.mark.ray
def test_sigterm_once_ray_has_left_is_heeded_as_before_it(tmp_path):
    """Ray's C++ sets it back to the system's own, behind Python's back."""
    assert found_by(start_fork(TWICE_ENDED_DRIVER, tmp_path)) == "all is told"


@pytest.mark.ray
def test_what_an_actor_has_started_ends_with_the_cluster(tmp_path):
    """A process that no daemon of Ray's knows of, as an engine's, would live on and keep its GPU.

    And of the process that workers are forks of nobody says that it has ended.
    """
    program = start_fork(ENDING_DRIVER, tmp_path)
    assert found_by(program) == "False"
    assert "has ended" not in program.output()


@pytest.mark.ray
def test_a_head_that_does_not_answer_is_left_without_a_word(tmp_path):
    """Ray would wait for it for ever. What has been started ends all the same, and a signal is heard as before."""
    program = start_fork(DEAF_HEAD_DRIVER, tmp_path)
    assert found_by(program) == "[15] []"
    assert "Ray does not answer at the end" in program.output()


@pytest.mark.ray
def test_the_head_of_a_joined_cluster_that_does_not_answer_is_left_too(tmp_path):
    """As where the network has gone: neither the run's end nor that of its process waits for it."""
    (tmp_path / "head").mkdir()
    head = start_fork(RAY_DRIVER, tmp_path / "head")
    try:
        address = wait_until(lambda: re.search(r"([\d.]+:\d+) started\n", head.output()), "Ray's start", every=0.1)
        (gcs,) = named(psutil.Process(head.pid).children(), "gcs_server")
        joined = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address[1], "RAY_AUTH_MODE": "token"}
        program = Program(["-c", DEAF_HEAD_DRIVER, str(gcs.pid)], ROOT, os.environ | joined, tmp_path / "output")
        assert found_by(program) == "[15] []"
        assert "Ray does not answer at the end" in program.output()
    finally:
        psutil.Process(head.pid).kill()
        head.wait(PATIENCE)
