# SPDX-License-Identifier: Apache-2.0
"""How long a run's pictures stay: `tracking.keep_pictures` and `tracking.keep_validation_grids`."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tasks.config.tracking import TrackingConfig
from tasks.records.tracking import Tracker

REMOVED_TAG = "doubleflow.removed"
"""Tag of a run, followed by the kind of picture: up to which iteration such pictures were removed."""

log = logging.getLogger(__name__)


def surplus(steps: Iterable[int], keep: int | None, with_first: bool = False) -> list[int]:
    """Steps beyond the newest `keep`, ascending; None keeps all.

    Args:
        steps: in any order.
        keep: how many stay, 1 or more.
        with_first: the first stays in any case, and is not counted.
    """
    if keep is None:
        return []
    return sorted(steps)[with_first:][:-keep]


def remove_old_pictures(tracker: Tracker, config: TrackingConfig, grids: Path) -> dict[str, list[int]]:
    """Remove what the settings do not keep, and say so in a tag of the run.

    What a disk, or MLflow's server of files, does not let go is a warning, and tried again the next time: it costs
    room, and no record.

    Args:
        tracker: of the run.
        config: how many stay.
        grids: the folder with the run's own validation grids, 000010.png and so on.

    Returns:
        Kind of picture -> the iterations whose pictures are now gone; empty where nothing was removed.
    """
    removed = {
        "pictures": _remove_pictures(tracker, config.keep_pictures),
        "validation_grids": _remove_grids(tracker, config.keep_validation_grids, grids),
    }
    removed = {kind: steps for kind, steps in removed.items() if steps}
    for kind, steps in removed.items():
        tracker.tag(f"{REMOVED_TAG}.{kind}", f"up to iteration {steps[-1]}, by tracking.keep_{kind}")
    return removed


def _remove_pictures(tracker: Tracker, keep: int | None) -> list[int]:
    """Albums and grids of an iteration's samples."""
    if keep is None:
        return []
    files = tracker.picture_files("samples")
    for album in tracker.listed("pictures"):
        files.setdefault(int(Path(album).name), []).append(album)
    old = surplus(files, keep)
    return _removed("pictures", old, lambda step: tracker.remove(files[step]))


def _remove_grids(tracker: Tracker, keep: int | None, folder: Path) -> list[int]:
    if keep is None:
        return []
    sheets = tracker.picture_files("validation")
    files = {int(path.stem): path for path in folder.glob("*.png")}
    old = surplus(sheets.keys() | files.keys(), keep, with_first=True)
    samples = {int(Path(path).stem): path for path in tracker.listed("extremes")} if old else {}

    def remove(step: int) -> None:
        tracker.remove([*sheets.get(step, ()), *filter(None, [samples.get(step)])])
        if step in files:  # last: by it the next time finds what of the step is still there
            files[step].unlink(missing_ok=True)

    return _removed("validation_grids", old, remove)


def _removed(kind: str, steps: Iterable[int], remove: Callable[[int], None]) -> list[int]:
    """Those of the steps that `remove` has removed, up to the first that cannot be, which is told."""
    gone = list[int]()
    for step in steps:
        try:
            remove(step)
        except OSError as error:
            log.warning("%s of iteration %d cannot be removed, and the next time is another try: %s", kind, step, error)
            break
        gone.append(step)
    return gone
