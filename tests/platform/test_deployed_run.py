# SPDX-License-Identifier: Apache-2.0
"""`python -m flows.services run`, which is `make quickstart-gpu`, on real servers, with the smallest words model."""

import os
import re
import shutil
import signal
import socket
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from flows.deploy.bring_up import PORTS
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until
from tests.support.platform_helpers import Workspace
from tests.support.prefect_store import prefect_in
from tests.support.smallest_words import ON_THE_CPU, ROLLOUT, STAGES, fill

pytest.importorskip("dvc", reason="the data stages need the extra doubleflow[data]")

pytestmark = pytest.mark.slow

CHANGES = [*ON_THE_CPU, "actor_rollout_ref.model.lora_rank=0", f"{ROLLOUT}.n=8", "algorithm.best_worst_k=2"]


@pytest.fixture
def folder(tmp_path: Path, worker_forks: str) -> Workspace:
    """As after a clone: code, recipes and stages, nothing made, no server.

    The flow runs are Python's own starts: a fork's stand-in would have the worker's SIGTERM in its place.
    """
    folder = tmp_path / "words"
    (folder / ".prefect").mkdir(parents=True)
    fill(folder)
    leading = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "DVC_SITE_CACHE_DIR", "DOUBLEFLOW_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in leading}
    environment |= prefect_in(folder / ".prefect") | {"PYTHONPATH": str(folder)}
    if Path(shutil.which("python") or "").parent != Path(sys.executable).parent:  # the stages call `python`
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    workspace = Workspace(folder, environment).forking(worker_forks)
    workspace.run("-m", "dvc", "init", "--no-scm", "--quiet")
    return workspace


def begin(workspace: Workspace, *changes: str) -> Program:
    """What `make quickstart-gpu` begins, on the CPU."""
    words = [word for change in (*CHANGES, *changes) for word in ("--set", change)]
    return workspace.start("-m", "flows.services", "run", "words", "--stages", STAGES, *words)


def flow_runs(workspace: Workspace) -> dict[str, tuple[str, str]]:
    """Name -> (state, deployment) of the flow runs that somebody asked a deployment for: of others the time comes by
    itself, such as the nightly sweep's."""
    ask = (
        "SELECT run.name, run.state_type, deployment.name FROM flow_run AS run JOIN deployment "
        "ON run.deployment_id = deployment.id WHERE NOT run.auto_scheduled"
    )
    with closing(sqlite3.connect(workspace.folder / ".prefect/prefect.db")) as prefect:
        return {name: (state, deployment) for name, state, deployment in prefect.execute(ask)}


def mine(workspace: Workspace) -> set[psutil.Process]:
    """Every process that works in the folder."""
    found = set()
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == workspace.folder and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_a_recipe_runs_as_its_deployment_and_the_servers_stay(folder: Workspace) -> None:
    """From nothing to the summary, beside a server of somebody else at Prefect's port; then a run that fails and one
    that is interrupted, on the same servers."""
    try:
        with socket.socket() as other:
            with suppress(OSError):  # it is taken anyway
                other.bind(("127.0.0.1", PORTS["prefect"]))
                other.listen()
            first = begin(folder)
            assert first.wait(PATIENCE) == 0, first.output()
        said = first.output()
        assert "iteration 2/2: reward" in said
        assert re.search(r"trained +2 iterations.*\n +held-out +[\d.]+ -> [\d.]+\n", said)
        (picture,) = re.findall(r"pictures +(\S+)", said)
        assert (folder.folder / picture).is_file()
        ((run, of),) = flow_runs(folder).items()
        assert (run.split()[0], *of) == ("words", "COMPLETED", "words")
        (mlflow,) = folder.mlflow_runs()
        assert mlflow.info.status == "FINISHED"
        assert re.search(rf"MLflow page +http://127.0.0.1:\d+/\S+{mlflow.info.run_id}", said)
        (port,) = re.findall(r"still up: Prefect http://127.0.0.1:(\d+)   MLflow .*`make down` ends them", said)
        assert int(port) != PORTS["prefect"]
        up = (folder.folder / ".services/pids.json").read_text()
        assert folder.run("-m", "flows.services", "status").count(" up") == 3

        failed = begin(folder, "data.prompts=data/nowhere.parquet")
        assert failed.wait(PATIENCE) == 1, failed.output()
        assert re.search(r"error: the flow run words \w+ is Failed: .*data/nowhere.parquet is missing", failed.output())
        assert "Traceback" not in failed.output()
        assert "still up: " in failed.output()

        interrupted = begin(folder, "trainer.seed=1", "trainer.total_training_steps=1000")
        wait_until(lambda: "iteration 1/1000" in interrupted.output(), f"an iteration ({interrupted.log})")
        os.kill(interrupted.pid, signal.SIGINT)
        assert interrupted.wait(PATIENCE) == 130, interrupted.output()
        assert re.search(r"stopped by Ctrl-C\ncontinue: .*flows.services run words", interrupted.output())
        assert sorted(state for state, _ in flow_runs(folder).values()) == ["CANCELLED", "COMPLETED", "FAILED"]
        assert folder.mlflow_runs()[-1].info.status == "KILLED"
        assert (folder.folder / ".services/pids.json").read_text() == up, "other servers than before"
    finally:
        folder.run("-m", "flows.services", "down")
    wait_until(lambda: not mine(folder), "the end of all that was started")


def test_where_a_stage_fails_what_was_started_ends(folder: Workspace) -> None:
    """While the servers start, which take longer than this stage."""
    (folder.folder / STAGES).write_text("stages:\n  wrong: {cmd: exit 3}\n")
    program = begin(folder)
    assert program.wait(PATIENCE) == 1, program.output()
    said = program.output()
    assert f"error: `dvc repro {STAGES}` failed with exit code" in said
    assert said.endswith("see what it and its stage say above\n"), said[-2000:]
    assert "deployments" not in said, "the servers were waited for"
    assert not [*(folder.folder / ".services").glob("*.json")], "a record of servers that are gone"
    wait_until(lambda: not mine(folder), "the end of all that was started")
