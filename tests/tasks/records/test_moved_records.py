# SPDX-License-Identifier: Apache-2.0
"""A project folder that was copied or moved: no run in it writes to the other one's files, and one command mends it."""

import os
import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
from typer.testing import CliRunner

from flows import moved
from flows.deploy.bring_up import bring_up
from flows.deploy.service_record import living_processes
from tasks.cli.terminal import command_of
from tasks.config.tracking import TrackingConfig
from tasks.records.moved_records import RecordsMoved, files_of_others, require_own_files
from tasks.records.tracking import Tracker
from tasks.system.ports import free_port
from tests.support.forked import Program
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[3]


RUN = """
from tasks.config.tracking import TrackingConfig
from tasks.records.tracking import Tracker

Tracker(TrackingConfig(), "another", run_id={run!r}).log_bytes(b"new", "notes/second.txt")
"""


def tracking(folder: Path, **settings: Any) -> TrackingConfig:
    """The folder's own, by its whole path, which does not depend on where MLflow looked first in this process."""
    return TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", **settings)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, str]:
    """A project with a run, a file of it and a registered model; its copy, where this process is; the run's id."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    original, copy = tmp_path / "the original", tmp_path / "a copy"
    original.mkdir()
    monkeypatch.chdir(original)
    tracker = Tracker(tracking(original), "a run")
    tracker.log_bytes(b"as it was", "notes/first.txt")
    tracker.client.create_registered_model("tiny")
    source = tracker.client.get_run(tracker.run_id).info.artifact_uri
    tracker.client.create_model_version("tiny", f"{source}/notes", tracker.run_id)
    shutil.copytree(original, copy)
    monkeypatch.chdir(copy)
    return original, copy, tracker.run_id


def files(folder: Path) -> dict[str, bytes]:
    """Content of those that runs have there."""
    found = (folder / "mlruns").rglob("*")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_in_a_copy_is_refused_before_it_writes_to_the_original(
    copied: tuple[Path, Path, str], goes_on: bool
) -> None:
    original, copy, run = copied
    before, code = files(original), RUN.format(run=run if goes_on else None)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    refused = Program(["-c", code], copy, environment, copy / "log")
    assert refused.wait(PATIENCE) == 1, refused.output()
    assert f"have their files in {original}/mlruns, not in {copy}/mlruns: this folder was copied" in refused.output()
    assert f"`python -m flows.moved '{original}/mlruns'`" in refused.output()
    result = CliRunner().invoke(command_of(moved.main), [str(original / "mlruns")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("mlflow.db: 2 experiments, 1 runs, 1 model versions have their files in ")

    taken = Program(["-c", code], copy, environment, copy / "log")
    assert taken.wait(PATIENCE) == 0, taken.output()
    assert files(original) == before
    assert b"new" in files(copy).values()
    client = mlflow.MlflowClient(f"sqlite:///{copy}/mlflow.db")
    assert client.get_run(run).info.artifact_uri.startswith((copy / "mlruns").as_uri())
    assert client.get_model_version("tiny", "1").source.startswith((copy / "mlruns").as_uri())
    assert files_of_others(original) is None, "it is as it was"


def test_no_server_of_a_copy_starts(copied: tuple[Path, Path, str]) -> None:
    """MLflow's would tell every run of it the original's files."""
    with pytest.raises(RecordsMoved, match="this folder was copied or moved"):
        bring_up({"prefect": free_port(), "mlflow": free_port()})
    assert not living_processes()


def test_a_copy_is_told_from_what_was_renamed_or_chosen(
    copied: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name of the same folder, and places that somebody gave an experiment, are nobody's move."""
    original, copy, _ = copied
    with pytest.raises(RecordsMoved, match=r"tracking\.artifacts=.*/the original/mlruns lets a run go on"):
        require_own_files(copy)
    original.rename(tmp_path / "renamed")
    original.symlink_to(tmp_path / "renamed")
    require_own_files(tmp_path / "renamed")

    chosen = tmp_path / "chosen"
    chosen.mkdir()
    monkeypatch.chdir(chosen)
    Tracker(tracking(chosen, artifacts=str(tmp_path / "a-large-disk")), "a run")
    shutil.copytree(chosen, tmp_path / "with the large disk, too")
    require_own_files(tmp_path / "with the large disk, too")
    require_own_files(tmp_path / "with no database")


@pytest.mark.parametrize(
    ("missing", "told"),
    [("mlflow.db", "mlflow.db is missing"), ("mlruns", "mlruns is missing"), (None, "nothing in mlflow.db leads to")],
)
def test_what_cannot_be_led_here_is_said(copied: tuple[Path, Path, str], missing: str | None, told: str) -> None:
    _, copy, _ = copied
    if missing is not None:
        (copy / missing).rename(copy / "aside")
    result = CliRunner().invoke(command_of(moved.main), ["/nowhere/mlruns"])
    assert result.exit_code == 2, result.output
    assert told in result.output
