"""A run killed at any moment, started again by the same command, ends as if nothing had happened."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from platform_helpers import Workspace, make_workspace, wait_until
from safetensors.torch import load_file

STEPS = ("trainer.total_training_steps=6", "trainer.test_freq=3")
MEASURED_ANEW = ("timing", "perf/", "memory/", "cost/hours", "cost/gpu_hours")


def history(workspace: Workspace) -> dict[str, list[tuple[int, float]]]:
    """Every metric's (step, value) points in the order logged, but those that are seconds."""
    client = workspace.client()
    (run,) = workspace.mlflow_runs()
    names = [name for name in run.data.metrics if not name.startswith(MEASURED_ANEW)]
    return {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}


def final_weights(workspace: Workspace) -> dict:
    return load_file(workspace.run_folder() / "weights/transformer/diffusion_pytorch_model.safetensors")


def kill_everything(process) -> None:
    """kill -9 of the driver and all it started: what a machine that goes down does."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    for child in children:
        if child.is_running():
            child.kill()
    process.wait()
    psutil.wait_procs(children, timeout=20)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Workspace:
    """A run that nothing happened to."""
    workspace = make_workspace(tmp_path_factory.mktemp("resume") / "undisturbed", prepared, prefect_server)
    workspace.train(*STEPS)
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", [1, 2])
def test_killed_and_started_again(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], undisturbed: Workspace, save_freq: int
) -> None:
    """With a checkpoint every second iteration the kill also loses an iteration that MLflow already shows."""
    settings = (*STEPS, f"trainer.save_freq={save_freq}")
    killed = make_workspace(tmp_path / "killed", prepared, prefect_server)
    changes = [word for setting in settings for word in ("--set", setting)]
    process = killed.start("-m", "flows.train", "tiny", *changes)
    reached = f"iter_{2:06d}"
    wait_until(lambda: list(killed.folder.glob(f"runs/*/checkpoints/{reached}")), 120, "the second checkpoint")
    kill_everything(process)
    (run,) = killed.mlflow_runs()
    assert run.info.status == "RUNNING"  # nobody was left to say otherwise

    killed.train(*settings)
    (resumed,) = killed.mlflow_runs()
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    assert history(killed) == history(undisturbed)
    expected, found = final_weights(undisturbed), final_weights(killed)
    assert all((found[name] == expected[name]).all() for name in expected)


def test_a_finished_run_is_not_trained_again_and_a_damaged_one_is_refused(workspace: Workspace) -> None:
    settings = ("trainer.total_training_steps=1", "trainer.val_before_train=false")
    workspace.train(*settings)
    before = history(workspace)
    workspace.train(*settings)
    assert history(workspace) == before

    victim = next(workspace.run_folder().glob("checkpoints/iter_000001/trainer/*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    output = workspace.train(*settings, check=False)
    assert f"is damaged ({victim.name})" in output
    assert workspace.mlflow_runs()[0].info.status == "FAILED"
