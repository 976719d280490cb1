# SPDX-License-Identifier: Apache-2.0
"""A long run's page in Prefect: parts that can be read, tasks named by what they do, and one log for all of it."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import anyio
import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogHandler

import tasks.run.progress as progress_module
from flows.train import in_parts
from tasks.config.tracking import TrackingConfig
from tasks.records.flow_page import flow_page, page_logger, tell
from tasks.records.tracking import Tracker
from tasks.report.sections import HELD_OUT
from tasks.run.progress import Progress
from tasks.run.schedule import MOST_PARTS, parts
from tasks.stages.stage import stage
from tasks.system.behind import Behind
from tasks.system.stopwatch import Stopwatch
from tests.support.mlflow_store import mlflow_in
from tests.support.patience import wait_until

TOTAL = 22


@stage("update_actor", "update")
def update(number: int) -> None:
    if number == TOTAL:
        page_logger().warning("an optimiser step was left out")


@pytest.mark.parametrize("total", [1, 10, 11, 100, 999, 1000, 20_000])
def test_the_parts_cover_every_iteration_once_and_fit_on_a_page(total: int) -> None:
    found = list(parts(1, total))
    assert [number for first, last in found for number in range(first, last + 1)] == list(range(1, total + 1))
    assert len(found) <= MOST_PARTS
    assert list(parts(total // 2 + 1, total))[-1:] == found[-1:] or len(found) == 1, "also of a resumed run"


def test_pytest_rewrites_no_library() -> None:
    """It would parse each module at its first import, here in a thread; two that parse at a time fail, now and then."""
    assert not type(anyio.__spec__.loader).__module__.startswith("_pytest")


@pytest.mark.slow  # it starts Prefect's temporary server
def test_what_is_told_in_a_part_or_a_task_or_by_a_module_is_on_the_runs_own_page() -> None:
    def work(number: int) -> None:
        update(Stopwatch(number), number)
        tell(f"iteration {number}/{TOTAL}")
        if number == 3:
            logging.getLogger("tasks.data.somewhere").warning("a file was written again")

    name = f"paged by parts {uuid4()}"  # the server may have the runs of earlier tests

    @flow(name="paged", flow_run_name=name, persist_result=False)
    def outer() -> None:
        with flow_page():
            in_parts(1, TOTAL, work)

    outer()
    APILogHandler().flush()
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        said = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=100)
        shown = client._client.get(f"/flow_runs/{run.id}/graph-v2").json()["nodes"]
        (part,) = [node for _, node in shown if node["label"].endswith("21-22")]

        def tasks() -> list[Any]:
            return client._client.get(f"/flow_runs/{part['id']}/graph-v2").json()["nodes"]

        inner = wait_until(
            lambda: len(found := tasks()) >= 2 and found, "word of the tasks, which comes after the run's"
        )
    told = [entry.message for entry in said]
    assert [line for line in told if line.startswith("iteration")] == [
        f"iteration {n}/{TOTAL}" for n in range(1, TOTAL + 1)
    ]
    assert {"an optimiser step was left out", "a file was written again"} <= {*told}
    assert len(shown) == 2, "two parts, not 22 task runs"
    assert [node["label"] for _, node in inner] == ["update 21", "update 22"]


@pytest.mark.slow  # it starts Prefect's temporary server
def test_a_run_that_is_to_be_shorter_than_it_is_has_all_of_it_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker(TrackingConfig(uri=mlflow_in(tmp_path)), "shortened", None)
    config = SimpleNamespace(run_name="shortened", run_dir=tmp_path)
    run: Any = SimpleNamespace(config=config, tracker=tracker, report=SimpleNamespace(card=str))

    @flow(name="shortened", persist_result=False)
    def shortened() -> float | None:
        progress = Progress(run, total=10, done=20)
        with get_client(sync_client=True) as client:
            return client._client.get(f"/artifacts/{progress._artifact}").json()["data"]

    assert shortened() == 100
    assert "trainer.total_training_steps is 10, but 20 iterations are done: none is left" in capfd.readouterr().err


def test_progress_that_prefects_server_does_not_take_is_a_warning_once_and_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it is away for longer than Prefect's client tries: the page is no part of the record."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    tried: list[float] = []

    def away(*arguments: Any, progress: float = -1.0, **named: Any) -> None:
        tried.append(progress)
        raise httpx.ConnectError("All connection attempts failed")

    told: list[str] = []
    monkeypatch.setattr(progress_module, "create_progress_artifact", lambda **_: uuid4())
    monkeypatch.setattr(progress_module, "update_progress_artifact", away)
    monkeypatch.setattr(progress_module, "create_link_artifact", away)
    monkeypatch.setattr(progress_module, "tell", told.append)
    monkeypatch.setattr(progress_module, "page_logger", lambda: logging.getLogger("tasks.page"))
    config, behind = SimpleNamespace(run_name="unseen", run_dir=tmp_path), Behind()
    tracker = SimpleNamespace(uri="http://mlflow", experiment_id="1", run_id="2")
    report = SimpleNamespace(card=str)
    run: Any = SimpleNamespace(config=config, tracker=tracker, report=report, behind=behind, iteration=0, held_out=0.25)
    progress = Progress(run, total=2, done=0)
    progress.show_validation()
    progress.advance(1, {HELD_OUT: 0.5})
    behind.settle()
    assert tried == [0.0], "records wait while Prefect's client tries"
    monkeypatch.setattr(progress_module, "SECONDS_AFTER_A_FAILURE", 0.0)
    progress.advance(2, {HELD_OUT: 0.5})
    behind.settle()
    assert tried == [0.0, 100.0]
    assert behind.wait(behind.submit(lambda: "written")) == "written"
    summary: Any = SimpleNamespace(run_name="unseen", validations=[], iterations=2, weights=None)
    assert progress.close(summary) == told[-1]
    (warning,) = [record for record in caplog.records if record.name == "tasks.page"]
    assert "(ConnectError: All connection attempts failed)" in warning.getMessage()
