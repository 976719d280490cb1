# SPDX-License-Identifier: Apache-2.0
"""The grids of held-out pictures in a run's folder, one for each iteration that was validated."""

from pathlib import Path

from PIL import Image

from tasks.config.tree import TrainConfig
from tasks.records.flow_page import page_logger
from tasks.records.retention import remove_old_pictures
from tasks.records.tracking import Tracker
from tasks.system.files import put_in_place


def keep_grid(config: TrainConfig, iteration: int, grid: Image.Image) -> None:
    """Write the grid of an iteration, whole: killed within it, the run that goes on finds none, not the half of one."""
    with put_in_place(_folder(config) / f"{iteration:06d}.png") as aside:
        grid.save(aside, "PNG")


def kept_grids(config: TrainConfig) -> dict[int, Path]:
    """Iteration -> its grid."""
    return {int(path.stem): path for path in _folder(config).glob("*.png")}


def remove_old(config: TrainConfig, tracker: Tracker) -> None:
    """Remove the pictures that `tracking` does not keep, here and in MLflow, and log which."""
    for kind, steps in remove_old_pictures(tracker, config.tracking, _folder(config)).items():
        page_logger().info("removed by tracking.keep_%s: iterations %s", kind, ", ".join(map(str, steps)))


def _folder(config: TrainConfig) -> Path:
    return config.run_dir / "validation"
