# SPDX-License-Identifier: Apache-2.0
"""A sweep's run is a process of its own, and the process that it is a fork of ends when nobody is forked any more."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.system.processes import identity
from tests.support.mlflow_store import mlflow_in
from tests.support.patience import PATIENCE, wait_until

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
PARENT = """
import multiprocessing
import os
import sys
from pathlib import Path

import psutil

from tasks.system.processes import wait_until_ended

print("runs as", __name__, flush=True)

def fork_servers():
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children() if child.status() != "zombie"]
    return sum("multiprocessing.forkserver" in line for line in lines)

if __name__ == "__main__":
    from tasks.cli.terminal import command_line
    from tasks.actors import child_run as runs
    from tasks.config.tree import TrainConfig

    runs.IMPORTED = ("tasks.cli.commands",)
    log, file = Path("child.log"), Path("none.json")
    with runs.shared_place(TrainConfig(), 1):
        with runs.child_run(file, Path("runs"), log, None, "parent", {}) as child:
            child.process.join()
        servers = [each for each in psutil.Process().children() if "forkserver" in " ".join(each.cmdline())]
        print("fork servers", len(servers))
        os.mkfifo("config.json")
        with runs.child_run(Path("config.json"), Path("runs"), Path("ended.log"), None, "parent", {}) as ended:
            pipe = open("config.json", "w")  # waits until the child reads it, which goes on reading
    print("left", len(wait_until_ended(servers, 600)))
    print("child", child.exit_code(), log.read_text().strip())
    print("ended", ended.exit_code(), Path("ended.log").read_text().strip())
    runs._be_command(["--config", "a file.json"])
    print(command_line().partition(" ")[2])
    runs.COMMANDS, os.environ["OF_BEFORE"] = "said", "there"
    what = ((), Path("said.log"), {"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    fork = multiprocessing.get_context("fork").Process(target=runs._train, args=what)
    fork.start()
    fork.join()
    print(Path("said.log").read_text())
"""
SAID = """
import atexit
import os

from prefect.settings import get_current_settings

def main(name):
    atexit.register(print, "at its end", flush=True)
    print(name, get_current_settings().api.url, os.environ.get("OF_BEFORE"), end=", ")
"""
"""In place of the command, to see what it would see."""
FOLLOWS = """
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from mlflow import MlflowClient

from tasks.actors import child_run as runs
from tasks.config.tree import TrainConfig

class Client(MlflowClient):
    '''Of a run that logs its last value, and ends, just after one has looked.'''

    def get_metric_history(self, run, name):
        found = super().get_metric_history(run, name)
        if child.exit_code() is None:
            self.log_metric(run, name, 0.5, step=2)
            child.interrupt()
            child.process.join()
        return found

if __name__ == "__main__":
    runs.IMPORTED, runs.END_SECONDS = ("tasks.cli.commands",), 1
    client, log, folder = Client(sys.argv[1]), Path("child.log"), Path("runs")
    run = client.create_run("0").info.run_id
    client.log_metric(run, "reward", 0.25, step=1)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"mlflow_run_id": run}))
    log.write_text("of its first start; ")
    os.mkfifo("config.json")
    with runs.shared_place(TrainConfig(), 1):
        with runs.child_run(Path("config.json"), folder, log, client, "parent", {}) as child:
            pipe = open("config.json", "w")  # waits until the child reads it, which goes on reading
            print(os.getsid(child.process.pid) == child.process.pid)
            try:
                for step, value in child.new_values("reward"):
                    print(step, value)
            except runs.ChildDied as error:
                print(str(error).strip())
        print(client.get_run(run).data.tags["mlflow.parentRunId"])
        with runs.child_run(Path("config.json"), folder, log, client, "parent", {}) as deaf:
            pipe = open("config.json", "w")
            os.kill(deaf.process.pid, signal.SIGSTOP)
        print(deaf.exit_code(), flush=True)
        with runs.child_run(Path("config.json"), folder, log, client, "parent", {}) as left:
            pipe = open("config.json", "w")
            holds = subprocess.Popen(["sleep", "7200"], pass_fds=[pipe.fileno()])  # else it ends as the pipe does
            print(left.process.pid, holds.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""
PLACE = """
import os
from pathlib import Path

import ray

from tasks.actors import child_run as runs
from tasks.actors import worker_forks
from tasks.actors.ray_address import ClusterError
from tasks.config.tree import TrainConfig

if __name__ == "__main__":
    runs.IMPORTED = worker_forks.IMPORTED = ()
    reward = {"functions": {"brightness": {"num_cpus": 1.5}}}
    config = TrainConfig(reward=reward, ray_init={"num_cpus": 2})
    with runs.shared_place(config, 3) as joined:
        context = ray.get_runtime_context()
        print(ray.cluster_resources()["CPU"], joined["RAY_ADDRESS"] == context.gcs_address)
        print(Path(joined[worker_forks.VARIABLE]).is_socket())
    config = TrainConfig(trainer={"device": "cuda"})
    try:
        with runs.shared_place(config, 2):
            pass
    except ClusterError as error:
        print(error)
    with runs.shared_place(config.with_changes({"ray_init": {"gpu_pool": "gpus"}}), 2):
        print("waits for them")
"""


def test_a_run_is_its_own_command_and_its_fork_server_ends(tmp_path: Path) -> None:
    """Nothing of the parent's main module is run again for it, and nothing is said in the parent's terminal.

    The parent ignores Ctrl-C, as what a script starts in the background does: a run ends all the same when it is to.
    """
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "said.py").write_text(SAID)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "nobody-asks:1"}
    done = subprocess.run(
        [sys.executable, "-m", "parent"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stderr == ""
    first, servers, left, child, ended, command, said = done.stdout.strip().splitlines()
    assert (first, servers, left) == ("runs as __main__", "fork servers 1", "left 0")
    assert child.startswith("child 2 error: ")
    assert "none.json" in child
    assert ended == "ended 143 stopped by SIGTERM"
    assert command == "-m flows.train --config 'a file.json'"
    assert said == "train http://127.0.0.1:9/api None, at its end"


LOOKS = """
import sys
import traceback
from importlib import import_module

import torch

def looked():
    traceback.print_stack(limit=6)
    return True

torch.cuda.is_available = looked  # as on a machine with a GPU; in this process it could not be used by a fork then
from tasks.actors import child_run

for name in child_run.IMPORTED:
    import_module(name)
"""


@pytest.mark.slow
def test_what_a_run_is_a_fork_of_has_asked_for_no_gpu(tmp_path: Path) -> None:
    """CUDA is refused to the forks of a process that has; diffusers' import, which is not among these, asks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOOKS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def parent(folder: Path, code: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """What a program has printed that is the main module, and how it ended."""
    (folder / "parent.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
    return subprocess.run(
        [sys.executable, "-m", "parent", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )


def test_a_run_is_followed_to_its_last_value_and_ends_with_who_follows(tmp_path: Path) -> None:
    """Each value once. One that does not heed that it is to end is killed; and all are with their parent."""
    done = parent(tmp_path, FOLLOWS, mlflow_in(tmp_path), RAY_ADDRESS="nobody-asks:1")
    assert done.returncode == -signal.SIGKILL
    apart, first, last, error, tag, deaf, left = done.stdout.splitlines()
    assert (apart, first, last, tag) == ("True", "1 0.25", "2 0.5", "parent")
    assert error == "the run ended with 143, see child.log: of its first start; stopped by SIGTERM"
    assert deaf == str(-signal.SIGKILL)
    pids = [int(pid) for pid in left.split()]
    try:
        wait_until(lambda: not any(map(identity, pids)), "the end of the last", every=0.1)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.ray
def test_what_runs_share_has_room_for_all_of_them_or_says_so(tmp_path: Path) -> None:
    room, forks, refused, pool = parent(tmp_path, PLACE).stdout.splitlines()
    assert (room, forks, pool) == ("5.0 True", "True", "waits for them")
    assert refused.startswith("search.parallel 2 runs need 4 GPUs at a time, but the Ray cluster has 0: lower it, or ")
