# SPDX-License-Identifier: Apache-2.0
"""Which pictures of a run stay, on a real MLflow store."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydantic import ValidationError

from tasks.config.tracking import TrackingConfig
from tasks.records.retention import remove_old_pictures, surplus
from tasks.records.tracking import Tracker
from tasks.run.held_out_grids import keep_grid, kept_grids
from tests.support.mlflow_store import mlflow_in

PICTURE = np.full((8, 8, 3), 90, np.uint8)


def settings(folder: Path, **keep: int) -> TrackingConfig:
    return TrackingConfig(uri=mlflow_in(folder), artifacts=(folder / "artifacts").as_uri(), **keep)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tracker, Path]:
    """A run of twelve iterations that validated before it and in every third, and its folder of grids."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker, grids = Tracker(settings(tmp_path), "a-run"), tmp_path / "validation"
    grids.mkdir()
    sheet, table = Image.fromarray(PICTURE), pd.DataFrame({"reward": [0.5]})
    for step in range(13):
        sheets = {"samples": sheet} if step else {}
        if step % 3 == 0:
            sheets["validation"] = sheet
            sheet.save(grids / f"{step:06d}.png")
            tracker.client.log_dict(tracker.run_id, {"samples": []}, f"extremes/{step:06d}.json")
        albums = {"pictures": [PICTURE, PICTURE]} if step else {}
        tracker.log_step(step, {"reward": 0.1 * step}, sheets, {"samples": table}, albums)
    return tracker, grids


def kept(tracker: Tracker) -> list[int]:
    return sorted(int(Path(path).name) for path in tracker.listed("pictures"))


def test_by_default_every_picture_stays(recorded: tuple[Tracker, Path], tmp_path: Path) -> None:
    tracker, grids = recorded
    assert remove_old_pictures(tracker, settings(tmp_path), grids) == {}
    assert kept(tracker) == list(range(1, 13))
    assert len(list(grids.iterdir())) == 5


def test_old_pictures_go_and_the_run_says_so(recorded: tuple[Tracker, Path], tmp_path: Path) -> None:
    tracker, grids = recorded
    removed = remove_old_pictures(tracker, settings(tmp_path, keep_pictures=2, keep_validation_grids=1), grids)
    assert removed == {"pictures": list(range(1, 11)), "validation_grids": [3, 6, 9]}
    assert kept(tracker) == [11, 12]
    assert tracker.picture_steps("samples") == {11, 12}
    assert tracker.picture_steps("validation") == {0, 12}, "the first grid is what the last is compared with"
    assert sorted(path.name for path in grids.iterdir()) == ["000000.png", "000012.png"]
    assert tracker.listed("extremes") == ["extremes/000000.json", "extremes/000012.json"]
    assert not [name for name in tracker.listed("images") if "%3%" in name or "+3+" in name], "nor MLflow's small copy"
    tags = tracker.client.get_run(tracker.run_id).data.tags
    assert tags["doubleflow.removed.pictures"] == "up to iteration 10, by tracking.keep_pictures"
    assert tags["doubleflow.removed.validation_grids"] == "up to iteration 9, by tracking.keep_validation_grids"
    # Measurements stay whole, and doing it again removes nothing.
    assert len(tracker.listed("samples")) == 13
    assert len(tracker.history("reward")) == 13
    assert remove_old_pictures(tracker, settings(tmp_path, keep_pictures=2, keep_validation_grids=1), grids) == {}


def test_a_setting_touches_only_its_own_pictures(recorded: tuple[Tracker, Path], tmp_path: Path) -> None:
    tracker, grids = recorded
    assert remove_old_pictures(tracker, settings(tmp_path, keep_validation_grids=3), grids) == {"validation_grids": [3]}
    assert kept(tracker) == list(range(1, 13))
    assert len(tracker.picture_steps("samples")) == 12


def test_a_grid_that_mlflow_has_not_got_yet_counts_as_one(recorded: tuple[Tracker, Path], tmp_path: Path) -> None:
    """Its iteration is being validated while the record of the one before is written."""
    tracker, grids = recorded
    Image.fromarray(PICTURE).save(grids / "000013.png")
    assert remove_old_pictures(tracker, settings(tmp_path, keep_validation_grids=2), grids) == {
        "validation_grids": [3, 6, 9]
    }
    assert sorted(path.name for path in grids.iterdir()) == ["000000.png", "000012.png", "000013.png"]


def test_a_grid_that_cannot_be_removed_stays_with_a_word_and_goes_the_next_time(
    recorded: tuple[Tracker, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here, or in MLflow; those after it go then, too. So a tag's iterations are gone, up to the one that it says."""
    tracker, grids = recorded
    unlink, delete = Path.unlink, os.remove
    config = settings(tmp_path, keep_pictures=12, keep_validation_grids=2)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "000003.png":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, missing_ok)

    def refuse_of_mlflow(path: str, **named: Any) -> None:
        if Path(path).name == "000009.json":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        delete(path, **named)

    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "unlink", refuse)
        assert remove_old_pictures(tracker, config, grids) == {}
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "remove", refuse_of_mlflow)
        less = settings(tmp_path, keep_validation_grids=1)
        assert remove_old_pictures(tracker, less, grids) == {"validation_grids": [3, 6]}
    told = [record.getMessage() for record in caplog.records if "iteration" in record.getMessage()]
    assert [line.split(":")[0] for line in told] == [
        f"validation_grids of iteration {step} cannot be removed, and the next time is another try" for step in (3, 9)
    ]
    assert remove_old_pictures(tracker, settings(tmp_path, keep_validation_grids=1), grids) == {"validation_grids": [9]}
    tag = tracker.client.get_run(tracker.run_id).data.tags["doubleflow.removed.validation_grids"]
    assert tag.startswith("up to iteration 9,")
    assert sorted(path.name for path in grids.iterdir()) == ["000000.png", "000012.png"]
    assert tracker.listed("extremes") == ["extremes/000000.json", "extremes/000012.json"]


@pytest.mark.parametrize(
    ("keep", "with_first", "expected"),
    [(None, False, []), (2, False, [1, 4]), (9, False, []), (1, True, [4, 7]), (3, True, []), (4, False, [])],
)
def test_what_is_surplus(keep: int | None, with_first: bool, expected: list[int]) -> None:
    assert surplus({9, 1, 7, 4}, keep, with_first) == expected


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TrackingConfig(keep_pictures=0)


def test_a_grid_that_is_half_written_is_not_there(tmp_path: Path) -> None:
    """Killed while it writes one, a run goes on and would show it on its page."""

    class Cut(Image.Image):
        def save(self, file: Any, *_: Any, **__: Any) -> None:
            Path(file).write_bytes(b"\x89PNG")
            raise KeyboardInterrupt

    config: Any = SimpleNamespace(run_dir=tmp_path)
    keep_grid(config, 3, Image.new("RGB", (4, 4)))
    for iteration in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            keep_grid(config, iteration, Cut())
    assert {step: Image.open(file).size for step, file in kept_grids(config).items()} == {3: (4, 4)}
