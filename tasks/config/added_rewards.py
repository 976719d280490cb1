# SPDX-License-Identifier: Apache-2.0
"""Rewards that a path to one of their fields would add: of a misspelt label the defaults make one that is trained."""

from collections.abc import Mapping
from typing import Any

from tasks.config.overrides import Entries
from tasks.config.reward import RewardFunctionConfig
from tasks.config.tree import REWARDS

ADDS_A_REWARD = {"reward", "weight", "guard"}
"""Fields of a reward that say what it is there for: who gives one by a path means to add it."""


def why_added_by_mistake(changes: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """A sentence, without values, where these changes name a field of a reward that is not there; None else.

    Args:
        changes: nested mappings, of which those that a path has named alone are `Entries`.
        before: the rewards that they change, by label.
    """
    section = changes.get("reward")
    named = section.get("functions") if isinstance(section, Mapping) else None
    if not isinstance(named, Mapping):
        return None
    whole = [label for label, entry in named.items() if not isinstance(entry, Entries)]
    there = dict.fromkeys([*(before if isinstance(named, Entries) else ()), *whole])
    for label, entry in named.items():
        if label in there or ADDS_A_REWARD & entry.keys():
            continue
        field = next(iter(entry))
        if field in RewardFunctionConfig.model_fields:  # else it is said that there is no such field
            return (
                f"{REWARDS}.{label}.{field}: there is no reward {label} here, so this would add one and train on it "
                f"with weight 1; there are {', '.join(map(str, there)) or 'none'}: name one of them, or add it with "
                f"its weight, as in {REWARDS}.{label}.weight=1"
            )
    return None
