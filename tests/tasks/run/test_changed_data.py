# SPDX-License-Identifier: Apache-2.0
"""A run whose data are others at its next start is refused, before anything of it starts."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import ray

from flows.reproduce import recorded_code
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.history import RunHistory
from tasks.records.lineage import Lineage
from tasks.records.run_store import CHECKPOINTS, STAGES, CheckpointError, CheckpointStore, RunState
from tasks.records.tracking import Tracker
from tasks.run.measured_alike import (
    comparable_validations,
    measured_otherwise,
    record_measurement,
    recorded_measurements,
)
from tasks.run.opening import DATA_TAG, _begins_after, _check_kept, _refuse_other_data, _told_if_gone, open_run
from tasks.run.start_times import StartTimes
from tests.support.mlflow_store import mlflow_in

COMPLAINT = {
    "other-weights": "from other prompts, embeddings or pairs",
    "data-other": "from other weights in model.path, model.initial_weights or actor.teacher_path",
}


@pytest.mark.parametrize("kept", [CHECKPOINTS, f"{STAGES}/rollout", f"{STAGES}/reward"])
@pytest.mark.parametrize(("digest", "complaint"), COMPLAINT.items())
def test_what_is_kept_of_other_data_is_seen_before_ray_starts(
    tmp_path: Path, kept: str, digest: str, complaint: str
) -> None:
    """No MLflow run is taken up either: the address of the tracking answers nobody."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path}, tracking={"uri": "http://127.0.0.1:9"})
    content = {CHECKPOINTS: "trainer", f"{STAGES}/rollout": "batches", f"{STAGES}/reward": "scores"}[kept]
    state = RunState(1, config.digest(), "data-weights", "run")
    CheckpointStore(config.run_dir / kept, content=content).save(state, lambda folder: (folder / "x").touch())
    inputs = SimpleNamespace(digest=digest)
    with pytest.raises(CheckpointError, match=f"{kept}/iter_000001 was made {complaint}: bring those back, "):  # noqa: SIM117
        with open_run(config, inputs, config, StartTimes()):
            pass
    assert not ray.is_initialized()


def test_what_is_kept_of_an_iteration_that_a_checkpoint_has_stops_no_run(tmp_path: Path) -> None:
    """Nothing asks for it any more; what is of a later iteration the run would go on with."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    store = CheckpointStore(config.run_dir / CHECKPOINTS)
    kept = CheckpointStore(config.run_dir / STAGES / "rollout", content="batches")
    store.save(RunState(2, config.digest(), "data-weights", "run"), lambda folder: (folder / "x").touch())
    for iteration in (2, 3):
        kept.save(RunState(iteration, config.digest(), "other-weights", "run"), lambda folder: (folder / "x").touch())
        if iteration == 2:
            _check_kept(config, "data-weights", store)
    with pytest.raises(CheckpointError, match="rollout/iter_000003 was made from other prompts"):
        _check_kept(config, "data-weights", store)


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """MLflow in the folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())


def test_what_mlflow_has_of_other_data_is_not_gone_on_with(tmp_path: Path, tracking: TrackingConfig) -> None:
    """As of a run that was killed after its first validation, which no checkpoint has."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    first = Tracker(tracking, "a-run")
    first.log_start(config, {DATA_TAG: "data-weights"})
    _refuse_other_data(config, "other-weights", Tracker(tracking, "a-run", first.run_id))
    first.log_step(0, {"val/reward/mean": 0.5})
    again = Tracker(tracking, "a-run", first.run_id)
    _refuse_other_data(config, "data-weights", again)
    for digest, complaint in COMPLAINT.items():
        with pytest.raises(CheckpointError, match=f"what MLflow has of .* was made {complaint}: bring those back"):
            _refuse_other_data(config, digest, again)


def test_what_a_start_measures_otherwise_than_those_before_is_told(tmp_path: Path, tracking: TrackingConfig) -> None:
    """A reward's code was edited, or validation draws other pictures: one curve would have both."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    first = Tracker(tracking, "a-run")

    def otherwise(start: TrainConfig, version: str, tracker: Tracker) -> list[str]:
        return list(measured_otherwise(start, {"reward.mine": version}, tracker, recorded_measurements(tracker)))

    record_measurement(config, {"reward.mine": "source-1"}, first, recorded_measurements(first))
    first.log_start(config, {"reward.mine": "source-1"})
    assert not otherwise(config, "source-2", first), "nothing is measured yet"
    first.log_step(3, {"val/reward/mean": 0.5})
    again = Tracker(tracking, "a-run", first.run_id)
    assert not otherwise(config, "source-1", again)
    (told,) = otherwise(config, "source-2", again)
    assert "reward.mine is source-2 now and was source-1 up to iteration 3" in told
    fewer = config.with_changes({"actor_rollout_ref": {"rollout": {"val_kwargs": {"max_prompts": 2}}}})
    (told,) = otherwise(fewer, "source-1", again)
    assert "up to iteration 3 (rollout.val_kwargs.max_prompts is 2 and was " in told


