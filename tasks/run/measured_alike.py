# SPDX-License-Identifier: Apache-2.0
"""What of a run's earlier starts measured as the present one does: only that can be compared."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pandas as pd

from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.records.history import HistoryError, RunHistory
from tasks.records.tracking import Tracker


def measured_otherwise(config: TrainConfig, tags: Mapping[str, str], tracker: Tracker) -> Iterator[str]:
    """A sentence for what MLflow has of a run that goes on and this start measures in another way: what its curves then
    have side by side is not comparable.

    Args:
        tags: what `run_tags` gives of this start.
    """
    if not tracker.logged_steps:
        return
    last, history = max(tracker.logged_steps), RunHistory(tracker.client, tracker.run_id)
    before = history.run.data.tags
    for name in other_versions(tags, before):
        yield (
            f"{name} is {tags[name]} now and was {before[name]} up to iteration {last}: scores before and after "
            "cannot be compared; another reward is for another run, which model.initial_weights lets begin from "
            "these weights"
        )
    other: list[str] = []
    with suppress(HistoryError):
        other = _other(config, history.config())
    if other:
        yield (
            f"validation is another than up to iteration {last} ({', '.join(other)}): held-out rewards before and "
            "after cannot be compared, and guards begin anew; set it back, and measure otherwise with flows.validate"
        )


def other_versions(tags: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Tags of rewards that two starts, or two runs, have both, of different versions."""
    rewards = sorted(name for name in tags.keys() & others.keys() if name.startswith("reward."))
    return [name for name in rewards if tags[name] != others[name]]


def comparable_validations(config: TrainConfig, tracker: Tracker) -> dict[int, pd.DataFrame]:
    """Iteration -> table of the validations since the last start that measured them otherwise, if there was one."""
    since, follows_another = -1, False
    for iteration, earlier in sorted(RunHistory(tracker.client, tracker.run_id).start_configs().items()):
        since = iteration if follows_another else since
        follows_another = bool(_other(config, earlier))
    return {iteration: table for iteration, table in tracker.tables("validation").items() if iteration > since}


def _other(config: TrainConfig, earlier: Mapping[str, Any]) -> list[str]:
    """Fields of the validation that a start with the earlier config had otherwise: what they are, and were."""
    was = flat(earlier)
    return [
        f"{path.partition('.')[2]} is {value} and was {was[path]}"
        for path, value in flat(config.model_dump(mode="json")).items()
        if ".val_kwargs." in path and was.get(path, value) != value
    ]
