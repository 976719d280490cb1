# SPDX-License-Identifier: Apache-2.0
"""What a run has in MLflow where the answers to its requests are lost: MLflow has done what was asked all the same."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient

from tasks.config.tracking import TrackingConfig
from tasks.records.history import HistoryError, RunHistory
from tasks.records.model_registry import Measurements, champion, measurable_versions, promote, register
from tasks.records.tracking import Tracker
from tests.support.lost_answers import LostAnswers, lost_answers
from tests.support.platform_helpers import mlflow_served_in

MAKE = re.compile(rb"POST \S*/(runs/create|logged-models|runs/outputs|model-versions/create) ")
DOWNLOAD = re.compile(rb"GET \S*/mlflow-artifacts/artifacts/\S*\.parquet ")
WEIGHTS = re.compile(rb"GET \S*/mlflow-artifacts/artifacts/\S*weights\.bin ")
REMOVE = re.compile(rb"DELETE \S*/mlflow-artifacts/")

pytestmark = pytest.mark.slow  # MLflow's server is started


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of MLflow's server on loopback."""
    with mlflow_served_in(tmp_path_factory.mktemp("mlflow")) as port:
        yield port


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client asks once, and nothing but a test says where."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def tracked(lossy: LostAnswers, experiment: str) -> Tracker:
    return Tracker(TrackingConfig(uri=lossy.address, experiment=experiment), "a-run")


@pytest.mark.parametrize("retries", ["0", "3"])
def test_what_a_run_makes_is_made_once(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: str
) -> None:
    """Also where the environment has MLflow's client ask again by itself: it would not look for what it has made."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)
    (tmp_path / "weights.bin").write_bytes(b"trained")
    name = f"retries-{retries}"
    with lost_answers("127.0.0.1", port, MAKE) as lossy:
        tracker = tracked(lossy, name)
        version = register(tracker, name, tmp_path, 2, {})
        promote(tracker.client, version)
    client = MlflowClient(f"http://127.0.0.1:{port}")
    (run,) = client.search_runs([tracker.experiment_id])
    assert run.info.run_id == tracker.run_id
    (model,) = client.search_logged_models([tracker.experiment_id])
    assert model.status == "READY"
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert [found.version for found in measurable_versions(client, name)] == [version.version]
    best = champion(client, name)
    assert best is not None
    assert best.version == version.version
    assert len(lossy.lost) == 4


def test_a_file_that_is_gone_already_is_removed(port: int) -> None:
    with lost_answers("127.0.0.1", port, REMOVE) as lossy:
        tracker = tracked(lossy, "removes")
        for file in ("one", "other"):
            tracker.log_bytes(b"", f"pictures/{file}")
        tracker.remove(["pictures/one"])
        assert tracker.listed("pictures") == ["pictures/other"]
    assert len(lossy.lost) == 1


def test_a_download_that_breaks_is_made_again(port: int) -> None:
    """MLflow says of it that there is no such artifact; which it says of one that is not there, too."""
    with lost_answers("127.0.0.1", port, DOWNLOAD) as lossy:
        tracker = tracked(lossy, "downloads")
        tracker.log_table(pd.DataFrame({"reward": [0.5]}), "validation/000010.parquet")
        assert [table.reward.tolist() for table in tracker.tables("validation").values()] == [[0.5]]
        with pytest.raises(HistoryError, match=r"has no validation/000020\.parquet"):
            RunHistory(tracker.client, tracker.run_id).table("validation", 20)
    assert {Path(path).stem for path in lossy.lost} == {"000010", "000020"}


def test_a_versions_files_are_asked_for_again(port: int, tmp_path: Path) -> None:
    """They are gigabytes, on which a scheduled sweep waits."""
    (source := tmp_path / "weights").mkdir()
    (source / "weights.bin").write_bytes(trained := os.urandom(1 << 20))
    with lost_answers("127.0.0.1", port, WEIGHTS) as lossy:
        tracker = tracked(lossy, "versions")
        version = register(tracker, "versions", source, 2, {})
        with Measurements(tracker.client, "versions", "digest").exported(tracker, version, tmp_path / "runs") as folder:
            assert (folder / "weights.bin").read_bytes() == trained
    assert len(lossy.lost) == 1
