# SPDX-License-Identifier: Apache-2.0
"""What is said, and done, when a run's rewards look wrong: the policy may hack them or unlearn, or one tells no sample
apart."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from models.errors import DoubleflowError
from tasks.config.tree import TrainConfig
from tasks.records.flow_page import page_logger
from tasks.records.guards import COLLAPSE_TAG, FLOOR_TAG, HACKING_TAG, FloorWatch, GuardWatch
from tasks.records.model_registry import doubt_versions
from tasks.records.tracking import Tracker

LAST_GOOD = "last_good"
"""Folder of a run with the weights of the last validation that found nothing fallen; that of its iteration in it."""


class RewardHacking(DoubleflowError, RuntimeError):
    """A guard fell while the trained reward rose, and `reward.guards.action` is stop."""


class RewardCollapse(DoubleflowError, RuntimeError):
    """The held-out reward fell far below its highest, and `reward.guards.action` is stop."""


def watch_guards(
    config: TrainConfig,
    guards: GuardWatch,
    tracker: Tracker,
    iteration: int,
    metrics: Mapping[str, float],
    held_out: pd.DataFrame | None,
) -> dict[str, float]:
    """The guards' metrics of an iteration and of its validation, if there was one.

    A new flag is a warning, a tag of the run and, of a guard, one of the versions that it has registered since its last
    validation without a doubt: the validation sweep makes none of those the champion. A guard that was back and is
    flagged again has a new flag: what was registered since is in doubt as much.

    Args:
        config: of the run.
        guards: with all before.
        tracker: of the run.
        iteration: the number.
        metrics: of its rollout.
        held_out: the table of its validation.
    """
    found = guards.observe(iteration, metrics)
    if held_out is None:
        return found
    before, held = set(guards.flagged), guards.collapse()
    found |= guards.judge(iteration, held_out)
    if guards.collapse() is not None and held is None:
        tracker.tag(COLLAPSE_TAG, str(guards.collapse()))
        page_logger().warning("%s: the policy unlearns; a smaller learning rate holds longer", guards.collapse())
    now = guards.sentence()
    if now is not None and guards.flagged - before:
        tracker.tag(HACKING_TAG, now)
        name = config.trainer.experiment_name
        former = doubt_versions(tracker, name, guards.doubtful_from, now)
        if former is not None:
            page_logger().warning("version %s of %s was the champion, and is so no more", former, name)
        page_logger().warning("this may be reward hacking: %s; look at the pictures", now)
    return found


def stop_if_flagged(config: TrainConfig, guards: GuardWatch, iteration: int, save_first: Callable[[], None]) -> None:
    """End the run where its newest validation flags something and `reward.guards.action` is stop.

    Args:
        save_first: called before it ends, so that it can go on from this iteration.

    Raises:
        RewardHacking: it flags a guard; with where the last good weights are.
        RewardCollapse: it flags the held-out reward itself; likewise.
    """
    kind, sentence = _newest_flag(guards)
    if sentence is not None and config.reward.guards.action == "stop":
        save_first()
        raise kind(f"stopped after iteration {iteration} by reward.guards.action stop: {_told(config, sentence)}")


def refuse_flagged(config: TrainConfig, guards: GuardWatch) -> None:
    """Say of a run that is to go on that its newest validation flagged a guard, or the held-out reward itself.

    Raises:
        RewardHacking: `reward.guards.action` is stop, and it flagged a guard.
        RewardCollapse: likewise, and it flagged the held-out reward.
    """
    kind, sentence = _newest_flag(guards)
    if sentence is None:
        return
    if config.reward.guards.action == "stop":
        raise kind(f"{config.run_name} is stopped by its guards: {_told(config, sentence)}")
    page_logger().warning("%s goes on although it is flagged: %s", config.run_name, sentence)


def _newest_flag(guards: GuardWatch) -> tuple[type[RewardHacking | RewardCollapse], str | None]:
    sentence = guards.sentence(now=True)
    return (RewardCollapse, guards.collapse()) if sentence is None else (RewardHacking, sentence)


def last_good_folder(config: TrainConfig, iteration: int) -> Path:
    """Where the weights of that iteration are, should it be the last good one."""
    return config.run_dir / LAST_GOOD / f"{iteration:06d}"


def last_good(config: TrainConfig) -> Path | None:
    """The weights of the last validation that found nothing fallen; None where none were kept."""
    folders = sorted((config.run_dir / LAST_GOOD).glob("[0-9]*"), key=lambda folder: int(folder.name))
    return folders[-1] if folders else None


def _told(config: TrainConfig, sentence: str) -> str:
    folder = last_good(config)
    weights = f"no trained ones: begin again from {config.actor_rollout_ref.model.path}"
    if folder is not None:
        weights = f"those of iteration {int(folder.name)}, in {folder}"
    return (
        f"{sentence}; the weights of the last validation before are {weights}; look at the pictures, and to go on "
        "from where it stopped, set reward.guards.action=flag"
    )


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
