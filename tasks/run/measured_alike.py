# SPDX-License-Identifier: Apache-2.0
"""What of a run's earlier starts measured as the present one does: only that can be compared."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pandas as pd

from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.records.history import HistoryError, RunHistory
from tasks.records.run_store import CheckpointError
from tasks.records.tracking import Tracker

MEASUREMENTS = "validations.json"
"""A run's artifact: the first iteration that is validated in a way -> the fields of that."""


def measured_otherwise(
    config: TrainConfig, tags: Mapping[str, str], tracker: Tracker, measurements: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    """A sentence for what MLflow has of a run that goes on and this start measures in another way: what its curves then
    have side by side is not comparable.

    Args:
        tags: what `run_tags` gives of this start.
        measurements: what `recorded_measurements` gives.
    """
    if not tracker.logged_steps:
        return
    last, before = max(tracker.logged_steps), RunHistory(tracker.client, tracker.run_id).run.data.tags
    for name in other_versions(tags, before):
        yield (
            f"{name} is {tags[name]} now and was {before[name]} up to iteration {last}: scores before and after "
            "cannot be compared; another reward is for another run, which model.initial_weights lets begin from "
            "these weights"
        )
    if measurements and (other := _other(_fields(config), measurements[max(measurements)])):
        yield (
            f"validation is another than up to iteration {last} ({', '.join(other)}): held-out rewards before and "
            "after cannot be compared, and guards begin anew; set it back, and measure otherwise with flows.validate"
        )


def other_versions(tags: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Tags of rewards that two starts, or two runs, have both, of different versions."""
    rewards = sorted(name for name in tags.keys() & others.keys() if name.startswith("reward."))
    return [name for name in rewards if tags[name] != others[name]]


def record_measurement(
    config: TrainConfig,
    reward_versions: Mapping[str, str],
    tracker: Tracker,
    measurements: Mapping[int, Mapping[str, Any]],
) -> None:
    """Have MLflow know from which iteration on validations are measured as this start does. To be called before it has
    the start's config.

    That is the first that is not recorded: of those that this start makes once more, as no checkpoint had them, the
    records stay what they are.

    Args:
        reward_versions: what `version_tags` gives of this start.
        measurements: what `recorded_measurements` gives.
    """
    fields, changed = _fields(config) | dict(reward_versions), dict(measurements)
    if not measurements or _other(fields, measurements[max(measurements)]):
        changed[max(tracker.logged_steps, default=-1) + 1] = fields
    if changed != _recorded(tracker):  # a file that is written again can be cut off again
        tracker.client.log_dict(tracker.run_id, {str(since): known for since, known in changed.items()}, MEASUREMENTS)


def comparable_validations(tracker: Tracker) -> dict[int, pd.DataFrame]:
    """Iteration -> table of the validations that were measured as the newest start does, without another in between."""
    since = max(_recorded(tracker), default=0)
    return {iteration: table for iteration, table in tracker.tables("validation").items() if iteration >= since}


def recorded_measurements(tracker: Tracker) -> dict[int, Mapping[str, Any]]:
    """The first iteration that was validated in a way -> its fields; without those by which none was, as of a start
    that was ended before. Of a run of an older version all were by its last config.

    Raises:
        CheckpointError: the record is damaged.
    """
    if not tracker.logged_steps:
        return {}
    last = max(tracker.logged_steps)
    found = {since: fields for since, fields in _recorded(tracker).items() if since <= last}
    if not found:
        with suppress(HistoryError):
            found[0] = flat(RunHistory(tracker.client, tracker.run_id).config())
    return found


def _recorded(tracker: Tracker) -> dict[int, Mapping[str, Any]]:
    """What `MEASUREMENTS` holds; nothing where the run has none yet."""
    if MEASUREMENTS not in tracker.listed():
        return {}
    content = RunHistory(tracker.client, tracker.run_id).content(MEASUREMENTS)
    try:
        return {int(since): dict(fields) for since, fields in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the artifact {MEASUREMENTS} of run {tracker.run_id} is damaged ({error}): remove it, and all validations "
            "count as measured by the run's config.json"
        ) from error


def _fields(config: TrainConfig) -> dict[str, Any]:
    """What decides how a validation is measured."""
    return {path: value for path, value in flat(config.model_dump(mode="json")).items() if ".val_kwargs." in path}


def _other(fields: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """What is measured otherwise than it was: what it is, and was."""
    return [
        f"{path.partition('.')[2]} is {value} and was {earlier[path]}"
        for path, value in fields.items()
        if earlier.get(path, value) != value
    ]
