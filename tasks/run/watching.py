# SPDX-License-Identifier: Apache-2.0
"""What is said when a run's rewards look wrong: that the policy may hack them, or that one tells no sample apart."""

from collections.abc import Mapping

from tasks.records.flow_page import page_logger
from tasks.records.guards import FLOOR_TAG, HACKING_TAG, FloorWatch, GuardWatch
from tasks.records.tracking import Tracker


def watch_guards(
    guards: GuardWatch, tracker: Tracker, iteration: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """The guards' metrics of an iteration; a new flag is a warning and a tag of the run."""
    before = guards.sentence()
    found = guards.observe(iteration, metrics)
    now = guards.sentence()
    if now is not None and now != before:
        tracker.tag(HACKING_TAG, now)
        page_logger().warning("this may be reward hacking: %s; look at the pictures", now)
    return found


def watch_floor(floor: FloorWatch, tracker: Tracker, iteration: int, metrics: Mapping[str, float]) -> None:
    """A reward that tells no sample from another for long is a warning and a tag of the run."""
    stuck = floor.observe(iteration, metrics)
    if stuck is None:
        return
    tracker.tag(FLOOR_TAG, stuck)
    page_logger().warning(
        "the reward may not work: %s; look at the pictures and at what the reward makes of them, and see "
        "docs/rewards.md",
        stuck,
    )
