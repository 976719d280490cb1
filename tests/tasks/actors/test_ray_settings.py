# SPDX-License-Identifier: Apache-2.0
"""What `ray_init` says of a cluster, and what its workers begin with where they are no forks or the cluster is joined;
a real Ray."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tasks.actors.worker_forks import VARIABLE
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]
WORKERS = """
import json, os, sys, time
from pathlib import Path
import ray
from tasks.actors import worker_forks
from tasks.actors.cluster import QUIET_ENVIRONMENT, WorkerNeeds, ray_cluster
from tasks.config.trainer import RayConfig

worker_forks.IMPORTED = ()  # what workers begin with is not the question

class Worker:
    def tell(self, names):
        print("the worker says so", flush=True)
        import torch
        return torch.are_deterministic_algorithms_enabled(), os.getcwd(), [os.environ.get(name) for name in names]

def told():
    worker = ray.remote(num_cpus=0)(Worker).remote()
    return ray.get(worker.tell.remote(list(QUIET_ENVIRONMENT)))

"""
OWN = """
config = RayConfig(num_cpus=3, forked_workers=False)
with ray_cluster(config, WorkerNeeds(full_determinism=True)):
    (is_deterministic, *_), cpus = told(), ray.cluster_resources()["CPU"]
silent = "says so" not in Path("output").read_text()
with ray_cluster(RayConfig(num_cpus=1, log_to_driver=True)):
    others, *_ = told()
    while "says so" not in Path("output").read_text():
        time.sleep(0.1)
    address = ray.get_runtime_context().gcs_address
    Path("found").write_text(json.dumps([cpus, is_deterministic, silent, others, address]))
    while not Path("done").exists():
        time.sleep(0.1)
"""
JOINED = """
with ray_cluster(RayConfig(num_cpus=5, worker_niceness=3, forked_workers=False)):
    Path("found").write_text(json.dumps([told(), list(QUIET_ENVIRONMENT.values())]))
"""
LEFT = """
class Patient:
    def hold(self, seconds):
        time.sleep(seconds)

for _ in range(3):
    with ray_cluster(RayConfig(num_cpus=1, forked_workers=False)):
        workers = [ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Patient).remote() for _ in range(2)]
        ray.get([worker.hold.remote(0) for worker in workers])
        asked = [worker.hold.remote(0.05) for _ in range(100) for worker in workers]
"""
LOST = """
import psutil
from tasks.actors.ray_address import ClusterError
from tasks.actors.waiting import get
from tasks.system.processes import runs
from tests.support.processes import named

class Patient:
    def hold(self, seconds):
        time.sleep(seconds)

for name in ("raylet", "gcs_server"):
    with ray_cluster(RayConfig(num_cpus=1, forked_workers=False)):
        worker = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Patient).remote()
        get(worker.hold.remote(0))  # also while a daemon of the cluster of before stays among the children, dead
        (daemon,) = filter(runs, named(psutil.Process().children(), name))
        daemon.kill()
        try:
            get(worker.hold.remote(600))
        except ClusterError as error:
            with Path("found").open("a") as found:
                print(error, file=found)
"""


def program(code: str, folder: Path, **variables: str) -> Program:
    without = {"RAY_ADDRESS", "RAY_worker_niceness", "TRANSFORMERS_VERBOSITY", "VLLM_LOGGING_LEVEL", VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    folder.mkdir()
    return Program(["-c", WORKERS + code], folder, environment, folder / "output")


@pytest.mark.ray
def test_a_cluster_and_its_workers_are_what_the_settings_say(tmp_path: Path) -> None:
    """One that is joined starts its workers elsewhere, where no path of the driver's would lead to what it means."""
    with tempfile.TemporaryDirectory(prefix="r-") as short:
        own = program(OWN, tmp_path / "own", RAY_TMPDIR=short)
        try:
            found = tmp_path / "own" / "found"
            wait_until(lambda: own.poll() is not None or (found.exists() and "]" in found.read_text()), "its workers")
            assert own.poll() is None, own.output()
            *said, address = json.loads(found.read_text())
            assert said == [3, True, True, False]
            joined = program(
                JOINED, tmp_path / "joined", RAY_ADDRESS=address, RAY_AUTH_MODE="token", OMP_WAIT_POLICY="active"
            )
            assert joined.wait(PATIENCE) == 0, joined.output()
            told = "which joins the cluster at RAY_ADDRESS: ray_init.num_cpus 5, ray_init.worker_niceness 3\n"
            assert told in joined.output()
            (is_deterministic, folder, quiet), values = json.loads((tmp_path / "joined" / "found").read_text())
            assert (is_deterministic, folder) == (False, str(tmp_path / "joined"))
            assert quiet == ["active" if value == "passive" else value for value in values]
        finally:
            (tmp_path / "own" / "done").touch()
            own.wait(PATIENCE)


@pytest.mark.ray
def test_a_run_that_ends_with_calls_out_leaves_without_a_word_of_them(tmp_path: Path) -> None:
    """As one whose reward fails. Ray would say of each that it may repeat, in most of such rounds, that it cannot tell
    its head that it wants to."""
    with tempfile.TemporaryDirectory(prefix="r-") as short:
        left = program(LEFT, tmp_path / "left", RAY_TMPDIR=short)
        assert left.wait(PATIENCE) == 0, left.output()
        assert "task" not in left.output(), left.output()


@pytest.mark.ray
def test_a_daemon_that_is_gone_ends_the_wait_before_ray_ends_the_process(tmp_path: Path) -> None:
    """Which it does without a word, and without any of what a run does at its end."""
    with tempfile.TemporaryDirectory(prefix="r-") as short:
        lost = program(LOST, tmp_path / "lost", RAY_TMPDIR=short)
        assert lost.wait(PATIENCE) == 0, lost.output()
    raylet, head = (tmp_path / "lost" / "found").read_text().splitlines()
    assert raylet.startswith("Ray's raylet (process ")
    assert head.startswith("Ray's head (process ")
    assert "has ended" in raylet
