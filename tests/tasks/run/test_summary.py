# SPDX-License-Identifier: Apache-2.0
"""What a finished run tells its owner."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow.entities import RunInfo
from PIL import Image
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.records.headline import run_page
from tasks.records.pictures import titled
from tasks.run.summary import Summary, mlflow_page, prefect_page

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
