# SPDX-License-Identifier: Apache-2.0
"""What of a run's earlier starts measured as the present one does: only that can be compared."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.records.history import HistoryError, RunHistory
from tasks.records.run_store import CheckpointError
from tasks.records.tracking import Tracker

MEASUREMENTS = "validations.json"
"""A run's artifact: the first iteration that is validated in a way -> the fields of that."""


@dataclass(frozen=True)
class RecordedMeasurements:
    """How a run's validations were measured before a start: the first iteration that was validated in a way -> its
    fields.

    Attributes:
        written: what `MEASUREMENTS` holds.
        counted: without those by which none was, as of a start that was ended before. Of a run of an older version all
            were by its last config. Versions of rewards that the last of them lacks, as older versions of this code
            recorded none, are those of the start before.
    """

    written: Mapping[int, Mapping[str, Any]]
    counted: Mapping[int, Mapping[str, Any]]

    def otherwise(self, fields: Mapping[str, Any]) -> list[str]:
        """What of the fields was another when a validation was last measured: what it is, and was."""
        last = self.counted[max(self.counted)] if self.counted else {}
        return [
            f"{path.partition('.')[2]} is {value} and was {last[path]}"
            for path, value in fields.items()
            if last.get(path, value) != value
        ]


def measured_otherwise(
    config: TrainConfig, tags: Mapping[str, str], tracker: Tracker, measurements: RecordedMeasurements
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
    if other := measurements.otherwise(_fields(config)):
        yield (
            f"validation is another than up to iteration {last} ({', '.join(other)}): held-out rewards before and "
            "after cannot be compared, and guards begin anew; set it back, and measure otherwise with flows.validate"
        )


def other_versions(tags: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Tags of rewards that two starts, or two runs, have both, of different versions."""
    rewards = sorted(name for name in tags.keys() & others.keys() if name.startswith("reward."))
    return [name for name in rewards if tags[name] != others[name]]


def record_measurement(
    config: TrainConfig, reward_versions: Mapping[str, str], tracker: Tracker, measurements: RecordedMeasurements
) -> None:
    """Have MLflow know from which iteration on validations are measured as this start does. To be called before it has
    the start's config.

    That is the first that is not recorded: of those that this start makes once more, as no checkpoint had them, the
    records stay what they are.

    Args:
        reward_versions: what `version_tags` gives of this start.
        measurements: what `recorded_measurements` gives.
    """
    fields, changed = _fields(config) | dict(reward_versions), dict(measurements.counted)
    if not changed or measurements.otherwise(fields):
        changed[max(tracker.logged_steps, default=-1) + 1] = fields
    if changed != measurements.written:  # a file that is written again can be cut off again
        tracker.client.log_dict(tracker.run_id, {str(since): known for since, known in changed.items()}, MEASUREMENTS)


def comparable_validations(tracker: Tracker) -> dict[int, pd.DataFrame]:
    """Iteration -> table of the validations that were measured as the newest start does, without another in between."""
    since = max(_recorded(tracker), default=0)
    return {iteration: table for iteration, table in tracker.tables("validation").items() if iteration >= since}


def recorded_measurements(tracker: Tracker) -> RecordedMeasurements:
    """What MLflow has of it. To be called before it has the start's tags, which replace those of the start before.
    Raises CheckpointError where the record is damaged."""
    written, last = _recorded(tracker), max(tracker.logged_steps, default=-1)
    counted = {since: fields for since, fields in written.items() if since <= last}
    if tracker.logged_steps and not counted:
        with suppress(HistoryError):
            counted[0] = flat(RunHistory(tracker.client, tracker.run_id).config())
    if counted:
        newest = max(counted)
        counted[newest] = {**_tagged_versions(tracker), **counted[newest]}
    return RecordedMeasurements(written, counted)


def _tagged_versions(tracker: Tracker) -> dict[str, str]:
    """Versions of the rewards of the last start that MLflow has the tags of."""
    tags = RunHistory(tracker.client, tracker.run_id).run.data.tags
    return {name: version for name, version in tags.items() if name.startswith("reward.")}


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
