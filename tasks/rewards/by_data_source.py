# SPDX-License-Identifier: Apache-2.0
"""A reward that leaves each sample to the one that its prompt's `data_source` names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tasks.rewards.base import (
    Reward,
    RewardResult,
    ScoredPrompt,
    asks_reward_model,
    check_reward,
    get_reward,
    register_reward,
)
from tasks.rewards.errors import RewardError

KEY = "data_source"
"""Of a prompt's metadata."""
NAME = re.compile(r"[\w.\-/ ]{1,100}")
"""Of a source: it is a part of metrics' names."""


@register_reward("by_data_source")
class ByDataSource(Reward):
    """The score of the reward that `sources` names for the prompt's `data_source`.

    Each reward's own scores stand in the detail `score_<source>`, its details in `<detail>_<source>`; None elsewhere.
    The advantages compare samples of one prompt, so scores on different scales do no harm unless
    `algorithm.global_std` is on.
    """

    def __init__(self, *, sources: Mapping[str, Any]):
        """
        Args:
            sources: `data_source` -> a reward's name, or {"reward": name, "options": {...}}.
        """
        self._rewards = {source: get_reward(name, **options) for source, (name, options) in _named(sources).items()}
        versions = [f"{source}={reward.name} {reward.version}" for source, reward in sorted(self._rewards.items())]
        self.version = " ".join(["1", *versions])

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """Every reward is known, takes its options, and sees pictures."""
        for source, (inner, given) in _named(options["sources"]).items():
            found = check_reward(inner, **given)
            if getattr(found, "wants", "images") != "images" or found is cls:
                raise RewardError(f"{name}: sources {source!r} is {inner}, which cannot be one of them")

    @classmethod
    def asks_reward_model(cls, options: Mapping[str, Any]) -> bool:
        """One of its rewards does."""
        return any(asks_reward_model(inner, **given) for inner, given in _named(options["sources"]).values())

    @classmethod
    def check_prompts(cls, name: str, options: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> None:
        """Every prompt has a `data_source`, and every source a reward that can score its prompts."""
        sources = _named(options["sources"])
        for source in {_source(prompt, sources) for prompt in prompts}:
            inner, given = sources[source]
            found = check_reward(inner, **given)
            if isinstance(found, type):
                found.check_prompts(inner, given, [p for p in prompts if p.metadata[KEY] == source])

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Each reward scores its own samples, in their order."""
        scores = np.full(len(images), np.nan, np.float32)
        details: dict[str, list[Any]] = {}
        sources = [_source(prompt, self._rewards) for prompt in prompts]
        for source in dict.fromkeys(sources):
            rows = [row for row, of in enumerate(sources) if of == source]
            result = self._rewards[source](images[rows], [prompts[row] for row in rows])
            scores[rows] = result.scores
            columns = {f"score_{source}": result.scores.tolist()}
            columns |= {k if k == "error" else f"{k}_{source}": values for k, values in result.details.items()}
            for column, values in columns.items():
                placed = details.setdefault(column, [None] * len(images))
                for row, value in zip(rows, values, strict=True):
                    placed[row] = value
        return RewardResult(scores, details)


def _named(sources: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Source -> (reward, options). Raises RewardError for another form."""
    if not isinstance(sources, Mapping) or not sources:
        raise RewardError("by_data_source: sources must name a reward for each data_source")
    named = {}
    for source, entry in sources.items():
        given: Any = {"reward": entry} if isinstance(entry, str) else entry
        if (
            not isinstance(given, Mapping)
            or not {"reward"} <= set(given) <= {"reward", "options"}
            or not isinstance(given["reward"], str)
            or not isinstance(given.get("options"), Mapping | None)
        ):
            raise RewardError(f"by_data_source: sources {source!r} must be a reward's name, or `reward` and `options`")
        if not NAME.fullmatch(str(source)):
            raise RewardError(f"by_data_source: sources {source!r} names a metric: letters, digits, `_.-/` and blanks")
        named[str(source)] = given["reward"], dict(given.get("options") or {})
    return named


def _source(prompt: ScoredPrompt, sources: Mapping[str, Any]) -> str:
    source = prompt.metadata.get(KEY)
    if not isinstance(source, str) or source not in sources:
        raise RewardError(
            f"by_data_source: the prompt {prompt.prompt!r} has {KEY} {source!r}; sources names {', '.join(sources)}"
        )
    return source
