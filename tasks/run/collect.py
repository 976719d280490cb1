# SPDX-License-Identifier: Apache-2.0
"""Where an iteration's samples come from, and their record: rollout, reward and advantage, or a data set's pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from tasks.actors.reward_group import PendingScores, Scores
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import PendingOldLogProbs
from tasks.actors.waiting import get
from tasks.data.live_embeddings import LiveEmbeddings, Taken
from tasks.data.pairs import Pair, PairBatch
from tasks.records.metrics import compute_data_metrics_diffusion
from tasks.records.run_store import CheckpointError
from tasks.run.early_steps import EarlySteps, early_steps, step_early
from tasks.run.iteration_prompts import encode_ahead, iteration_prompts
from tasks.run.training import TrainingRun
from tasks.stages.advantage import advantage, alike
from tasks.stages.encode import encode_prompts
from tasks.stages.pairs import read_pairs
from tasks.stages.reward import finish_reward
from tasks.stages.rollout import finish_rollout, finish_rollout_ahead
from tasks.system.stopwatch import Stopwatch


def first_pictures(batches: Sequence[PendingBatch], count: int) -> list[np.ndarray]:
    """The first `count` pictures of an iteration, uint8 [H, W, 3] each; only the batches that hold them are fetched.

    None where the rewards see latents and nothing is decoded.
    """
    pictures: list[np.ndarray] = []
    for batch in batches:
        if len(pictures) >= count or batch.pictures is None:
            break
        pictures.extend(get(batch.pictures))
    return pictures[:count]


def sample_table(
    samples: pd.DataFrame, advantages: np.ndarray, seed: int, iteration: int, policy_version: int, kept: int
) -> pd.DataFrame:
    """An iteration's samples, with advantage, noise key (seed, iteration, uid, sample_index), policy and picture.

    Args:
        samples: of `Scores`, in the order sampled.
        advantages: [samples], in that order.
        policy_version: the iteration whose weights sampled.
        kept: so many pictures, the first, are artifacts; `image` is their path and empty for the others.
    """
    paths = [f"pictures/{iteration:06d}/{row:04d}.png" if row < kept else None for row in range(len(samples))]
    return samples.assign(
        advantage=advantages, seed=seed, iteration=iteration, policy_version=policy_version, image=paths
    )


@dataclass(kw_only=True)
class Iteration:
    """An iteration in progress, filled stage by stage.

    Attributes:
        number: from 1.
        batches: the samples, as the trainer takes them; empty where the iteration is in the weights already and nothing
            trains on them any more.
        pictures: the first few of the samples, as the tracking section asks for, uint8 [H, W, 3] each.
        advantages: [N], NaN where a sample is left out.
        samples: one row a sample, with what is needed to draw it again or to find it in the data set.
        metrics: of rewards and advantages.
        old: the trainer's own log-probs of the samples, where they are on their way already.
        early: what of its update has begun; None where nothing can.
    """

    number: int
    batches: Sequence[PendingBatch | PairBatch] = ()
    pictures: Sequence[np.ndarray] = ()
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    samples: pd.DataFrame = field(default_factory=pd.DataFrame)
    metrics: dict[str, float] = field(default_factory=dict)
    old: PendingOldLogProbs | None = None
    early: EarlySteps | None = None


@dataclass(kw_only=True)
class SampledIteration(Iteration):
    """An iteration of an online run: sampled, scored, given advantages.

    Attributes:
        policy_version: the iteration whose weights sample.
        pending: scores that are on their way.
        scores: of an earlier process of this run.
        is_kept: is its rollout in the run's folder, or to be written there?
        rollout_seconds: that workers spent sampling.
        text: what was encoded for it; None where the embeddings are on disk.
    """

    policy_version: int
    batches: Sequence[PendingBatch] = ()
    pending: PendingScores | None = None
    scores: Scores | None = None
    is_kept: bool = False
    rollout_seconds: float = 0.0
    text: Taken | None = None


def submit(run: TrainingRun, number: int, clock: Stopwatch) -> SampledIteration:
    """Start sampling and scoring an iteration with the weights of the last sync."""
    n, online = run.config.actor_rollout_ref.rollout.n, run.online
    prompts, text = iteration_prompts(run, number, clock)
    keys, batches = online.rollout.batch_keys(prompts, n, number), []
    with clock.stage("gen"):  # where the workers' queues are full, most of the rollout's time
        scoring = online.reward.begin([*map(len, keys)], len(online.rollout.group), training=True)
        for batch in online.rollout.hand_out(prompts, keys, run.windows(number)):
            batches.append(batch)
            scoring.add(batch)
    version, pending = online.rollout.policy_version, scoring.pending
    encode_ahead(run, number + 1, clock)
    return SampledIteration(number=number, policy_version=version, batches=batches, pending=pending, text=text)


def finish_ahead(run: TrainingRun, ahead: SampledIteration, clock: Stopwatch) -> None:
    """Wait until an iteration is sampled ahead, and have its rollout kept."""
    finish_rollout_ahead(clock, ahead.batches)
    _keep_rollout(run, ahead, clock)


def collect(run: TrainingRun, number: int, clock: Stopwatch, ahead: SampledIteration | None = None) -> Iteration:
    """The iteration's samples, from where `algorithm.sample_source` says; `ahead` if they were asked for before."""
    if not run.is_online:
        pairs, embeddings = run.pairs(number), run.inputs.embeddings
        if isinstance(embeddings, LiveEmbeddings):
            encode_prompts(clock, embeddings, embeddings.prompts([pair.prompt_uid for pair in pairs]), False)
        batches = read_pairs(clock, run.pair_dataset, embeddings, run.config, pairs, number)
        return pair_iteration(number, pairs, batches)
    iteration = find_or_submit(run, number, clock, ahead)
    scores = iteration.scores or sample_and_score(run, iteration, clock)
    learns = run.loss.learns_from_rewards()
    if learns:
        advantages, returns = advantage(clock, scores, run.config.algorithm)
    else:
        advantages = returns = alike(scores)
    if iteration.early is not None:
        iteration.early.check(advantages)
    version = iteration.policy_version
    if iteration.scores is None:  # and something can be learnt from them: if not, a run started again scores again
        kept = run.state(number), version, scores, iteration.pictures
        run.write_behind(clock, "kept_stages", run.stages.keep_scores, *kept)
    shown, seed = len(iteration.pictures), run.config.trainer.seed
    iteration.advantages = advantages
    iteration.samples = sample_table(scores.samples, advantages, seed, number, version, shown)
    iteration.metrics = _reward_metrics(scores, advantages, returns) | scores.metrics()
    iteration.metrics["rollout/policy_lag"] = float(number - 1 - version)
    iteration.metrics["perf/rollout_busy_s"] = iteration.rollout_seconds
    iteration.metrics["perf/reward_busy_s"] = scores.busy_seconds
    if iteration.text is not None:
        iteration.metrics["perf/embedding_cache_hits"] = iteration.text.share
    iteration.metrics |= run.online.floor.metrics(number, scores.by_reward)
    return iteration


