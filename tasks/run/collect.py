"""Where an iteration's samples come from, and their record: rollout, reward and advantage, or a data set's pairs."""

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


@dataclass
class Iteration:
    """An iteration in progress, filled stage by stage: sampled, scored, given advantages.

    Attributes:
        number: from 1.
        policy_version: the iteration whose weights sample; None of pairs, which nobody sampled.
        batches: the samples, as the trainer takes them; empty where the iteration is in the weights already and nothing
            trains on them any more.
        pending: scores that are on their way.
        scores: once they are there.
        scored_now: whether the scores are of this process, and not of an earlier one of this run.
        pictures: the first few of the samples, as the tracking section asks for, uint8 [H, W, 3] each.
        rollout_seconds: that workers spent sampling.
        advantages: [N], NaN where a sample is left out.
        samples: one row a sample, with what is needed to draw it again or to find it in the data set.
        metrics: of rewards and advantages.
    """

    number: int
    policy_version: int | None = None
    batches: Sequence[PendingBatch | PairBatch] = ()
    pending: PendingScores | None = None
    scores: Scores | None = None
    scored_now: bool = False
    pictures: Sequence[np.ndarray] = ()
    rollout_seconds: float = 0.0
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    samples: pd.DataFrame = field(default_factory=pd.DataFrame)
    metrics: dict[str, float] = field(default_factory=dict)


def submit(run: TrainingRun, number: int) -> Iteration:
    """Start sampling and scoring an iteration with the weights of the last sync."""
    n = run.config.actor_rollout_ref.rollout.n
    batches = run.rollout.submit(run.prompts(number), n, number, run.window(number))
    return Iteration(number, run.rollout.weights.version, batches, run.reward.submit(batches))


def finish_ahead(run: TrainingRun, ahead: Iteration, clock: Stopwatch) -> None:
    """Wait until an iteration is sampled ahead, and keep its rollout."""
    finish_rollout(clock, ahead.batches, stage="gen_ahead")
    _keep_rollout(run, ahead, clock)


def collect(run: TrainingRun, number: int, clock: Stopwatch, ahead: Iteration | None = None) -> Iteration:
    """The iteration's samples, from where `algorithm.sample_source` says; `ahead` if they were asked for before."""
    if not run.samples:
        return read_pairs(clock, run.inputs.pairs, run.inputs.embeddings, run.config, run.pairs(number), number)
    iteration = sample_and_score(run, number, clock, ahead)
    scores, version = iteration.scores, iteration.policy_version
    iteration.advantages = np.zeros(len(scores.samples), np.float32)  # every sample counts, whatever it is worth
    if run.loss.learns_from_rewards():
        iteration.advantages = advantage(clock, scores, run.config.algorithm)
    if iteration.scored_now:  # and something can be learnt from them: if not, a run started again scores again
        with clock.stage("kept_stages"):
            run.stages.keep_scores(run.state(number), version, scores, iteration.pictures)
    kept, seed = len(iteration.pictures), run.config.trainer.seed
    iteration.samples = sample_table(scores.samples, iteration.advantages, seed, number, version, kept)
    iteration.metrics = _reward_metrics(scores, iteration.advantages) | scores.metrics()
    iteration.metrics["rollout/policy_lag"] = float(number - 1 - version)
    iteration.metrics["perf/rollout_busy_s"] = iteration.rollout_seconds
    iteration.metrics["perf/reward_busy_s"] = scores.busy_seconds
    if run.floor is not None:
        iteration.metrics |= run.floor.metrics(number, scores.by_reward)
    return iteration


def sample_and_score(run: TrainingRun, number: int, clock: Stopwatch, ahead: Iteration | None) -> Iteration:
    """Sample and score; stages that an earlier process of this run had finished are read.

    Raises:
        CheckpointError: what is kept is damaged, or is gone and cannot be made again.
    """
    trained = number <= run.iteration
    with clock.stage("kept_stages"):
        kept = None if trained or ahead else _kept_rollout(run, number)
        found = _kept_scores(run, number, kept) if trained or kept else None
    if found is not None:
        return found
    if trained:
        raise CheckpointError(
            f"iteration {number} is in the newest checkpoint and not in MLflow, and its scores are not in "
            f"{run.config.run_dir / 'stages'}: remove that checkpoint to use an older one"
        )
    iteration = kept or ahead or submit(run, number)
    if iteration.pending is None:
        iteration.pending = run.reward.submit(iteration.batches)
    iteration.rollout_seconds = finish_rollout(clock, iteration.batches)
    if kept is None and ahead is None:
        _keep_rollout(run, iteration, clock)
    iteration.scores = finish_reward(clock, run.reward, iteration.batches, iteration.pending)
    iteration.scored_now = True
    with clock.stage("pictures"):
        iteration.pictures = first_pictures(iteration.batches, run.config.tracking.pictures)
    return iteration


def _kept_rollout(run: TrainingRun, number: int) -> Iteration | None:
    found = run.stages.rollout(
        run.state(number), run.rollout, run.prompts(number), run.config.actor_rollout_ref.rollout.n
    )
    return None if found is None else Iteration(number, *found)


def _kept_scores(run: TrainingRun, number: int, kept: Iteration | None) -> Iteration | None:
    found = run.stages.scores(run.state(number), run.reward.weights())
    if found is None:
        return None
    version, scores, pictures = found
    return Iteration(number, version, kept.batches if kept else (), scores=scores, pictures=pictures)


def _keep_rollout(run: TrainingRun, iteration: Iteration, clock: Stopwatch) -> None:
    if run.config.trainer.keep_stages:
        with clock.stage("kept_stages"):
            state = run.state(iteration.number)
            run.stages.keep_rollout(state, iteration.policy_version, run.rollout, iteration.batches)


@task(name="read-pairs", cache_policy=NO_CACHE, persist_result=False)
def read_pairs(
    clock: Stopwatch,
    data: PairDataset,
    embeddings: PromptEmbeddings,
    config: TrainConfig,
    pairs: Sequence[Pair],
    iteration: int,
) -> Iteration:
    """The iteration's pairs, one batch for each rank that has samples of its own, and optimiser step."""
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size // config.data_ranks
    with clock.stage("read_pairs"):
        batches = list(data.batches(pairs, embeddings, size, config.trainer.seed, iteration))
    samples = pd.DataFrame([{"pair": pair.uid, "uid": pair.prompt_uid, "iteration": iteration} for pair in pairs])
    advantages = np.concatenate([batch.advantages for batch in batches])
    return Iteration(iteration, batches=batches, advantages=advantages, samples=samples)


def _reward_metrics(scores: Scores, advantages: np.ndarray) -> dict[str, float]:
    batch = {"sample_level_rewards": scores.rewards, "uid": scores.uids}
    batch |= {"advantages": advantages, "returns": advantages}
    numbers = scores.samples.drop(columns=["sample_index", "reward"]).select_dtypes("number")
    return compute_data_metrics_diffusion(batch) | {
        f"train/{name}/mean": float(value) for name, value in numbers.mean().dropna().items()
    }
