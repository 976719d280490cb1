# SPDX-License-Identifier: Apache-2.0
"""How two runs' metrics compare, and how far a run may be shortened. Whole runs: `platform/test_reproduce.py`."""

import json
import os
import signal
import sys
from pathlib import Path
from threading import Thread

import pytest

from flows.reproduce import DIFFERENT, _call, as_rows, check_recorded, compare_metrics, shortened
from tasks.cli.stopping import Stopped, handled, raise_it
from tasks.config.errors import ConfigError
from tasks.config.sweep import SweepConfig
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.history import NoTrainingConfig, RunHistory
from tasks.records.lineage import Lineage
from tasks.records.tracking import Tracker
from tests.support.mlflow_store import mlflow_in
from tests.support.patience import wait_until

pytestmark = pytest.mark.waits


def test_outcomes_metric_by_metric() -> None:
    old = {
        "same": {1: 0.1, 2: 0.2, 3: 9.0},
        "near": {1: 1000.0},
        "far": {1: 1.0},
        "gone": {1: 1.0, 2: 1.0},
        "nan": {1: float("nan")},
        "late": {3: 1.0},
        "timing_s/step": {1: 5.0},
        "machines/lost": {1: 1.0},
        "report/failures": {1: 1.0},
        "tracking/wandb_failures": {2: 3.0},
        "infinite": {1: 0.5, 2: float("inf")},
        "infinite no more": {1: 0.5, 2: float("inf")},
    }
    new = {"same": {1: 0.1, 2: 0.2}, "near": {1: 1000.001}, "far": {1: 1.1}, "gone": {1: 1.0}, "nan": {1: float("nan")}}
    new |= {"infinite": old["infinite"], "infinite no more": {1: 0.5, 2: 7.0}}
    found = {outcome.metric: outcome.outcome for outcome in compare_metrics(old, new, 2, 1e-5)}
    assert found == {
        "same": "equal",
        "near": "within tolerance",
        "far": "different",
        "gone": "different",
        "nan": "equal",
        "infinite": "equal",
        "infinite no more": "different",
    }


def test_what_is_missing_has_no_difference_that_json_could_not_have() -> None:
    outcomes = compare_metrics({"a": {0: 1.0}, "b": {0: 2.0}}, {"a": {}, "b": {0: 2.5}}, 1, 1e-3)
    rows = json.loads(json.dumps(as_rows(outcomes), allow_nan=False))
    assert {row["metric"]: (row["outcome"], row["difference"]) for row in rows} == {
        "a": (DIFFERENT, None),
        "b": (DIFFERENT, 0.25),
    }


def test_a_run_that_paces_itself_by_its_length_is_done_again_whole() -> None:
    window = {"rollout": {"algo": {"sde_window_mode": "decay", "sde_window_size": 2}}}
    schedule = {"actor": {"optim": {"lr_scheduler_type": "linear"}}}
    for policy, paced in ((window, "sde_window_mode decay"), (schedule, "lr_scheduler_type linear")):
        config = TrainConfig.model_validate({"actor_rollout_ref": policy}).model_dump(mode="json")
        assert shortened(config, 100, "again")["trainer"]["experiment_name"] == "again"
        with pytest.raises(ConfigError, match=f"{paced} paces itself by the run's length: iterations must be all 100"):
            shortened(config, 3, "again")
    with pytest.raises(ConfigError, match="give 1 to 100"):
        shortened(config, 101, "again")


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())
    return Tracker(config, "recorded")


def test_no_more_iterations_are_compared_than_were_recorded(tracker: Tracker) -> None:
    """A run that died before its first one would else be reproduced with nothing equal and nothing different."""
    history = RunHistory(tracker.client, tracker.run_id)
    tracker.log_step(0, {"val/reward/mean": 0.5})
    with pytest.raises(ConfigError, match=r"^run \w+, recorded, has recorded no iteration of a training"):
        check_recorded(history, 1)
    tracker.log_step(1, {"cost/images": 16.0})
    check_recorded(history, 1)
    with pytest.raises(ConfigError, match=r"^iterations is 3, but the run has recorded 1: give 1 to 1$"):
        check_recorded(history, 3)


def test_a_run_is_done_again_as_it_began(tracker: Tracker) -> None:
    """Continued with another validation it measures otherwise; it is as long as it has become."""
    empty = Lineage({}, b"", {}, [])
    config = TrainConfig(trainer={"total_training_steps": 2})
    tracker.log_start(config, {})
    assert RunHistory(tracker.client, tracker.run_id).first_config() == config.model_dump(mode="json"), "of older ones"
    tracker.log_lineage(empty, 0, config)
    changes = {"trainer": {"total_training_steps": 5}, "actor_rollout_ref": {"rollout": {"val_kwargs": {"n": 7}}}}
    tracker.log_start(config.with_changes(changes), {})
    tracker.log_lineage(empty, 2, config.with_changes(changes))
    found = RunHistory(tracker.client, tracker.run_id).first_config()
    assert found["actor_rollout_ref"]["rollout"]["val_kwargs"]["n"] == config.actor_rollout_ref.rollout.val_kwargs.n
    assert found["trainer"]["total_training_steps"] == 5


def test_a_sweep_s_own_run_is_told_from_one_that_trains(tracker: Tracker) -> None:
    """Its config is what is searched."""
    tracker.log_start(SweepConfig(space={"trainer.seed": {"choices": [1, 2]}}), {})
    with pytest.raises(
        NoTrainingConfig, match=r"^run \w+, recorded, neither trains nor measures: of a sweep give one of"
    ):
        RunHistory(tracker.client, tracker.run_id).config()


CHILD = """
import signal, sys, time
from pathlib import Path

def end(number, frame):
    time.sleep(0.5)  # as a run takes some to tell MLflow
    Path(sys.argv[2]).write_text("in order")
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_sigterm_lets_the_run_that_is_done_again_end_in_order(tmp_path: Path) -> None:
    """Killed, it would be RUNNING in MLflow."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"

    def send() -> None:
        wait_until(begun.exists, "the command's start")
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=send, daemon=True).start()
    with handled(raise_it), pytest.raises(Stopped):
        _call(sys.executable, "-c", CHILD, str(begun), str(ended))
    assert ended.read_text() == "in order"
