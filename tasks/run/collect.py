"""The record of an iteration's samples: what is needed to look at any of them, or to draw it again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import ray
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.actors.reward_group import PendingScores, Scores
from tasks.actors.rollout_group import PendingBatch
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import PromptEmbeddings
from tasks.data.pairs import Pair, PairBatch, PairDataset
from tasks.records.metrics import compute_data_metrics_diffusion
from tasks.records.run_store import CheckpointError
from tasks.run.training import TrainingRun
from tasks.stages.advantage import advantage
from tasks.stages.reward import finish_reward
from tasks.stages.rollout import finish_rollout
from tasks.system.stopwatch import Stopwatch


def first_pictures(batches: Sequence[PendingBatch], count: int) -> list[np.ndarray]:
    """The first `count` pictures of an iteration, uint8 [H, W, 3] each; only the batches that hold them are fetched.

    None where the rewards see latents and nothing is decoded.
    """
    pictures: list[np.ndarray] = []
    for batch in batches:
        if len(pictures) >= count or batch.pictures is None:
            break
        pictures.extend(ray.get(batch.pictures))
    return pictures[:count]


def sample_table(
    samples: pd.DataFrame, advantages: np.ndarray, seed: int, iteration: int, policy_version: int, kept: int
) -> pd.DataFrame:
    """An iteration's samples, with advantage, noise key (seed, iteration, uid, sample_index), policy and picture.

    Args:
        samples: of `Scores`, in the order sampled.
        policy_version: the iteration whose weights sampled.
        kept: so many pictures, the first, are artifacts; `image` is their path and empty for the others.
    """
    paths = [f"pictures/{iteration:06d}/{row:04d}.png" if row < kept else None for row in range(len(samples))]
    return samples.assign(
        advantage=advantages, seed=seed, iteration=iteration, policy_version=policy_version, image=paths
    )


@dataclass(frozen=True)
class Sampling:
    """An iteration that is being sampled and scored.

    Attributes:
        policy_version: the iteration whose weights sample.
        batches, scores: what will be there.
    """

    policy_version: int
    batches: list[PendingBatch]
    scores: PendingScores


@dataclass(frozen=True)
class Collected:
    """What an iteration trains on.

    Attributes:
        batches: the samples, as the trainer takes them.
        advantages: [N], NaN where a sample is left out.
        samples: one row a sample, with what is needed to draw it again or to find it in the data set.
        metrics: of rewards and advantages.
        pictures: the first few of the samples, as the tracking section asks for.
    """

    batches: Sequence[PendingBatch | PairBatch]
    advantages: np.ndarray
    samples: pd.DataFrame
    metrics: dict[str, float] = field(default_factory=dict)
    pictures: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Scored:
    """An iteration that is sampled and scored.

    Attributes:
        policy_version: the iteration whose weights sampled.
        batches: empty where the iteration is in the weights: nothing trains on them any more.
        pictures: the first few.
        seconds: that workers spent sampling.
        fresh: whether the scores are of now, and not of an earlier process of this run.
    """

    policy_version: int
    batches: Sequence[PendingBatch]
    scores: Scores
    pictures: Sequence[np.ndarray]
    seconds: float = 0.0
    fresh: bool = False


def submit(run: TrainingRun, iteration: int) -> Sampling:
    """Start sampling and scoring an iteration with the weights of the last sync."""
    batches = run.rollout.submit(
        run.prompts(iteration), run.config.actor_rollout_ref.rollout.n, iteration, run.window(iteration)
    )
    return Sampling(run.rollout.weights.version, batches, run.reward.submit(batches))


def finish_ahead(run: TrainingRun, iteration: int, ahead: Sampling, clock: Stopwatch) -> None:
    """Wait until an iteration is sampled ahead, and keep its rollout."""
    finish_rollout(clock, ahead.batches, stage="gen_ahead")
    _keep_rollout(run, iteration, ahead, clock)


def collect(run: TrainingRun, iteration: int, clock: Stopwatch, ahead: Sampling | None = None) -> Collected:
    """The iteration's samples, from where `algorithm.sample_source` says; `ahead` if they were asked for before."""
    if not run.samples:
        return read_pairs(clock, run.inputs.pairs, run.inputs.embeddings, run.config, run.pairs(iteration), iteration)
    scored = score(run, iteration, clock, ahead)
    scores, version = scored.scores, scored.policy_version
    advantages = np.zeros(len(scores.samples), np.float32)  # every sample counts, whatever it is worth
    if run.loss.learns_from_rewards():
        advantages = advantage(clock, scores, run.config.algorithm)
    if scored.fresh:  # and something can be learnt from them: if not, a run started again scores again
        with clock.stage("kept_stages"):
            run.stages.keep_scores(run.state(iteration), version, scores, scored.pictures)
    kept = len(scored.pictures)
    samples = sample_table(scores.samples, advantages, run.config.trainer.seed, iteration, version, kept)
    lag = {"rollout/policy_lag": float(iteration - 1 - version)}
    busy = {"perf/rollout_busy_s": scored.seconds, "perf/reward_busy_s": scores.busy_seconds}
    metrics = _reward_metrics(scores, advantages) | scores.metrics() | lag | busy
    if run.floor is not None:
        metrics |= run.floor.metrics(iteration, scores.by_reward)
    return Collected(scored.batches, advantages, samples, metrics, scored.pictures)


