# SPDX-License-Identifier: Apache-2.0
"""All reward workers as one: what they are sent, and what they answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pandas as pd
import ray

from tasks.actors.actor_group import ActorGroup
from tasks.actors.rank_places import RankPlaces
from tasks.actors.reward_model import RewardModel
from tasks.actors.reward_pool import PendingCall, PoolScoring, RewardFailure, RewardPool
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.waiting import get
from tasks.config.reward import RewardConfig, RewardFunctionConfig
from tasks.rewards import (
    NOT_FINITE,
    RewardError,
    reward_input,
    weighted_sum,
    with_group_means,
)
from tasks.rewards.statistics import PictureStatistics, diversity, picture_statistics

MEASURE: Any = ray.remote(num_cpus=0, max_retries=-1)(picture_statistics)
"""Stateless, so any idle worker of Ray's may do it, and Ray repeats it if that one dies. Made once: each new remote
function is pickled and sent to Ray's head at its first call."""


@dataclass(frozen=True)
class PendingScores:
    """What is being scored: reward name -> its calls in the samples' order, and each batch's picture statistics."""

    calls: Mapping[str, Sequence[PendingCall]]
    statistics: Sequence[ray.ObjectRef]

    @property
    def answers(self) -> list[ray.ObjectRef]:
        """References to what all calls return."""
        return [call.answer for calls in self.calls.values() for call in calls]


@dataclass(frozen=True)
class Scores:
    """An iteration's rewards.

    Attributes:
        samples: one row a sample: uid, prompt, sample_index, finite, reward, reward/<name>, <name>/<detail>,
            image/<statistic>. Of a reward that measures a share of them, <name>/measured says which. A sample that is
            not finite has none of the numbers.
        weights: reward name -> its share of the trained reward, 0 for a guard.
        busy: reward name -> seconds its workers spent scoring.
    """

    samples: pd.DataFrame
    weights: Mapping[str, float]
    busy: Mapping[str, float]

    @property
    def rewards(self) -> np.ndarray:
        """The trained reward [B], float32; NaN where one is missing."""
        return self.samples["reward"].to_numpy(np.float32)

    @property
    def by_reward(self) -> dict[str, np.ndarray]:
        """Reward name -> its scores [B], float32; NaN where one is missing."""
        return {name: self.samples[f"reward/{name}"].to_numpy(np.float32) for name in self.weights}

    @property
    def finite(self) -> np.ndarray:
        """Which samples [B] are finite, bool; of scores that an older version kept all of them."""
        return finite_samples(self.samples)

    @property
    def uids(self) -> np.ndarray:
        """Prompt uid [B]: the group."""
        return self.samples["uid"].to_numpy(str)

    @property
    def busy_seconds(self) -> float:
        """What all workers spent scoring."""
        return sum(self.busy.values())

    def metrics(self) -> dict[str, float]:
        """rollout/not_finite, the samples that no reward was given, reward/<name>/missing, those without that score, of
        them reward/<name>/not_finite, where the reward did answer, and perf/reward_busy_s/<name>."""
        missing = {f"reward/{name}/missing": float(self._missing(name)) for name in self.by_reward}
        missing |= {f"reward/{name}/not_finite": float(self._not_finite(name)) for name in self.by_reward}
        missing["rollout/not_finite"] = not_finite(self.samples)
        return missing | {f"perf/reward_busy_s/{name}": seconds for name, seconds in self.busy.items()}

    def _missing(self, name: str) -> int:
        """Of the samples that it measured."""
        lacking = self.samples[f"reward/{name}"].isna()
        return int((lacking & self.samples.get(f"{name}/measured", True)).sum())

    def _not_finite(self, name: str) -> int:
        errors = self.samples.get(f"{name}/error", pd.Series(dtype=object))
        return sum(isinstance(error, str) and error.startswith(NOT_FINITE) for error in errors)


@dataclass
class Scoring:
    """All rewards of batches that are still being handed out.

    Attributes:
        pools: reward name -> its calls.
        with_statistics: measure the pictures too?
        statistics: of each batch with pictures.
    """

    pools: Mapping[str, PoolScoring]
    with_statistics: bool
    statistics: list[ray.ObjectRef] = field(default_factory=list)

    def add(self, batch: PendingBatch) -> None:
        """The next batch is handed out: begin what can be scored of it, while others are still sampled."""
        for pool in self.pools.values():
            pool.add(batch)
        if self.with_statistics and batch.pictures is not None:
            self.statistics.append(MEASURE.remote(batch.pictures))

    @property
    def pending(self) -> PendingScores:
        """What is being scored, once every batch was added."""
        return PendingScores({name: pool.calls for name, pool in self.pools.items()}, self.statistics)


