# SPDX-License-Identifier: Apache-2.0
"""A sweep's children are processes under one parent; one that dies, and the sweep's own death, cost only themselves."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from optuna.trial import TrialState

from tasks.actors.worker_forks import FORKS
from tasks.config.sweep import SweepConfig
from tasks.records.study import open_study
from tasks.system.processes import wait_until_ended
from tests.support.patience import PATIENCE, wait_until
from tests.support.platform_helpers import RayHead, Workspace, write_module
from tests.support.processes import children_of, with_word, words_of

SEARCH = {
    "name": "lr",
    "sampler": "grid",
    "pruner": "none",
    "parallel": 2,
    "space": {"actor_rollout_ref.actor.optim.lr": {"choices": [1e-3, 1e-4]}},
}
COMMAND = """
import json, sys
from tasks.config.recipes import load_recipe, parse_changes
from flows.sweep import SweepConfig, sweep

search = SweepConfig(**json.loads(sys.argv[1]))
print("the result is", json.dumps(sweep(load_recipe("tiny"), search, parse_changes(sys.argv[2:]))), flush=True)
"""
FORK_SERVER = "multiprocessing.forkserver"
SHORT = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.val_before_train=false",
    "reward.functions={patient: {reward: 'patient_reward:patient'}}",
)
PATIENT_REWARD = """
import time
from pathlib import Path

from tasks.rewards.jpeg import jpeg_kilobytes


def patient(images, prompts):
    while not Path({go!r}).exists():
        time.sleep(0.05)
    return [jpeg_kilobytes(image) for image in images]
"""
"""No run ends before there is a file of that name."""


def children(process: psutil.Process) -> list[psutil.Process]:
    """The training drivers of a sweep, forks of a child of it."""
    return with_word(children_of(with_word(process.children(), FORK_SERVER)), FORK_SERVER)


def raylets(process: psutil.Process) -> list[psutil.Process]:
    """Ray's daemon of each machine, below a process."""
    return [child for child in process.children(recursive=True) if Path(*words_of(child)[:1]).name == "raylet"]


@pytest.mark.slow
def test_a_killed_child_fails_alone_and_a_killed_sweep_goes_on(workspace: Workspace, ray_head: RayHead) -> None:
    """All on one cluster of the sweep's, which ends with it; it goes on on one that is there. Two at once are refused:
    each would take the other's runs for interrupted ones."""
    go, command = workspace.folder / "go", ("-c", COMMAND, json.dumps(SEARCH), *SHORT)
    write_module(workspace, "patient_reward", PATIENT_REWARD.format(go=str(go)))
    process = workspace.start(*command)
    family = psutil.Process(process.pid)
    first = wait_until(lambda: len(found := children(family)) == 2 and found, "two children at a time")
    assert "another process works on runs/sweeps/lr" in workspace.run(*command, check=False)
    first[0].kill()
    study = open_study(SweepConfig(**SEARCH), workspace.folder / "runs/sweeps/lr")
    wait_until(lambda: study.get_trials(deepcopy=False, states=[TrialState.FAIL]), "word that a child died")
    (raylet,), running = raylets(family), children(family)
    assert [child.pid for child in running] == [first[1].pid], "the other one goes on"
    forking = with_word(family.children(), FORKS)
    workers = [*forking, *children_of(forking)]
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = [*running, raylet, *workers]
    assert not wait_until_ended(left, PATIENCE)  # nobody trains for a sweep that is gone

    go.touch()
    said = workspace.on(ray_head).run(*command).partition("the result is ")[2]
    result = json.loads(said.splitlines()[0])
    assert result["complete"] == 2
    runs = workspace.mlflow_runs()
    (parent,) = [run for run in runs if run.info.run_name == "sweep-lr"]
    trained = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.data.params["actor_rollout_ref.actor.optim.lr"] for run in trained} == {"0.001", "0.0001"}
    assert [run.info.status for run in trained] == ["FINISHED"] * 2  # the killed ones were continued, not begun anew
    best = max(trained, key=lambda run: run.data.metrics["val/reward/mean"])
    assert result["mlflow_run_id"] == best.info.run_id
    assert parent.data.metrics["best/value"] == best.data.metrics["val/reward/mean"] == result["value"]
