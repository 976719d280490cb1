# SPDX-License-Identifier: Apache-2.0
"""A reward that leaves each sample to the one that its prompt's `data_source` names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.rewards.base import (
    Input,
    Reward,
    RewardResult,
    ScoredPrompt,
    asks_reward_model,
    can_be_metric,
    check_reward,
    get_reward,
    register_reward,
    reward_input,
)
from tasks.rewards.errors import RewardError

KEY = "data_source"
"""Of a prompt's metadata."""
LONGEST_SOURCE = 60
"""Characters: it is a part of metrics' names, as of the details of its reward."""


@register_reward("by_data_source")
class ByDataSource(Reward):
    """The score of the reward that `sources` names for the prompt's `data_source`.

    Each reward's own scores stand in the detail `score_<source>`, its details in `<detail>_<source>`; None elsewhere.
    One that raises leaves its own samples without a score, as long as another one has scores; its worker asks for
    those again, `retries` times.
    The advantages compare samples of one prompt, so scores on different scales do no harm unless
    `algorithm.global_std` is on.
    """

    def __init__(self, *, sources: Mapping[str, Any]):
        """
        Args:
            sources: `data_source` -> a reward's name, or {"reward": name, "options": {...}}.
        """
        self._rewards = {source: get_reward(name, **options) for source, (name, options) in _named(sources).items()}
        self.wants = self.input_with({"sources": sources})  # type: ignore[misc]  # a class's is fixed
        versions = [f"{source}={reward.name} {reward.version}" for source, reward in sorted(self._rewards.items())]
        self.version = " ".join(["1", *versions])

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """Every reward is known, takes its options, and sees pictures or videos."""
        for source, (inner, given) in _named(options["sources"]).items():
            found = check_reward(inner, **given)
            if reward_input(inner, **given) == "latents" or found is cls:
                raise RewardError(f"{name}: sources {source!r} is {inner}, which cannot be one of them")

    @classmethod
    def input_with(cls, options: Mapping[str, Any]) -> Input:
        """Whole videos where one of its rewards wants them; of another one's frames all are scored then."""
        wanted = {reward_input(inner, **given) for inner, given in _named(options["sources"]).values()}
        return "video" if "video" in wanted else "images"

    @classmethod
    def gpu_models(cls, options: Mapping[str, Any]) -> tuple[list[Path], str]:
        """Those of its rewards, in the format of the largest numbers; a function says nothing of its models."""
        named = [(check_reward(inner, **given), given) for inner, given in _named(options["sources"]).values()]
        found = [reward.gpu_models(given) for reward, given in named if isinstance(reward, type)]
        formats = sorted(dtype for _, dtype in found if dtype)
        return [folder for folders, _ in found for folder in folders], max(formats, key=_bytes, default="")

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
        """Each reward scores its own samples, in their order. Raises what all of them raise."""
        images = images[:, 0] if images.ndim == 5 and images.shape[1] == 1 else images
        scores = np.full(len(images), np.nan, np.float32)
        details: dict[str, list[Any]] = {}
        sources, raised = [_source(prompt, self._rewards) for prompt in prompts], dict[str, Exception]()
        own = {source: [row for row, of in enumerate(sources) if of == source] for source in dict.fromkeys(sources)}
        again: list[tuple[int, ...]] = []
        for source, rows in own.items():
            result = self._scored(source, images[rows], [prompts[row] for row in rows], raised)
            scores[rows] = result.scores
            again += [tuple(rows[index] for index in together) for together in result.raised]
            columns = {k if k == "error" else f"{k}_{source}": values for k, values in result.details.items()}
            columns |= {f"score_{source}": result.scores.tolist()}
            for column, values in columns.items():
                placed = details.setdefault(column, [None] * len(images))
                for row, value in zip(rows, values, strict=True):
                    placed[row] = value
        if raised and len(raised) == len(own):
            raise next(iter(raised.values()))
        return RewardResult(scores, details, raised=(*again, *(tuple(own[source]) for source in raised)))

    def _scored(
        self, source: str, images: np.ndarray, prompts: Sequence[ScoredPrompt], raised: dict[str, Exception]
    ) -> RewardResult:
        """Of one source; no scores, and one more in `raised`, where its reward raises what another try may cure."""
        try:
            return self._rewards[source](images, prompts)
        except RewardError:
            raise
        except Exception as error:
            raised[source] = error
            reason = f"{type(error).__name__}: {error}"
            return RewardResult(np.full(len(images), np.nan), {"error": [reason] * len(images)})


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
        if not _names_a_metric(str(source)):
            raise RewardError(
                f"by_data_source: sources {source!r} names a metric: at most {LONGEST_SOURCE} letters, digits, `_.-/` "
                "and blanks, and no empty or dotted part"
            )
        named[str(source)] = given["reward"], dict(given.get("options") or {})
    return named


def _names_a_metric(source: str) -> bool:
    return 0 < len(source) <= LONGEST_SOURCE and ":" not in source and can_be_metric(f"score_{source}")


def _bytes(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _source(prompt: ScoredPrompt, sources: Mapping[str, Any]) -> str:
    source = prompt.metadata.get(KEY)
    if not isinstance(source, str) or source not in sources:
        raise RewardError(
            f"by_data_source: the prompt {prompt.prompt!r} has {KEY} {source!r}; sources names {', '.join(sources)}"
        )
    return source
