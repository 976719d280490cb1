"""Reward: pictures become numbers, each as soon as it is sampled."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import ray
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.clock import Stopwatch
from tasks.cluster import ActorGroup
from tasks.config import RewardConfig
from tasks.dataset import Prompt
from tasks.rewards import RewardResult, get_reward, weighted_sum
from tasks.rollout import PendingBatch


class RewardActor:
    """One reward worker: every reward of the run, its models loaded once."""

    def __init__(self, config: RewardConfig):
        self.rewards = {name: get_reward(name, **entry.options) for name, entry in config.functions.items()}

    def ready(self) -> dict[str, str]:
        """Reward name -> version, once the models are loaded."""
        return {name: reward.version for name, reward in self.rewards.items()}

    def score(self, pictures: np.ndarray, prompts: Sequence[Prompt]) -> tuple[dict[str, RewardResult], float]:
        """Every reward of a batch [B, H, W, 3], and the seconds it took."""
        start = time.perf_counter()
        results = {name: reward(pictures, prompts) for name, reward in self.rewards.items()}
        return results, time.perf_counter() - start


@dataclass(frozen=True)
class Scores:
    """An iteration's rewards.

    Attributes:
        samples: one row a sample: uid, prompt, sample_index, reward, reward/<name>, <name>/<detail>.
        weights: reward name -> its share of the trained reward.
        busy_seconds: what the workers spent scoring.
    """

    samples: pd.DataFrame
    weights: Mapping[str, float]
    busy_seconds: float

    @property
    def rewards(self) -> np.ndarray:
        """The trained reward [B], float32; NaN where one is missing."""
        return self.samples["reward"].to_numpy(np.float32)

    @property
    def by_reward(self) -> dict[str, np.ndarray]:
        """Reward name -> its scores [B], float32; NaN where one is missing."""
        return {name: self.samples[f"reward/{name}"].to_numpy(np.float32) for name in self.weights}

    @property
    def uids(self) -> np.ndarray:
        """Prompt uid [B]: the group."""
        return self.samples["uid"].to_numpy(str)


class RewardGroup:
    """The reward workers."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self.group = ActorGroup(RewardActor, config.num_workers, 0, (config,))

    def versions(self) -> dict[str, str]:
        """Reward name -> version; waits until the workers are up."""
        return self.group.call_all("ready")[0]

    def submit(self, batches: Sequence[PendingBatch]) -> list[ray.ObjectRef]:
        """Start scoring; Ray hands each batch's pictures over when they are there, while others are still sampled."""
        actors = self.group.actors
        return [
            actors[number % len(actors)].score.remote(batch.pictures, batch.prompts)
            for number, batch in enumerate(batches)
        ]

    def table(
        self, batches: Sequence[PendingBatch], results: Sequence[tuple[dict[str, RewardResult], float]]
    ) -> Scores:
        """Join batches and their results into one table."""
        weights = {name: entry.weight for name, entry in self.config.functions.items()}
        frames = [_frame(batch, scores, weights) for batch, (scores, _) in zip(batches, results, strict=True)]
        return Scores(pd.concat(frames, ignore_index=True), weights, sum(seconds for _, seconds in results))


def _frame(batch: PendingBatch, scores: Mapping[str, RewardResult], weights: Mapping[str, float]) -> pd.DataFrame:
    columns: dict[str, Any] = {
        "uid": [prompt.uid for prompt in batch.prompts],
        "prompt": [prompt.prompt for prompt in batch.prompts],
        "sample_index": batch.sample_index,
        "reward": weighted_sum({name: result.scores for name, result in scores.items()}, weights),
    }
    for name, result in scores.items():
        columns[f"reward/{name}"] = result.scores
        columns |= {f"{name}/{detail}": values for detail, values in result.details.items()}
    return pd.DataFrame(columns)


@task(name="reward", cache_policy=NO_CACHE, persist_result=False)
def finish_reward(
    clock: Stopwatch, group: RewardGroup, batches: list[PendingBatch], scores: list[ray.ObjectRef]
) -> Scores:
    """Wait until every batch is scored; a reward's error is raised here."""
    with clock.stage("reward"):
        return group.table(batches, ray.get(scores))
