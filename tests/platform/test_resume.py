# SPDX-License-Identifier: Apache-2.0
"""A run killed at any moment, started again by the same command, ends as if nothing had happened."""

import os
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.kill_rounds import processes_of
from benchmarks.run_state import logged, outcome
from tasks.actors.worker_forks import FORKS
from tasks.data.pairs import best_and_worst, read_pictures, write_pairs
from tasks.data.prompts import load_prompts
from tasks.records.history import MEASURED_ANEW
from tasks.system.processes import runs, wait_until_ended
from tests.support.forked import Program
from tests.support.patience import PATIENCE, wait_until
from tests.support.platform_helpers import RayHead, Workspace, make_workspace
from tests.support.processes import children_of, kill_all, with_word, words_of

STEPS = ("trainer.total_training_steps=6", "trainer.test_freq=3")
RAYS_OWN = {"IDLE", "DashboardAgent", "RuntimeEnvAgent"}


def history(workspace: Workspace) -> dict[str, list[tuple[int, float]]]:
    """Every metric's (step, value) points in the order logged, but those that are seconds."""
    client = workspace.client()
    (run,) = workspace.mlflow_runs()
    names = [name for name in run.data.metrics if not name.startswith(MEASURED_ANEW)]
    return {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}


def final_weights(workspace: Workspace) -> dict:
    return load_file(workspace.run_folder() / "weights/transformer/diffusion_pytorch_model.safetensors")


def workers() -> list[psutil.Process]:
    """Ray's, of all runs that tests have started: forks, of a process that a run has to itself or shares."""
    return children_of(with_word(psutil.Process().children(recursive=True), FORKS), recursive=True)


def kill_everything(process: Program) -> set[str]:
    """kill -9 of the driver, all it started and all workers: what a machine that goes down does. The classes of its
    actors."""
    children = [*{*psutil.Process(process.pid).children(recursive=True), *workers()}]
    titles = [" ".join(words_of(child)) for child in children]
    os.kill(process.pid, signal.SIGKILL)
    kill_all(children)
    process.wait()
    wait_until_ended(children, 60)
    return {found[1] for title in titles if (found := re.match(r"ray::(\w+)", title))} - RAYS_OWN


def start_and_kill(workspace: Workspace, settings: tuple[str, ...], reached: str = "iter_*") -> set[str]:
    """Kill a run once it has a (that) checkpoint; the classes of its actors."""
    changes = [word for setting in settings for word in ("--set", setting)]
    process = workspace.start("-m", "flows.train", "tiny", *changes)
    try:
        wait_until(lambda: list(workspace.folder.glob(f"runs/*/checkpoints/{reached}")), "a checkpoint")
    finally:
        actors = kill_everything(process)
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "RUNNING"  # nobody was left to say otherwise
    return actors


def resume(workspace: Workspace, settings: tuple[str, ...], undisturbed: Workspace) -> str:
    """The same command again ends with the undisturbed run's metrics and weights, in the MLflow run of before; what
    it printed."""
    (before,) = workspace.mlflow_runs()
    output = workspace.train(*settings)
    (after,) = workspace.mlflow_runs()
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert history(workspace) == history(undisturbed)
    expected, found = final_weights(undisturbed), final_weights(workspace)
    assert all((found[name] == expected[name]).all() for name in expected)
    return output


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead
) -> Workspace:
    """A run that nothing happened to."""
    workspace = make_workspace(tmp_path_factory.mktemp("resume") / "undisturbed", prepared, prefect_server).on(ray_head)
    workspace.train(*STEPS)
    return workspace


def one_of(driver: psutil.Process, victim: str) -> psutil.Process:
    """The run's only process of a kind; an actor may be below the tests' shared process that forks."""
    (found,) = processes_of(driver if victim == "driver" else psutil.Process(), victim)
    return found


def kill(driver: psutil.Process, victim: str) -> None:
    """Kill the run's only process of a kind; the run ends with it, and none of its processes is left."""
    family = {driver, *driver.children(recursive=True), *workers()}
    one_of(driver, victim).kill()
    alive = wait_until_ended(family, PATIENCE)
    assert not [member for member in alive if runs(member)]


@contextmanager
def running(workspace: Workspace, settings: tuple[str, ...]) -> Iterator[psutil.Process]:
    """A run that is killed, with all that it started, at the block's end, if it has not ended by then."""
    process = workspace.start("-m", "flows.train", "tiny", *[w for setting in settings for w in ("--set", setting)])
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            kill_everything(process)


@contextmanager
def locked(workspace: Workspace) -> Iterator[None]:
    """MLflow's data base can be read and not written during the block: a record has to wait."""
    with closing(sqlite3.connect(workspace.folder / "mlflow.db", timeout=PATIENCE, isolation_level=None)) as base:
        base.execute("BEGIN IMMEDIATE")
        yield
        base.execute("ROLLBACK")


def there(workspace: Workspace, driver: psutil.Process, path: str, victim: str = "driver") -> psutil.Process:
    """Wait until the run's folder has that path; then the run's only process of a kind."""
    wait_until(lambda: list(workspace.folder.glob(f"runs/*/{path}")), path, every=0.02)
    return one_of(driver, victim)


