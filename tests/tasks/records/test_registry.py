# SPDX-License-Identifier: Apache-2.0
"""The model registry on a real MLflow: an iteration has one version, also where a registration was cut off."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient
from prefect.logging import disable_run_logger

from flows.validation_sweep import Sweep
from tasks.config.measurement import Measurement
from tasks.config.reward import GuardConfig
from tasks.config.tracking import TrackingConfig
from tasks.config.trainer import TrainerConfig
from tasks.config.tree import TrainConfig
from tasks.records.guards import HACKING_TAG, Guard, GuardWatch
from tasks.records.model_registry import HELD_OUT_TAG, Measurements, champion, doubt_versions, promote, register
from tasks.records.notes import Weights
from tasks.records.tracking import Tracker
from tasks.run.watching import watch_guards
from tasks.system.processes import COPY, maker_lives
from tests.support.mlflow_store import mlflow_in
from tests.support.platform_helpers import mlflow_served_in


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Tracker(TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri()), "a-run")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"trained")
    return folder


class Killed(MlflowClient):
    """A client whose process ends while it uploads files."""

    def log_model_artifacts(self, *arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt


class KilledLater(MlflowClient):
    """A client whose process ends before it says that all files are there."""

    def finalize_logged_model(self, *arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt


def versions(tracker: Tracker) -> list[int]:
    return sorted(int(version.version) for version in tracker.client.search_model_versions("name = 'tiny'"))


def test_an_iteration_is_registered_once(tracker: Tracker, weights: Path) -> None:
    first, again = (register(tracker, "tiny", weights, 2, {"reward": "0.5"}) for _ in range(2))
    assert (first.version, versions(tracker)) == (again.version, [1])
    assert first.tags == {"doubleflow.iteration": "2", "reward": "0.5"}
    register(tracker, "tiny", weights, 3, {})
    assert versions(tracker) == [1, 2]


def test_every_name_that_a_run_may_have_is_a_models_name_too(tracker: Tracker, weights: Path) -> None:
    name = TrainerConfig(experiment_name="lr_0.3-b.1").experiment_name
    first, again = (register(tracker, name, weights, 2, {}) for _ in range(2))
    assert (first.name, first.version) == (name, again.version)


def test_a_version_is_described_also_where_a_registration_was_cut_off_before(tracker: Tracker, weights: Path) -> None:
    what = Weights(str(weights), "QwenImagePipeline", "data/base_model", lora=False)
    bare = register(tracker, "tiny", weights, 2, {HELD_OUT_TAG: "0.750"})
    assert not bare.description
    described = register(tracker, "tiny", weights, 2, {}, what)
    assert described.version == bare.version
    assert "Held-out reward **0.750**, after 2 iterations" in described.description
    assert 'download_artifacts("models:/tiny/1")' in described.description
    assert str(weights) in described.description


@pytest.mark.parametrize("killed", [Killed, KilledLater])
def test_a_registration_that_was_cut_off_is_completed(
    tracker: Tracker, weights: Path, tmp_path: Path, killed: type[MlflowClient]
) -> None:
    whole = tracker.client
    tracker.client = killed(tracker.uri, tracker.uri)
    with pytest.raises(KeyboardInterrupt):
        register(tracker, "tiny", weights, 2, {})
    tracker.client = whole
    assert versions(tracker) == []
    register(tracker, "tiny", weights, 2, {})
    experiment = whole.get_run(tracker.run_id).info.experiment_id
    (model,) = whole.search_logged_models([experiment])
    assert model.status == "READY"
    (version,) = whole.search_model_versions("name = 'tiny'")
    assert version.source == model.artifact_location
    assert next(tmp_path.glob("artifacts/models/*/artifacts/weights.bin")).read_bytes() == b"trained"


@pytest.mark.slow  # it starts MLflow's server
def test_a_versions_copy_from_a_server_is_gone_after_its_use(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has gigabytes, and a scheduled sweep measures many."""
    with mlflow_served_in(tmp_path) as port:
        address = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        tracker = Tracker(TrackingConfig(uri=address), "a-run")
        version = register(tracker, "tiny", weights, 2, {})
        measured = Measurements(tracker.client, "doubleflow", "digest")
        (temporary := tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with measured.exported(tracker, version, tmp_path / "runs") as folder:
            (copy,) = (tmp_path / "runs").iterdir()
            assert folder.is_relative_to(copy)
            assert (folder / "weights.bin").read_bytes() == b"trained"
            assert maker_lives(copy.name, COPY)
        assert not list((tmp_path / "runs").iterdir())
        assert not list(temporary.iterdir())


def test_files_that_are_there_are_not_copied(tracker: Tracker, weights: Path, tmp_path: Path) -> None:
    version = register(tracker, "tiny", weights, 2, {})
    with Measurements(tracker.client, "doubleflow", "digest").exported(tracker, version, tmp_path / "runs") as folder:
        assert folder == next(tmp_path.glob("artifacts/models/*/artifacts"))
    assert (folder / "weights.bin").read_bytes() == b"trained"
    assert not (tmp_path / "runs").exists()


def test_a_version_that_guards_flagged_is_not_made_the_champion(tracker: Tracker, weights: Path) -> None:
    """The tag comes with the verdict, when versions that are in doubt are there already: it is read again."""
    good, doubtful, another = (register(tracker, "tiny", weights, iteration, {}) for iteration in (10, 11, 30))
    assert doubt_versions(tracker, "tiny", 11, "the held-out reward rises while taste falls") is None
    assert promote(tracker.client, good) is None
    for version in (doubtful, another):
        assert promote(tracker.client, version) == "the held-out reward rises while taste falls"
    best = champion(tracker.client, "tiny")
    assert best is not None
    assert best.version == good.version
    assert doubt_versions(tracker, "nobody", 0, "a run that has registered nothing has nothing to tag") is None


def test_a_champion_that_guards_flag_later_is_so_no_more(tracker: Tracker, weights: Path) -> None:
    """A flag takes two validations, and a sweep may have come in between."""
    good, doubtful = (register(tracker, "tiny", weights, iteration, {}) for iteration in (10, 11))
    promote(tracker.client, good)
    assert doubt_versions(tracker, "tiny", 11, "taste falls") is None
    assert champion(tracker.client, "tiny") is not None
    tracker.client.set_registered_model_alias("tiny", "champion", doubtful.version)
    assert doubt_versions(tracker, "tiny", 11, "taste falls") == str(doubtful.version)
    assert champion(tracker.client, "tiny") is None


def test_a_champion_of_other_means_is_not_replaced_unseen(tracker: Tracker, weights: Path) -> None:
    """It is never measured, so a version that beats the base model may be worse than it."""
    better = register(tracker, "tiny", weights, 10, {})
    own = tracker.client.create_model_version("tiny", source=weights.as_uri())
    tracker.client.set_registered_model_alias("tiny", "champion", own.version)
    assert promote(tracker.client, better) == (
        "version 2, the champion, was registered by other means and is never measured: move or remove its alias by hand"
    )
    tracker.client.delete_registered_model_alias("tiny", "champion")
    assert promote(tracker.client, better) is None


def test_a_champion_of_other_means_is_not_measured_by_a_sweep(tracker: Tracker, weights: Path) -> None:
    """It has no iteration, and may have any files: a sweep that took it up would fail each night."""
    inputs: Any = SimpleNamespace(config=TrainConfig.model_validate({"trainer": {"experiment_name": "tiny"}}))
    measured, run = Measurements(tracker.client, "doubleflow", "digest", {}), SimpleNamespace()
    sweep = Sweep(inputs, [], Measurement(), measured, run)
    ours = register(tracker, "tiny", weights, 10, {})
    own = tracker.client.create_model_version("tiny", source=weights.as_uri())
    taken_up = {}
    for version in (ours, own):
        tracker.client.set_registered_model_alias("tiny", "champion", version.version)
        taken_up[version.version] = [found.version for found in sweep.stale_champion([])]
    assert taken_up == {ours.version: [ours.version], own.version: []}


def test_a_guard_that_falls_again_dooms_what_was_registered_since(tracker: Tracker, weights: Path) -> None:
    """Fallen from 20 on, back at 50, and fallen again at 60 and 70: at 60 there is no flag yet, as at 20 before."""
    config, spread = TrainConfig.model_validate({"trainer": {"experiment_name": "tiny"}}), np.linspace(-0.1, 0.1, 12)
    guards = GuardWatch(GuardConfig(), {"taste": Guard("", "reward/taste", 0.2)}, lambda name: {}, dict)
    told = {}
    for iteration, taste in {0: 0.5, 10: 0.6, 20: 0.2, 30: 0.2, 40: 0.2, 50: 0.7, 60: 0.2, 70: 0.2}.items():
        rewards = {"reward": 0.5 + iteration / 100 + spread, "reward/taste": taste + spread[::-1]}
        table = pd.DataFrame({"uid": [f"prompt-{i}" for i in range(len(spread))], **rewards})
        rng = np.random.default_rng(iteration)
        table[["reward", "reward/taste"]] += rng.normal(0, 1e-3, (len(spread), 2))
        with disable_run_logger():
            watch_guards(config, guards, tracker, iteration, {}, table)
        told[iteration] = register(tracker, "tiny", weights, iteration, {}).version
    assert guards.flagged == {"taste"}
    doubted = {
        iteration
        for iteration, number in told.items()
        if HACKING_TAG in tracker.client.get_model_version("tiny", number).tags
    }
    assert doubted == {20, 60}, "the others get the tag as they are registered, from the guards' newest word"