class RewardGroup:
    """All rewards of a run, each with its own workers.

    Args:
        config: the rewards.
        model: the model that some of them ask, from `served_reward_model`.
        load_seconds: what a worker that is started again has to load.
        places: those of the trainer's ranks, for rewards that are colocated with them.
    """

    def __init__(
        self,
        config: RewardConfig,
        model: RewardModel | None = None,
        load_seconds: float = inf,
        places: RankPlaces | None = None,
    ):
        self.config, self.model = config, model
        self.pools = {
            label: RewardPool(label, name, entry, model, load_seconds, places)
            for label, (name, entry) in config.named().items()
        }

    def groups(self) -> dict[str, ActorGroup]:
        """The workers of each reward, by the name that metrics call them."""
        groups = {f"reward_{name}".replace(":", "/"): pool.group for name, pool in self.pools.items()}
        return groups if self.model is None else groups | {"reward_model": self.model.group}

    def versions(self, seconds: float = inf) -> dict[str, str]:
        """Reward name -> version; waits until the workers are up, of which each may load for so many seconds."""
        if self.model is not None:
            self.model.wait()
        found = {name: pool.version(seconds) for name, pool in self.pools.items()}
        if self.model is not None:
            self.model.rest()
        return found

    def begin(self, sizes: Sequence[int], at_once: int = 1, *, training: bool) -> Scoring:
        """Get ready to score batches of these sizes, which are then added one by one.

        Args:
            sizes: of the batches of an iteration or a validation, in their order.
            at_once: of them that many are sampled at the same time, as there are rollout workers.
            training: are they an iteration's, of which some rewards measure a `training_share` only?
        """
        shares = {name: pool.config.training_share if training else 1.0 for name, pool in self.pools.items()}
        if self.model is not None and self._ask_model(shares):
            self.model.begin_use()
        last = (len(sizes) - 1) % at_once + 1  # that come at the same time, when nothing else is sampled any more
        pools = {name: pool.begin(sizes, shares[name], last) for name, pool in self.pools.items()}
        return Scoring(pools, self.config.guards.statistics)

    def submit(self, batches: Sequence[PendingBatch], *, training: bool) -> PendingScores:
        """Start scoring batches that are all handed out; see `begin`."""
        workers = {batch.worker for batch in batches}
        scoring = self.begin([len(batch.prompts) for batch in batches], max(1, len(workers)), training=training)
        for batch in batches:
            scoring.add(batch)
        return scoring.pending

    def table(self, batches: Sequence[PendingBatch], pending: PendingScores) -> Scores:
        """Wait for all rewards and join them into one table; see `RewardPool.collect` for the errors."""
        finite = np.concatenate(get([batch.finite for batch in batches]))
        samples = pd.DataFrame(
            {
                "uid": [prompt.uid for batch in batches for prompt in batch.prompts],
                "prompt": [prompt.prompt for batch in batches for prompt in batch.prompts],
                "sample_index": [key.sample_index for batch in batches for key in batch.keys],
                "finite": finite,
            }
        )
        limit = self.config.max_missing_fraction
        try:
            collected = {
                name: pool.collect(pending.calls[name], len(samples), limit) for name, pool in self.pools.items()
            }
        except (RewardFailure, RewardError):
            self._tell_deaths()
            raise
        self._tell_deaths()
        if self.model is not None and self._ask_model(pending.calls):
            self.model.end_use()
        uids = samples["uid"].to_numpy(str)
        scores = {name: table[f"reward/{name}"].to_numpy() for name, (table, _) in collected.items()}
        # An optional score is its group's mean where it is missing; here the sample is.
        rewards = trained_reward(scores, self.config.functions, uids)
        samples["reward"] = np.where(finite, rewards, np.float32(np.nan))
        parts: Iterable[pd.DataFrame] = [samples, *(table for table, _ in collected.values())]
        _check_apart(list(collected.values()))
        joined = pd.concat([*parts, _statistics(get(list(pending.statistics)), uids, finite)], axis=1)
        return Scores(joined, self.weights(), {name: busy for name, (_, busy) in collected.items()})

    def early_rewards(
        self, batches: Sequence[PendingBatch], pending: PendingScores, start: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(trained reward [B], NaN where one is missing; prompt uid [B]) of some batches, once they are scored, as
        `table` will have them; None where a score could not be got, of which `table` says why, or where an optional one
        is missing, for which the mean of other groups may stand.

        Args:
            batches: some that follow each other, of whole groups.
            pending: scores of the whole iteration.
            start: number of their first sample in it.
        """
        uids = np.array([prompt.uid for batch in batches for prompt in batch.prompts])
        trained = {name: entry for name, entry in self.config.functions.items() if entry.share}
        scores: dict[str, np.ndarray] = {}
        finite = np.concatenate(get([batch.finite for batch in batches]))
        for name, entry in trained.items():
            found = self.pools[name].early_scores(pending.calls[name], start, start + len(uids))
            if found is None or not (entry.required or np.isfinite(found[finite]).all()):
                return None
            scores[name] = found
        return np.where(finite, trained_reward(scores, trained, uids), np.float32(np.nan)), uids

    def _ask_model(self, measured: Mapping[str, Any]) -> bool:
        """Is something measured that asks the model? `measured` has something true for each reward that measures."""
        return any(measured[name] for name, pool in self.pools.items() if pool.asks_model)

    def _tell_deaths(self) -> None:
        if self.model is not None:
            self.model.tell_deaths()

    def weights(self) -> dict[str, float]:
        """Reward name -> its share of the trained reward, 0 for a guard."""
        return {name: entry.share for name, entry in self.config.functions.items()}


def wanted_inputs(config: RewardConfig) -> set[str]:
    """What the rewards of a run want, without loading them: some of "images", "video" and "latents"."""
    return {reward_input(name, **entry.options) for name, entry in config.named().values()}


def trained_reward(
    scores: Mapping[str, np.ndarray], functions: Mapping[str, RewardFunctionConfig], uids: np.ndarray
) -> np.ndarray:
    """The weighted sum [B]: NaN where a required score is missing; an optional one is then the mean of its group's
    samples that have a sum: one that nobody is compared with would speak for or against this one."""
    needed = [values for name, values in scores.items() if functions[name].required and functions[name].share]
    there = np.isfinite(needed).all(0)  # of all, where none is needed
    filled = dict(scores)
    for name, values in scores.items():
        if not functions[name].required:
            filled[name] = with_group_means(np.where(there, values, np.float32(np.nan)), uids)
    return weighted_sum(filled, {name: functions[name].share for name in scores})


def finite_samples(samples: pd.DataFrame) -> np.ndarray:
    """Which rows [B] of `Scores.samples` are of finite samples, bool; all of a table that an older version wrote."""
    return samples["finite"].to_numpy(bool) if "finite" in samples else np.ones(len(samples), bool)


def not_finite(samples: pd.DataFrame) -> float:
    """How many of these rows are of samples that are not finite: a metric `rollout/not_finite`."""
    return float((~finite_samples(samples)).sum())


def _check_apart(collected: Sequence[tuple[pd.DataFrame, float]]) -> None:
    """Raise RewardError where a column is two rewards', as `reward/text` may be a detail's and a reward's."""
    names = [column for table, _ in collected for column in table.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RewardError(
            f"{twice} would be the column of two rewards: give the detail, or one of the rewards, another name"
        )


def _statistics(measured: Sequence[PictureStatistics], uids: np.ndarray, finite: np.ndarray) -> pd.DataFrame:
    """Columns image/<statistic>, NaN where a sample is not finite; none where no pictures were decoded, or none were to
    be measured."""
    if not measured:
        return pd.DataFrame()
    columns: dict[str, Any] = {
        f"image/{name}": np.concatenate([batch.values[name] for batch in measured])[finite]
        for name in measured[0].values
    }
    thumbnails = np.concatenate([batch.thumbnails for batch in measured])[finite]
    columns["image/diversity"] = diversity(thumbnails, uids[finite])
    return pd.DataFrame(columns, index=np.flatnonzero(finite)).reindex(range(len(uids)))