def test_guards_compare_what_was_measured_as_it_is_now(tmp_path: Path, tracking: TrackingConfig) -> None:
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    fewer = config.with_changes({"actor_rollout_ref": {"rollout": {"val_kwargs": {"max_prompts": 2}}}})
    run_id = Tracker(tracking, "a-run").run_id

    def begin(start: TrainConfig, *iterations: int, version: str = "source-1") -> set[int]:
        """A start that makes these iterations, of which the even ones are validated."""
        tracker = Tracker(tracking, "a-run", run_id)
        record_measurement(start, {"reward.mine": version}, tracker, recorded_measurements(tracker))
        tracker.log_start(start, {})
        for iteration in iterations:
            measured = {} if iteration % 2 else {"validation": pd.DataFrame({"uid": ["a"], "reward": [0.5]})}
            tracker.log_step(iteration, {"val/reward/mean": 0.5}, tables=measured)
        return set(comparable_validations(tracker))

    assert begin(config, 0) == {0}
    assert begin(fewer) == set(), "of the same iteration, which no checkpoint has"
    assert begin(config, 1, 2, 3) == {0, 2}, "set back before anything was measured"
    assert begin(config, 4, 5) == {0, 2, 4}
    assert begin(fewer, 6) == {6}, "whichever checkpoint it goes on from"
    assert begin(config, 7, 8) == {8}
    assert begin(config.with_changes({"trainer": {"save_freq": 3}}), 9, 10) == {8, 10}
    assert begin(config, 11, 12, version="source-2") == {12}, "scores of another reward are no fall"
    assert begin(config, 13, 14, version="source-2") == {12, 14}


def test_a_damaged_record_of_measurements_is_named_and_stays(tmp_path: Path, tracking: TrackingConfig) -> None:
    tracker = Tracker(tracking, "a-run")
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    record_measurement(config, {}, tracker, recorded_measurements(tracker))
    tracker.log_step(0, {"val/reward/mean": 0.5})
    (file,) = tmp_path.rglob("validations.json")
    whole = file.read_text()
    written = file.stat().st_mtime_ns
    record_measurement(config, {}, tracker, recorded_measurements(tracker))
    assert file.stat().st_mtime_ns == written, "what is not written cannot be cut off"
    file.write_text(whole[:-9])
    with pytest.raises(CheckpointError, match=f"validations.json of run {tracker.run_id} is damaged .* remove it"):
        recorded_measurements(tracker)


def test_where_the_records_of_a_first_start_came_from_stays() -> None:
    """A run that was killed before its first checkpoint begins anew, maybe from other code, and its records stay."""
    assert [_begins_after(0, set()), _begins_after(0, {0}), _begins_after(0, {0, 1, 2})] == [0, 0, 2]
    assert [_begins_after(2, {0, 1, 2, 3}), _begins_after(2, {0, 1, 2}), _begins_after(2, set())] == [3, 2, 2]


