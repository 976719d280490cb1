# SPDX-License-Identifier: Apache-2.0
"""What a finished run tells its owner."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlflow.entities import RunInfo
from PIL import Image
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.headline import run_page
from tasks.records.pictures import titled
from tasks.records.tracking import Tracker
from tasks.run.held_out_grids import keep_grid
from tasks.run.summary import Summary, keep_good_weights, mlflow_page, prefect_page, summarise, version_tags
from tasks.run.training import OPTIMIZER_STEPS, TrainingRun
from tasks.run.watching import last_good
from tasks.system.stopwatch import Stopwatch
from tests.support.mlflow_store import mlflow_in

NAN = float("nan")
WHOLE = Summary(
    run_name="r-1",
    mlflow_run_id="0",
    tracking_uri="sqlite:///mlflow.db",
    iterations=3,
    held_out_before=0.5,
    held_out_after=0.75,
    validations=2,
    minutes=1.0,
    weights="runs/r-1/weights",
    registered="models:/r/1",
    base_model="data/base_model",
    picture="runs/r-1/before_after.png",
    report="runs/r-1/report.html",
)


def lines(summary: Summary) -> dict[str, str]:
    """First word of each line -> the rest."""
    return dict((line.split(maxsplit=1)) for line in summary.text().split("\n"))


def test_a_change_is_told_only_between_two_measurements() -> None:
    assert lines(WHOLE)["held-out"] == "0.500 -> 0.750"
    unchanged = replace(WHOLE, held_out_after=0.5)
    assert lines(unchanged)["held-out"] == "0.500 -> 0.500", "that nothing was learnt is a result"
    once = replace(WHOLE, held_out_before=0.75, validations=1)
    assert lines(once)["held-out"] == "0.750 (measured once)"
    offline = replace(WHOLE, held_out_before=NAN, held_out_after=NAN, validations=0)
    assert lines(offline)["held-out"].startswith("not measured")
    missing = replace(WHOLE, held_out_before=NAN, held_out_after=NAN, validations=1)
    assert lines(missing)["held-out"] == "nan (measured once)", "measured, and every score was missing"


def test_weights_that_never_moved_are_not_offered() -> None:
    told = lines(replace(WHOLE, weights="", registered=""))
    assert "registered" not in told
    assert told["weights"] == (
        "neither exported nor registered: no iteration made an optimiser step, so they still are those of "
        "data/base_model"
    )
    assert lines(WHOLE)["registered"] == "models:/r/1"
    averaged = lines(replace(WHOLE, weights="", why_unmoved="the average stood"))
    assert averaged["weights"].startswith("neither exported nor registered: the average stood, so they still are")


def run_in(folder: Path, **parts: Any) -> TrainingRun:
    """A run in this folder without actors: `parts` are what a test needs of it."""
    empty: Any = dict.fromkeys(("inputs", "trainer", "tracker", "store", "stages", "guards", "report"))
    return TrainingRun(TrainConfig.model_validate({"trainer": {"default_local_dir": str(folder)}}), **empty | parts)


def test_a_run_tells_its_first_and_last_measurement_and_what_all_of_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the best one on the way; and the pictures are of those two."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())
    run = run_in(tmp_path, tracker=Tracker(tracking, "a-run"), report=SimpleNamespace(path="page"))
    for step, held_out in {0: 0.25, 2: 0.75, 3: 0.5}.items():
        run.tracker.log_step(step, {"val/reward/mean": held_out})
        keep_grid(run.config, step, Image.new("RGB", (8, 8), (80 * step, 0, 0)))
    run.iteration, run.spent, run.learned = 3, {"cost/gpu_hours": 0.5}, {OPTIMIZER_STEPS: 0.0}
    with disable_run_logger():  # there is no flow here
        found = summarise(run, minutes=7.0)
    assert (found.held_out_before, found.held_out_after, found.validations) == (0.25, 0.5, 3)
    assert (found.iterations, found.minutes, found.gpu_minutes) == (3, 7.0, 30.0)
    assert (found.weights, found.registered) == ("", "")
    picture = np.asarray(Image.open(found.picture))
    assert {*picture[..., 0][picture[..., 1] == 0]} == {0, 240}, "iteration 2 is not among them"


@pytest.mark.parametrize(("rank", "kind"), [(0, "full"), (4, "lora")])
def test_a_version_says_what_its_weights_are(tmp_path: Path, rank: int, kind: str) -> None:
    run = run_in(tmp_path, guards=SimpleNamespace(sentence=lambda now: None))
    run.config = run.config.with_changes({"actor_rollout_ref": {"model": {"lora_rank": rank, "lora_alpha": 8}}})
    assert version_tags(run)["doubleflow.weights"] == kind


def test_of_the_good_weights_the_newest_are_kept(tmp_path: Path) -> None:
    """What is measured to be good replaces what was before."""
    run = run_in(tmp_path, trainer=SimpleNamespace(export=lambda folder: folder.mkdir()))
    for run.iteration in (2, 4):
        keep_good_weights(Stopwatch(), run)
        newest = last_good(run.config)
        assert newest is not None
        assert (int(newest.name), list(newest.parent.iterdir())) == (run.iteration, [newest])


def test_gpu_minutes_are_told_where_a_gpu_was_held() -> None:
    assert lines(WHOLE)["trained"] == "3 iterations, 1.0 minutes"
    assert lines(replace(WHOLE, gpu_minutes=2.04))["trained"] == "3 iterations, 1.0 minutes, 2.0 GPU-minutes"


def test_pages_are_those_of_the_servers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told = lines(replace(WHOLE, mlflow_page="http://a/#/1", prefect_page="http://b/2"))
    assert told["MLflow"] == "page    http://a/#/1"
    assert told["Prefect"] == "page   http://b/2"
    recorded = RunInfo("f00", "7", "me", "FINISHED", 0, 1, "active")
    assert mlflow_page("http://127.0.0.1:5000/", recorded) == f"http://127.0.0.1:5000{run_page('7', 'f00')}"
    monkeypatch.chdir(Path(sys.executable).parents[1])
    assert mlflow_page("sqlite:///mlflow.db", recorded) == "bin/mlflow ui --backend-store-uri sqlite:///mlflow.db"
    monkeypatch.setenv("PREFECT_HOME", ".prefect")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert prefect_page() == "PREFECT_HOME=.prefect bin/prefect server start"
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "0c95d9a2-37b7-4a35-a2cc-2e6b1b6d5cbf")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        assert prefect_page() == "http://127.0.0.1:4200/runs/flow-run/0c95d9a2-37b7-4a35-a2cc-2e6b1b6d5cbf"


def test_the_run_s_page_is_named() -> None:
    assert lines(WHOLE)["page"] == "runs/r-1/report.html"


def test_the_title_of_before_and_after_can_be_read_where_it_is_shown_small() -> None:
    """MLflow shows a sheet of 1200 pixels at a third: letters of ten pixels are three then."""
    sheet = Image.new("RGB", (1200, 300), (255, 0, 0))
    page = np.asarray(titled([("Before", sheet), ("After", sheet)]))
    band = page[: (len(page) - 2 * sheet.height) // 2]
    inked = np.flatnonzero((band.min(axis=2) > 200).any(axis=1))
    assert inked[-1] - inked[0] >= 1200 / 50, "the height of its letters"
    assert inked[0] > 0
    assert inked[-1] < len(band) - 1