def pair_iteration(number: int, pairs: Sequence[Pair], batches: Sequence[PairBatch]) -> Iteration:
    """An iteration of pairs, which nobody sampled: 1 is the advantage of each better one, -1 of each worse one."""
    samples = pd.DataFrame([{"pair": pair.uid, "uid": pair.prompt_uid, "iteration": number} for pair in pairs])
    advantages = np.concatenate([batch.advantages for batch in batches])
    return Iteration(number=number, batches=batches, advantages=advantages, samples=samples)


def find_or_submit(run: TrainingRun, number: int, clock: Stopwatch, ahead: SampledIteration | None) -> SampledIteration:
    """The iteration as far as it is: what an earlier process of this run had finished of it, `ahead`, or begun now.

    Raises:
        CheckpointError: what is kept is damaged, or is gone and cannot be made again.
    """
    trained = number <= run.iteration
    with clock.stage("kept_stages"):
        kept = None if trained or ahead else _kept_rollout(run, number, clock)
        found = _with_kept_scores(run, number, kept) if trained or kept else None
    if trained and found is None:
        raise CheckpointError(
            f"iteration {number} is in the newest checkpoint and not in MLflow, and its scores are not in "
            f"{run.config.run_dir / 'stages'}: remove that checkpoint to use an older one"
        )
    return found or kept or ahead or submit(run, number, clock)


def sample_and_score(run: TrainingRun, iteration: SampledIteration, clock: Stopwatch) -> Scores:
    """Wait for the iteration's samples and scores, and have the samples kept.

    The trainer replays the samples, if it is to, and takes the steps that need no more scores, while the others are
    waited for, unless it has room only when the rollout sleeps. Not while they are sampled, on GPUs of its own: a rank
    that waits for the next batch would not say that its checkpoint is written.
    """
    pending = iteration.pending or run.online.reward.submit(iteration.batches, training=True)
    iteration.rollout_seconds = finish_rollout(clock, iteration.batches)
    replays = not run.config.algorithm.rollout_correction.bypass_mode
    if replays and not run.config.actor_rollout_ref.rollout.sleeps:
        iteration.old = run.trainer.begin_old_log_probs(iteration.batches)
    _keep_rollout(run, iteration, clock)
    iteration.early = early = early_steps(run, iteration.number, iteration.batches, iteration.old)
    meanwhile = early and partial(step_early, run, early, iteration.batches, pending, iteration.old)
    scores = finish_reward(clock, run.online.reward, iteration.batches, pending, meanwhile)
    with clock.stage("pictures"):
        iteration.pictures = first_pictures(iteration.batches, run.config.tracking.pictures)
    return scores


def _kept_rollout(run: TrainingRun, number: int, clock: Stopwatch) -> SampledIteration | None:
    if not run.stages.has_rollout(number):
        return None
    n, (prompts, text) = run.config.actor_rollout_ref.rollout.n, iteration_prompts(run, number, clock)
    found = run.stages.rollout(run.state(number), run.online.rollout, prompts, n)
    if found is None:
        return None
    return SampledIteration(number=number, policy_version=found[0], batches=found[1], text=text, is_kept=True)


def _with_kept_scores(run: TrainingRun, number: int, kept: SampledIteration | None) -> SampledIteration | None:
    found = run.stages.scores(run.state(number), run.online.reward.weights())
    if found is None:
        return None
    version, scores, pictures = found
    batches = kept.batches if kept else ()
    return SampledIteration(number=number, policy_version=version, batches=batches, pictures=pictures, scores=scores)


def _keep_rollout(run: TrainingRun, iteration: SampledIteration, clock: Stopwatch) -> None:
    if run.config.trainer.keep_stages and not iteration.is_kept:
        kept = run.state(iteration.number), iteration.policy_version, iteration.batches
        run.write_behind(clock, "kept_stages", run.stages.keep_rollout, *kept)
        iteration.is_kept = True


def _reward_metrics(scores: Scores, advantages: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    batch = {"sample_level_rewards": scores.rewards, "uid": scores.uids}
    batch |= {"advantages": advantages, "returns": returns}
    numbers = scores.samples.drop(columns=["sample_index", "reward"]).select_dtypes("number")
    return compute_data_metrics_diffusion(batch) | {
        f"train/{name}/mean": float(value) for name, value in numbers.mean().dropna().items()
    }