@pytest.mark.slow
def test_killed_and_started_again(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead, undisturbed: Workspace
) -> None:
    """The trainer in an update, the driver in the next iteration while the record of the one before is written, the
    driver in the record after a checkpoint: only what was not finished is repeated. The second of these has a cluster
    of its own, which goes down with it.

    A process that is suspended, or a data base that is locked, holds what needs it until the kill comes.
    `benchmarks/kill_rounds.py` does this with more victims and at random moments.
    """
    settings = (*STEPS, "trainer.save_freq=3")
    killed = make_workspace(tmp_path / "killed", prepared, prefect_server)
    joined = killed.on(ray_head)
    with running(joined, settings) as driver:
        there(killed, driver, "validation/000000.png", "trainer").suspend()  # it is idle until the first update
        there(killed, driver, "stages/reward/iter_000001")
        time.sleep(1)  # into the update
        kill(driver, "trainer")
    (run,) = killed.mlflow_runs()
    assert run.info.status == "FAILED"
    with running(killed, (*STEPS, "trainer.save_freq=1")) as driver:
        there(killed, driver, "checkpoints/*000001")  # begun, or whole
        with locked(killed):
            there(killed, driver, "checkpoints/.writing-000002")
            kill(driver, "driver")
    checkpoints = {path.name for path in (killed.run_folder() / "checkpoints").iterdir()}
    assert checkpoints == {"iter_000001", ".writing-000002"}, "the second update is behind the first one's record"
    assert logged(killed.folder, killed.client()) == 0
    assert not list(killed.run_folder().glob("stages/*/iter_000002"))
    with running(joined, settings) as driver:
        there(killed, driver, "stages/reward/iter_000003")
        with locked(killed):
            there(killed, driver, "checkpoints/iter_000003")
            kill(driver, "driver")
    assert logged(killed.folder, killed.client()) == 2
    (run,) = killed.mlflow_runs()
    assert run.info.status == "RUNNING"  # nobody was left to say otherwise
    kept = killed.run_folder() / "stages" / "reward"
    assert {path.name for path in kept.iterdir()} == {"iter_000002", "iter_000003"}
    output = joined.train(*settings)
    assert re.search(r"^the first update was done after .*models [\d.]+, the checkpoint [\d.]+, ", output, re.MULTILINE)
    assert outcome(killed.folder, killed.client()).difference(outcome(undisturbed.folder, undisturbed.client())) is None

    (resumed,) = killed.mlflow_runs()
    assert resumed.info.run_id == run.info.run_id
    assert resumed.info.status == "FINISHED"
    points = killed.client().get_metric_history(run.info.run_id, "perf/rollout_busy_s")
    assert {point.step for point in points if point.value == 0} == {1, 3}  # read, not sampled
    trained = killed.client().get_metric_history(run.info.run_id, "timing_s/update_actor")
    assert {point.step for point in trained} == {2, 4, 5, 6}  # the first and the third update were in checkpoints
    assert not list(killed.run_folder().glob("stages/*/iter_*"))


OFFLINE = (
    "trainer.total_training_steps=4",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "algorithm.name=dpo",
    "algorithm.sample_source=offline",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=auto",
)


@pytest.mark.slow
def test_training_on_pairs_resumes_too(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead
) -> None:
    """Neither rollout nor reward is there, and the record of samples names the pairs. What auto was stays so."""
    undisturbed, killed = (
        make_workspace(tmp_path / name, prepared, prefect_server).on(ray_head) for name in ("undisturbed", "killed")
    )
    for workspace in (undisturbed, killed):
        add_pairs(workspace.folder / "data")
    undisturbed.train(*OFFLINE)
    assert start_and_kill(killed, OFFLINE) == {"TrainerRank"}
    output = " ".join(resume(killed, OFFLINE, undisturbed).split())
    assert "ppo_micro_batch_size_per_gpu is auto: 4, as the run's first start chose it" in output

    (run,) = killed.mlflow_runs()
    assert run.data.params["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == "4"
    assert run.data.tags["doubleflow.auto.actor.ppo_micro_batch_size_per_gpu"].startswith("4: the largest that ")
    names = [artifact.path for artifact in killed.client().list_artifacts(run.info.run_id, "samples")]
    assert names == [f"samples/{step:06d}.parquet" for step in range(1, 5)]
    table = pd.read_parquet(killed.client().download_artifacts(run.info.run_id, names[-1]))
    assert set(table["iteration"]) == {4}
    assert len(table) == 4
    assert "pair" in table


def add_pairs(data: Path) -> None:
    """A pair for each train prompt, of noise in the model's latent shape."""
    pictures = np.random.default_rng(0).integers(0, 255, (16, 16, 24, 3), dtype=np.uint8)
    prompts = [prompt.prompt for prompt in load_prompts(data / "prompts.parquet", "train")]
    best_and_worst(prompts, pictures, np.arange(16.0), images_per_prompt=2).to_parquet(data / "preferences.parquet")

    def encode(pair: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pair.astype(np.float32)).flatten(1)[:, : 24 * 16].view(-1, 24, 16) / 128 - 1

    write_pairs(read_pictures(data / "preferences.parquet"), encode, data / "pairs", shard_size=8, model_digest="none")


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again_and_a_damaged_one_is_refused(undisturbed: Workspace) -> None:
    """Last in this file: it damages what the others compare with."""
    before = history(undisturbed)
    undisturbed.train(*STEPS)
    assert history(undisturbed) == before

    victim = next(undisturbed.run_folder().glob("checkpoints/iter_000006/trainer/*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    output = undisturbed.train(*STEPS, check=False)
    assert f"is damaged ({victim.name})" in output
    assert undisturbed.mlflow_runs()[0].info.status == "FAILED"
