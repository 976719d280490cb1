# SPDX-License-Identifier: Apache-2.0
"""How a run is opened: slots and resources first, for training and for measurements alike; and what an error looks like
in the terminal and on the flow run's page."""

import os
import signal
import sqlite3
from contextlib import closing

import psutil
import pytest

from tasks.config.tracking import TrackingConfig
from tasks.records.model_registry import register
from tasks.records.tracking import Tracker
from tasks.system.processes import wait_until_ended
from tests.support.patience import PATIENCE, post, wait_until
from tests.support.platform_helpers import RECIPE, RayHead, Workspace

REWARD_ON_A_GPU = "reward.functions={jpeg_incompressibility: {num_gpus: 1}}"
SWEEP = """
import sys
from tasks.config.recipes import load_recipe, parse_changes
from tasks.cli.terminal import in_a_sentence, run_flow
from flows.validation_sweep import validation_sweep

with in_a_sentence():
    changes = parse_changes(sys.argv[1:])
    run_flow(validation_sweep, False, load_recipe("tiny"), None, changes, return_state=True).result()
"""
LATE = """
import os, signal, sys
import ray
from tasks.cli.commands import main

ends, late, flow = ray.shutdown, getattr(signal, sys.argv.pop()), sys.argv.pop()
ray.shutdown = lambda: (os.kill(os.getpid(), late), ends())  # all is done by then, and Prefect has not heard of it
main(flow)
"""


HANGING = """
import signal, sys
import psutil, ray
from tasks.cli.commands import main

ends, flow = ray.shutdown, sys.argv.pop()

def hang():
    for one in psutil.Process().children():
        if one.name() == "gcs_server":  # which Ray asks at its end, for ever
            one.send_signal(signal.SIGSTOP)
    open("hangs", "w").close()
    ends()

ray.shutdown = hang
main(flow)
"""


def registered(workspace: Workspace) -> None:
    """A version of the recipe's model, for a sweep to measure."""
    tracking = TrackingConfig(
        uri=f"sqlite:///{workspace.folder}/mlflow.db", artifacts=(workspace.folder / "mlruns").as_uri()
    )
    experiment = str(RECIPE["trainer"]["experiment_name"])
    register(Tracker(tracking, "trained"), experiment, workspace.folder / "data/base_model", 10, {})


@pytest.mark.parametrize("flow", ["train", "validate", "sweep"])
def test_every_flow_counts_the_rewards_gpus(workspace: Workspace, ray_head: RayHead, flow: str) -> None:
    """On the CPU a reward may have a GPU: each flow asks the pool for it, and then whether the cluster has one."""
    workspace.environment.update(ray_head.joined)
    if flow == "sweep":
        registered(workspace)

    def output(*settings: str) -> str:
        changes = [word for setting in settings for word in ("--set", setting)]
        command = ("-c", SWEEP, *settings) if flow == "sweep" else ("-m", f"flows.{flow}", "tiny", *changes)
        process = workspace.start(*command)
        assert process.wait(PATIENCE) == 1, process.output()[-3000:]
        return process.output()

    assert "error: ray_init.gpu_pool is 'nowhere'" in output(REWARD_ON_A_GPU, "ray_init.gpu_pool=nowhere")
    assert "error: the run needs 1 GPUs" in output(REWARD_ON_A_GPU)


def test_an_error_inside_a_flow_is_one_sentence_here_and_has_its_frames_on_the_page(workspace: Workspace) -> None:
    (workspace.folder / "mlflow.db").unlink()
    command = ("-m", "flows.train", "tiny", "--set", "data.train_batch_size=100")
    process = workspace.start(*command)
    assert process.wait(PATIENCE) == 2
    (line,) = process.output().splitlines()
    assert line.startswith("error: data.train_batch_size is 100 but data/prompts.parquet has only 8 train prompts")
    assert not (workspace.folder / "mlflow.db").exists()

    def recorded() -> list[str]:
        logs = post(f"{workspace.environment['PREFECT_API_URL']}/logs/filter", {"sort": "TIMESTAMP_DESC"})
        return [log["message"] for log in logs if "train_batch_size is 100" in log["message"]]

    assert any("Traceback" in message for message in wait_until(recorded, "the flow run's log"))
    debug = workspace.start(*command, "--debug")
    assert debug.wait(PATIENCE) == 1
    assert 'tasks/run/preflight.py", line' in debug.output()


