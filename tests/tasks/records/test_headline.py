# SPDX-License-Identifier: Apache-2.0
"""What MLflow's pages show first of an experiment and of a run, as its client reads it."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from PIL import Image

from tasks.config.tracking import TrackingConfig
from tasks.records.headline import COLUMNS, HEADLINE, headline, run_page, runs_page, runs_view
from tasks.records.history import RunHistory, comparable
from tasks.records.tracking import STEP_MARK, Tracker
from tests.support.mlflow_store import mlflow_in

MEASURED = {
    "critic/rewards/mean": 0.5,
    "val/reward/mean": 0.6,
    "cost/gpu_hours": 2.0,
    "cost/hours": 0.5,
    "perf/total_num_images": 192.0,
    "perf/time_per_step": 24.0,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())


def test_the_metrics_that_count_have_copies_of_what_was_measured() -> None:
    copies = {f"{HEADLINE}/{name}" for name in COLUMNS}
    assert headline(MEASURED).keys() == copies
    assert headline(MEASURED)[f"{HEADLINE}/images_per_second"] == 8.0
    assert headline({"actor/lr": 1.0}) == {}
    assert headline({"cost/hours": 0.010072592526109172}) == {f"{HEADLINE}/hours": 0.01007}, "as a table shows it"


def test_a_step_has_its_headline_and_pictures_in_the_section_that_sorts_first(config: TrackingConfig) -> None:
    run = Tracker(config, "a-run")
    run.log_step(2, MEASURED, {"validation": Image.new("RGB", (8, 8))})
    metrics = run.latest()
    assert metrics[f"{HEADLINE}/held_out"] == metrics["val/reward/mean"] == 0.6
    assert min(metrics).startswith(f"{HEADLINE}/")
    assert run.picture_steps("validation") == {2}
    history = RunHistory(run.client, run.run_id)
    assert history.pictures().keys() == {"validation"}, "the section is no part of its name"
    (picture,) = {path for paths in history.pictures().values() for path in paths.values()}
    assert picture.startswith(f"images/{HEADLINE}~validation")
    assert f"{HEADLINE}/images_per_second" not in comparable(history.metrics()), "it is measured anew"


def test_pictures_of_before_the_section_are_still_found(config: TrackingConfig) -> None:
    run = Tracker(config, "a-run")
    run.client.log_image(run.run_id, Image.new("RGB", (8, 8)), key="validation", step=1)
    run.client.log_metric(run.run_id, STEP_MARK, 1, step=1)
    run.log_step(2, {}, {"validation": Image.new("RGB", (8, 8))})
    assert run.picture_steps("validation") == {1, 2}
    assert RunHistory(run.client, run.run_id).pictures()["validation"].keys() == {1, 2}


def test_an_experiment_is_of_trained_models_and_has_a_view_of_reward_and_cost(config: TrackingConfig) -> None:
    """Also one that was there before; what somebody chose there stays."""
    client = MlflowClient(config.uri)
    old = client.create_experiment("doubleflow", tags={"mlflow.experiment.primaryMetric.name": "mine"})
    Tracker(config, "a-run")
    Tracker(config.model_copy(update={"experiment": "new"}), "a-run")
    for name in ("doubleflow", "new"):
        tags = client.get_experiment_by_name(name).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"
        saved = json.loads(tags["mlflow.sharedViewState.doubleflow"])
        assert (type(saved["name"]), type(saved["createdAt"])) == (str, int)
        assert json.loads(saved["state"]) == runs_view()
    assert client.get_experiment(old).tags["mlflow.experiment.primaryMetric.name"] == "mine"


def test_links_open_the_pages_of_trained_models() -> None:
    assert runs_page("1") == "/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=doubleflow"
    assert run_page("1", "a") == "/#/experiments/1/runs/a?workflowType=machine_learning"
    assert run_page("1", "a", "artifacts") == "/#/experiments/1/runs/a/artifacts?workflowType=machine_learning"
