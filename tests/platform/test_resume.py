"""A run killed at any moment, started again by the same command, ends as if nothing had happened."""

from pathlib import Path

import psutil
import pytest
from platform_helpers import Workspace, make_workspace, wait_until

from benchmarks.kill_rounds import outcome, processes_of

STEPS = ("trainer.total_training_steps=6", "trainer.test_freq=3")
NOBODY_LEFT = ("driver",)
"""Killed, it leaves nobody to tell MLflow."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Workspace:
    """A run that nothing happened to."""
    workspace = make_workspace(tmp_path_factory.mktemp("resume") / "undisturbed", prepared, prefect_server)
    workspace.train(*STEPS)
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "save_freq"), [("driver", 1), ("trainer", 2), ("ray-head", 1)])
def test_killed_and_started_again(
    tmp_path: Path,
    prepared: Path,
    prefect_server: dict[str, str],
    undisturbed: Workspace,
    victim: str,
    save_freq: int,
) -> None:
    """With a checkpoint every second iteration the kill also loses an iteration that MLflow already shows.

    Whatever is killed, nothing of the run lives on. `benchmarks/kill_rounds.py` does this with more victims and at
    random moments.
    """
    settings = (*STEPS, f"trainer.save_freq={save_freq}")
    killed = make_workspace(tmp_path / "killed", prepared, prefect_server)
    changes = [word for setting in settings for word in ("--set", setting)]
    process = killed.start("-m", "flows.train", "tiny", *changes)
    reached = f"iter_{2:06d}"
    wait_until(lambda: list(killed.folder.glob(f"runs/*/checkpoints/{reached}")), 120, "the second checkpoint")
    driver = psutil.Process(process.pid)
    family = [driver, *driver.children(recursive=True)]
    (chosen,) = processes_of(driver, victim)
    chosen.kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0, output[-3000:]
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    (run,) = killed.mlflow_runs()
    assert run.info.status == ("RUNNING" if victim in NOBODY_LEFT else "FAILED")

    killed.train(*settings)
    (resumed,) = killed.mlflow_runs()
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    assert outcome(killed.folder, killed.client()).difference(outcome(undisturbed.folder, undisturbed.client())) is None


def test_a_finished_run_is_not_trained_again_and_a_damaged_one_is_refused(workspace: Workspace) -> None:
    settings = ("trainer.total_training_steps=1", "trainer.val_before_train=false")
    workspace.train(*settings)
    before = outcome(workspace.folder, workspace.client())
    workspace.train(*settings)
    assert outcome(workspace.folder, workspace.client()).difference(before) is None

    victim = next(workspace.run_folder().glob("checkpoints/iter_000001/trainer/*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    output = workspace.train(*settings, check=False)
    assert f"is damaged ({victim.name})" in output
    assert workspace.mlflow_runs()[0].info.status == "FAILED"