def test_the_end_of_its_terminal_ends_a_run_in_order(workspace: Workspace) -> None:
    """All of its processes hear that, and Prefect's temporary server has to be told of the run's end."""
    del workspace.environment["PREFECT_API_URL"]
    workspace.environment["PREFECT_HOME"] = str(workspace.folder / ".prefect")
    process = workspace.start("-m", "flows.train", "tiny")
    wait_until(lambda: list(workspace.folder.glob("runs/*/run.json")), f"the run ({process.log})", every=0.1)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(PATIENCE) == 143, process.output()[-3000:]
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "KILLED"
    with closing(sqlite3.connect(workspace.folder / ".prefect/prefect.db")) as prefect:
        states = [state for (state,) in prefect.execute("SELECT state_type FROM flow_run")]
    assert states == ["CRASHED"]


@pytest.mark.parametrize(("flow", "late"), [("train", "SIGTERM"), ("validate", "SIGINT")])
def test_a_signal_after_the_end_of_all_work_changes_nothing(workspace: Workspace, flow: str, late: str) -> None:
    """MLflow has it that the run is FINISHED: Prefect would say that it crashed, and the command to continue it."""
    changes = ["--set", "trainer.total_training_steps=1", "--set", f"trainer.experiment_name=late-{flow}"]
    output = workspace.run("-c", LATE, "tiny", *changes, flow, late)
    assert "stopped by" not in output
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "FINISHED"
    flow_runs = post(f"{workspace.environment['PREFECT_API_URL']}/flow_runs/filter", {})
    (state,) = [run["state_type"] for run in flow_runs if run["name"].startswith(f"late-{flow} ")]
    assert state == "COMPLETED"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_ray_hangs_at_the_end_can_be_left(workspace: Workspace, number: signal.Signals) -> None:
    """By the second signal, at once; MLflow and Prefect have it that the run is whole, and no process is left."""
    changes = ["--set", "trainer.total_training_steps=1", "--set", f"trainer.experiment_name=hangs-{number.name}"]
    process = workspace.start("-c", HANGING, "tiny", *changes, "train")
    wait_until((workspace.folder / "hangs").exists, f"Ray's end ({process.log})", every=0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    wait_until(lambda: "leaves at once" in process.output(), f"an answer ({process.log})", every=0.1)
    assert process.poll() is None
    os.kill(process.pid, number)
    assert process.wait(PATIENCE) == 128 + number, process.output()[-3000:]
    assert "stopped by" not in process.output()
    assert "continue:" not in process.output()
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "FINISHED"
    flow_runs = post(f"{workspace.environment['PREFECT_API_URL']}/flow_runs/filter", {})
    (state,) = [run["state_type"] for run in flow_runs if run["name"].startswith(f"hangs-{number.name} ")]
    assert state == "COMPLETED"
    assert family
    assert not wait_until_ended(family, PATIENCE)


def test_another_algorithm_tells_what_it_leaves_behind(workspace: Workspace) -> None:
    """In the log of the run that is refused afterwards, so that nothing has to be sampled."""
    output = workspace.train("algorithm.name=dance_grpo", "data.train_batch_size=100", check=False)
    told = "algorithm.name is now dance_grpo, as published: without the recipe's"
    assert f"{told} actor_rollout_ref.rollout.algo.noise_level 0.7 (now 0.3)" in " ".join(output.split())
    assert not (workspace.folder / "runs").exists()
