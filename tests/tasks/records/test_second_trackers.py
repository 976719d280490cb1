# SPDX-License-Identifier: Apache-2.0
"""What trackers beside MLflow get of a run, through a resume, and what happens where one fails."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.config.tracking import TrackingConfig
from tasks.records.second_trackers import SecondTrackerError, SecondTrackers, Subject, check_libraries
from tasks.records.tracking import Tracker
from tests.support.mlflow_store import mlflow_in
from tests.support.patience import wait_until

PICTURE = np.random.default_rng(0).integers(0, 255, (8, 12, 3), dtype=np.uint8)
KEY = "1_headline/validation"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """MLflow in the test's folder, W&B offline and with nobody's login."""
    wandb.teardown()  # it reads its variables once a process
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    artifacts = (tmp_path / "artifacts").as_uri()
    return TrackingConfig(uri=mlflow_in(tmp_path), artifacts=artifacts, experiment="team/a run")


def opened(config: TrackingConfig, names: tuple, folder: Path, run_id: str | None = None, told: list | None = None):
    """A run's tracker with others beside it, and where these can be seen."""
    run = Tracker(config, "a-run", run_id)
    run.also = SecondTrackers((told if told is not None else []).append)
    next_step = max(run.logged_steps, default=-1) + 1
    return run, run.also.open(names, Subject("a-run", run.run_id, folder, next_step, config, {"trainer": {"seed": 3}}))


def test_both_get_what_mlflow_gets_and_a_resumed_run_goes_on_in_them(config: TrackingConfig, tmp_path: Path) -> None:
    """Killed after its second step had been written here and not to MLflow, a run makes it again."""
    told: list[str] = []
    run, where = opened(config, ("tensorboard", "wandb"), tmp_path / "run", told=told)
    run.log_step(0, {"critic/rewards/mean": 0.5}, {"validation": Image.fromarray(PICTURE)})
    run.also.log(1, {"critic/rewards/mean": 9.0})
    run.also.close(failed=True)
    again, where_again = opened(config, ("tensorboard", "wandb"), tmp_path / "run", run.run_id, told)
    assert again.log_step(1, {"critic/rewards/mean": 0.75})
    assert not again.log_step(1, {"critic/rewards/mean": 8.0})
    again.also.close(failed=False)

    assert told == []
    assert not again.also.metrics()
    assert again.history("critic/rewards/mean") == {0: 0.5, 1: 0.75}
    assert where["tensorboard"] == where_again["tensorboard"] == str(tmp_path / "run/tensorboard")
    events = EventAccumulator(where["tensorboard"])
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("critic/rewards/mean")] == [(0, 0.5), (1, 0.75)]
    assert [(one.step, one.value) for one in events.Scalars("1_headline/reward")] == [(0, 0.5), (1, 0.75)]
    ((picture,),) = [events.Images(KEY)]
    assert (picture.step, picture.width, picture.height) == (0, 12, 8)

    first, second = (Path(folder) for folder in (where["wandb"], where_again["wandb"]))
    assert first != second
    for folder, value in ((first, b"0.5"), (second, b"0.75")):
        (file,) = folder.glob(f"run-{run.run_id}.wandb")
        # W&B's own process may still write when `finish` has returned.
        wait_until(lambda file=file: b"critic/rewards/mean" in file.read_bytes(), "the metric in W&B's file", 0.1)
        content = file.read_bytes()
        assert b"team-a run" in content
        assert value in content
    (kept,) = (first / "files/media/images").rglob("*.png")
    assert np.array_equal(np.asarray(Image.open(kept)), PICTURE)


def test_one_that_fails_is_told_once_and_counted_and_the_others_go_on(config: TrackingConfig, tmp_path: Path) -> None:
    """A file where its folder should be; the run itself and MLflow have everything."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("in the way")
    told: list[str] = []
    run, where = opened(config, ("tensorboard", "wandb"), tmp_path / "run", told=told)
    assert [*where] == ["wandb"]
    for step in range(2):
        run.log_step(step, {"reward": 0.5}, {"validation": Image.fromarray(PICTURE)})
    run.also.close(failed=False)
    assert len(told) == 1
    assert told[0].startswith("tensorboard, a tracker beside MLflow, has not got all of this run (FileExistsError: ")
    assert run.history("tracking/tensorboard_failures") == {0: 2.0, 1: 3.0}
    assert run.history("tracking/wandb_failures") == {}
    assert run.history("reward") == {0: 0.5, 1: 0.5}


def test_one_that_fails_at_every_step_is_told_at_the_first(config: TrackingConfig, tmp_path: Path) -> None:
    told: list[str] = []
    run, _ = opened(config, ("tensorboard",), tmp_path / "run", told=told)
    unfit: Any = {"reward": object()}
    for step in range(3):
        run.also.log(step, unfit)
    assert run.also.metrics() == {"tracking/tensorboard_failures": 3.0}
    run.also.close(failed=False)
    assert len(told) == 1


def test_what_cannot_be_had_is_refused(config: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key: W&B would ask for one at the terminal. No library: before anything starts."""
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(
        SecondTrackerError, match=r"tracking.also names wandb, which cannot begin a run: .*WANDB_API_KEY"
    ):
        opened(config, ("wandb",), tmp_path / "run")
    check_libraries(TrackingConfig(also=("tensorboard", "wandb")))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SecondTrackerError, match=r"pip install 'doubleflow\[wandb\]'"):
        check_libraries(TrackingConfig(also=("tensorboard", "wandb")))
    with pytest.raises(ValueError, match="also names a tracker twice: wandb, wandb"):
        TrackingConfig(also=("wandb", "wandb"))