def test_no_start_replaces_where_the_records_of_another_came_from(tmp_path: Path, tracking: TrackingConfig) -> None:
    """Some begin from one checkpoint, and from other code each; a first one that has recorded nothing made nothing."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path, "total_training_steps": 50})
    run_id = Tracker(tracking, "a-run").run_id
    commit = "c" * 40

    def begin(code: str, checkpoint: int, *iterations: int) -> None:
        tracker = Tracker(tracking, "a-run", run_id)
        start = Lineage({"mlflow.source.git.commit": commit}, code.encode(), {"code": code}, [])
        of_the_start = config.with_changes({"trainer": {"experiment_name": code}})
        tracker.log_start(of_the_start, {})
        tracker.log_lineage(start, _begins_after(checkpoint, tracker.logged_steps), of_the_start)
        for iteration in iterations:
            tracker.log_step(iteration, {"cost/images": 16.0})

    begin("unrecorded", 0)
    begin("first", 0, 0)
    begin("second", 0, *range(1, 11))
    begin("third", 10, *range(11, 16))
    begin("fourth", 10)
    begin("fifth", 10)
    begin("sixth", 15)
    begin("seventh", 12, 16, 17)
    begin("eighth", 20)
    expected = {
        **{"000000": "first", "000000-2": "second", "000010": "third", "000015": "fourth", "000015-2": "fifth"},
        **{"000015-3": "sixth", "000015-4": "seventh", "000017": "eighth"},
    }
    history = RunHistory(Tracker(tracking, "a-run", run_id).client, run_id)
    folders = sorted(Path(item.path).name for item in history.client.list_artifacts(run_id, "lineage"))
    assert folders == sorted(expected)
    for name, code in expected.items():
        assert history.content(f"lineage/{name}/code.patch") == code.encode()
        assert json.loads(history.content(f"lineage/{name}/environment.json")) == {"code": code}
        assert json.loads(history.content(f"lineage/{name}/config.json"))["trainer"]["experiment_name"] == code
        digest = hashlib.sha256(code.encode()).hexdigest()
        assert history.run.data.tags[f"doubleflow.lineage.{name}"] == f"{commit} sha256:{digest}"
    assert recorded_code(history) == (commit, b"first")
    assert history.first_config()["trainer"]["experiment_name"] == "first"


def test_a_field_that_an_older_version_had_not_is_no_other_measurement(
    tmp_path: Path, tracking: TrackingConfig
) -> None:
    """A run that such a version began goes on with all of its validations."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    first, older = Tracker(tracking, "a-run"), config.model_dump(mode="json")
    del older["actor_rollout_ref"]["rollout"]["val_kwargs"]["n"]
    for file in ("config.json", "lineage/000000/config.json"):
        first.client.log_dict(first.run_id, older, file)
    first.log_step(3, {"val/reward/mean": 0.5}, tables={"validation": pd.DataFrame({"uid": ["a"], "reward": [0.5]})})
    again = Tracker(tracking, "a-run", first.run_id)
    measurements = recorded_measurements(again)
    assert not list(measured_otherwise(config, {}, again, measurements))
    record_measurement(config, {"reward.mine": "source-1"}, again, measurements)
    assert comparable_validations(again).keys() == {3}


@pytest.mark.parametrize("has_record", [True, False])
def test_a_record_without_versions_of_rewards_has_those_of_the_start_before(
    has_record: bool, tmp_path: Path, tracking: TrackingConfig
) -> None:
    """As versions of before those were recorded have left it; what is recorded then, no later start's tags replace."""
    config = TrainConfig(trainer={"default_local_dir": tmp_path})
    table = pd.DataFrame({"uid": ["a"], "reward": [0.5]})
    first = Tracker(tracking, "a-run")
    if has_record:
        record_measurement(config, {}, first, recorded_measurements(first))
    first.log_start(config, {"reward.mine": "source-1"})
    first.log_step(3, {"val/reward/mean": 0.5}, tables={"validation": table})

    def begin(version: str) -> set[int]:
        """A start that is ended before it measures anything."""
        tracker = Tracker(tracking, "a-run", first.run_id)
        record_measurement(config, {"reward.mine": version}, tracker, recorded_measurements(tracker))
        tracker.log_start(config, {"reward.mine": version})
        return set(comparable_validations(tracker))

    assert [begin(f"source-{number}") for number in (1, 2, 2, 1, 2)] == [{3}, set(), set(), {3}, set()]


@pytest.mark.parametrize("work", ["save", "forget"])
def test_a_run_whose_folder_is_gone_says_so_and_makes_no_other(tmp_path: Path, work: str) -> None:
    """It would go on in a folder without its record and its older checkpoints, and the next start begin anew."""
    folder = tmp_path / "run"
    store = CheckpointStore(folder / CHECKPOINTS)
    does = {
        "save": lambda: store.save(RunState(2, "c", "d", "run"), lambda inner: (inner / "x").touch()),
        "forget": lambda: store.remove(through=1),
    }
    does[work]()
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="run was removed, moved or unmounted while the run worked in it: bring"):  # noqa: SIM117
        with _told_if_gone(folder):
            does[work]()
    assert not folder.exists()


def test_a_single_file_that_is_missing_is_told_as_it_was(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / CHECKPOINTS)
    with pytest.raises(FileNotFoundError, match="other"), _told_if_gone(tmp_path):
        (tmp_path / "other").read_text()