def score(run: TrainingRun, iteration: int, clock: Stopwatch, ahead: Sampling | None) -> Scored:
    """Sample and score; stages that an earlier process of this run had finished are read.

    Raises:
        CheckpointError: what is kept is damaged, or is gone and cannot be made again.
    """
    stages, state, trained = run.stages, run.state(iteration), iteration <= run.iteration
    prompts, n = run.prompts(iteration), run.config.actor_rollout_ref.rollout.n
    with clock.stage("kept_stages"):
        kept = None if trained or ahead else stages.rollout(state, run.rollout, prompts, n)
        found = stages.scores(state, run.reward.weights()) if trained or kept else None
    if found is not None:
        return Scored(found[0], kept[1] if kept else [], *found[1:])
    if trained:
        raise CheckpointError(
            f"iteration {iteration} is in the newest checkpoint and not in MLflow, and its scores are not in "
            f"{run.config.run_dir / 'stages'}: remove that checkpoint to use an older one"
        )
    sampling = Sampling(*kept, run.reward.submit(kept[1])) if kept else ahead or submit(run, iteration)
    seconds = finish_rollout(clock, sampling.batches)
    if kept is None and ahead is None:
        _keep_rollout(run, iteration, sampling, clock)
    scores = finish_reward(clock, run.reward, sampling.batches, sampling.scores)
    with clock.stage("pictures"):
        pictures = first_pictures(sampling.batches, run.config.tracking.pictures)
    return Scored(sampling.policy_version, sampling.batches, scores, pictures, seconds, fresh=True)


def _keep_rollout(run: TrainingRun, iteration: int, sampling: Sampling, clock: Stopwatch) -> None:
    if run.config.trainer.keep_stages:
        with clock.stage("kept_stages"):
            run.stages.keep_rollout(run.state(iteration), sampling.policy_version, run.rollout, sampling.batches)


@task(name="read-pairs", cache_policy=NO_CACHE, persist_result=False)
def read_pairs(
    clock: Stopwatch,
    data: PairDataset,
    embeddings: PromptEmbeddings,
    config: TrainConfig,
    pairs: Sequence[Pair],
    iteration: int,
) -> Collected:
    """The iteration's pairs, one batch for each rank that has samples of its own, and optimiser step."""
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size // config.data_ranks
    with clock.stage("read_pairs"):
        batches = list(data.batches(pairs, embeddings, size, config.trainer.seed, iteration))
    samples = pd.DataFrame([{"pair": pair.uid, "uid": pair.prompt_uid, "iteration": iteration} for pair in pairs])
    return Collected(batches, np.concatenate([batch.advantages for batch in batches]), samples)


def _reward_metrics(scores: Scores, advantages: np.ndarray) -> dict[str, float]:
    batch = {"sample_level_rewards": scores.rewards, "uid": scores.uids}
    batch |= {"advantages": advantages, "returns": advantages}
    numbers = scores.samples.drop(columns=["sample_index", "reward"]).select_dtypes("number")
    return compute_data_metrics_diffusion(batch) | {
        f"train/{name}/mean": float(value) for name, value in numbers.mean().dropna().items()
    }
