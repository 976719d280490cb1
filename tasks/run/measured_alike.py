# SPDX-License-Identifier: Apache-2.0
"""What of a run's earlier starts measured as the present one does: only that can be compared."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.records.tracking import Tracker


def measured_otherwise(config: TrainConfig, tags: Mapping[str, str], tracker: Tracker) -> Iterator[str]:
    """A sentence for what MLflow has of a run that goes on and this start measures in another way: what its curves then
    have side by side is not comparable.

    Args:
        tags: what `run_tags` gives of this start.
    """
    if not tracker.logged_steps:
        return
    last, before = max(tracker.logged_steps), tracker.client.get_run(tracker.run_id).data.tags
    for name, version in tags.items():
        if name.startswith("reward.") and before.get(name, version) != version:
            yield (
                f"{name} is {version} now and was {before[name]} up to iteration {last}: scores before and after "
                "cannot be compared; another reward is for another run, which model.initial_weights lets begin from "
                "these weights"
            )
    earlier = flat(tracker.last_config())
    now = _other(config, earlier)
    other = [f"{path.partition('.')[2]} is {value} and was {earlier[path]}" for path, value in now.items()]
    if other:
        yield (
            f"validation is another than up to iteration {last} ({', '.join(other)}): held-out rewards before and "
            "after cannot be compared, and guards begin anew; set it back, and measure otherwise with flows.validate"
        )


def comparable_validations(config: TrainConfig, tracker: Tracker) -> dict[int, pd.DataFrame]:
    """Iteration -> table of the validations since the last start that measured them otherwise, if there was one."""
    since, follows_another = -1, False
    for iteration, earlier in sorted(tracker.start_configs().items()):
        since = iteration if follows_another else since
        follows_another = bool(_other(config, flat(earlier)))
    return {iteration: table for iteration, table in tracker.tables("validation").items() if iteration > since}


def _other(config: TrainConfig, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the validation that another start had otherwise, with what they are now."""
    present = flat(config.model_dump(mode="json"))
    return {
        path: value for path, value in present.items() if ".val_kwargs." in path and earlier.get(path, value) != value
    }
