"""The training loop: rollout -> reward -> advantage -> update -> sync (-> validate, save)."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from prefect import flow, get_run_logger

from flows.checks import check_inputs
from flows.config import TrainConfig, TrainOverrides
from flows.progress import Progress
from flows.run import TrainingRun, open_run
from flows.summary import Summary, register_export, summarise
from models.algorithms.rollout_correction import too_far_apart
from tasks.advantage import advantage
from tasks.checkpoint import save_checkpoint
from tasks.clock import Stopwatch
from tasks.cluster import gpu_slots, ray_cluster
from tasks.metrics import (
    compute_data_metrics_diffusion,
    compute_throughput_metrics_diffusion,
    compute_timing_metrics_diffusion,
    cost_metrics,
    orchestration_metrics,
)
from tasks.old_log_prob import old_log_prob
from tasks.pictures import WIDEST_GRID, grid
from tasks.reward import Scores, finish_reward
from tasks.rollout import finish_rollout
from tasks.samples import first_pictures, sample_table
from tasks.tracking import log_step
from tasks.update import sync_weights, update
from tasks.validate import Validation, validate


@flow(name="train", persist_result=False)
def train(config: TrainConfig, overrides: TrainOverrides | None = None) -> dict[str, Any]:
    """Post-train a flow-matching model by reinforcement learning.

    A run is named by its config: started again after anything killed it, it continues where its last checkpoint
    ends, in the same MLflow run.

    Args:
        config: everything the run depends on.
        overrides: changes to it, for use with a deployment: only the fields given here are replaced.
    """
    config = config.with_changes(overrides)
    inputs = check_inputs(config)
    with gpu_slots(config.ray_init, config.gpus), ray_cluster(config.ray_init), open_run(config, inputs) as run:
        return fit(run).as_dict()


def fit(run: TrainingRun) -> Summary:
    """All iterations that are not done yet, and the run's summary."""
    settings = run.config.trainer
    total, started = settings.total_training_steps, time.perf_counter()
    bar = Progress(run.config.run_name, total, run.iteration)
    clock = Stopwatch()
    sync_weights(clock, run.trainer, run.rollout, run.canary, run.iteration, run.tolerance)
    if run.iteration == 0 and settings.val_before_train:
        result = measure(run, clock)
        log_step(clock, run.tracker, 0, result.metrics(), *_validation_records(result))
        bar.show(held_out=result.reward)
    first = run.iteration + 1
    for iteration in range(first, total + 1):
        metrics = iterate(run, iteration)
        if iteration == first:
            _warn_of_distance(run, metrics)
        bar.advance(reward=metrics["critic/rewards/mean"], held_out=run.held_out)
    bar.close()
    return summarise(run, (time.perf_counter() - started) / 60)


def iterate(run: TrainingRun, iteration: int) -> dict[str, float]:
    """One iteration, as the paper has it."""
    rollout_settings, algorithm = run.config.actor_rollout_ref.rollout, run.config.algorithm
    correction, clock = algorithm.rollout_correction, Stopwatch()

    prompts = run.prompts(iteration)
    batches = run.rollout.submit(prompts, rollout_settings.n, iteration, run.window(iteration))
    pending_scores = run.reward.submit(batches)
    rollout_seconds = finish_rollout(clock, batches)
    scores = finish_reward(clock, run.reward, batches, pending_scores)
    advantages = advantage(clock, scores, algorithm)
    old = None if correction.bypass_mode else old_log_prob(clock, run.trainer, batches, advantages, correction)
    actor_metrics = update(clock, run.trainer, batches, advantages, old)
    run.iteration = iteration
    drift = sync_weights(clock, run.trainer, run.rollout, run.canary, iteration, run.tolerance)

    validation = measure(run, clock) if _due(iteration, run.config.trainer.test_freq, run) else None
    metrics = actor_metrics | (validation.metrics() if validation else {}) | _iteration_metrics(scores, advantages)
    metrics |= {
        "sync/canary_difference": drift,
        "perf/rollout_busy_s": rollout_seconds,
        "perf/reward_busy_s": scores.busy_seconds,
        "cost/images": float(iteration * len(scores.samples)),
    }
    pictures, tables = _validation_records(validation)
    with clock.stage("pictures"):
        kept = first_pictures(batches, run.config.tracking.pictures)
        if kept:
            pictures["samples"] = grid(np.stack(kept), columns=min(rollout_settings.n, WIDEST_GRID))
    tables["samples"] = sample_table(scores.samples, advantages, run.config.trainer.seed, iteration, len(kept))
    # Logged before the checkpoint: killed in between, the iteration runs again with the same result and its record
    # is already there; the other way round it would be lost.
    new = log_step(clock, run.tracker, iteration, metrics, pictures, tables, {"pictures": kept})
    if run.config.trainer.export_freq and iteration % run.config.trainer.export_freq == 0:
        register_export(clock, run)
    if _due(iteration, run.config.trainer.save_freq, run):
        save_checkpoint(clock, run.store, run.trainer, run.state())
    if new:
        run.tracker.log_metrics(iteration, _time_metrics(run, clock, scores) | run.memory())
    return metrics


def measure(run: TrainingRun, clock: Stopwatch) -> Validation:
    """Validate the present weights, or their moving average where one is kept."""
    rollout = run.config.actor_rollout_ref.rollout
    averaged = run.config.actor_rollout_ref.actor.ema.enable
    sync = (run.trainer, run.rollout, run.canary, run.iteration, run.tolerance)
    if averaged:
        sync_weights(clock, *sync, averaged=True)
    pipeline = rollout.validation_pipeline()
    result = validate(clock, run.rollout, run.reward, run.inputs.test, rollout.val_kwargs.n, pipeline)
    if averaged:
        sync_weights(clock, *sync)
    run.keep_validation(result)
    return result


def _warn_of_distance(run: TrainingRun, metrics: Mapping[str, float]) -> None:
    """Say so once if the rollout engine is not the trainer's equal; a loss without a clip range has nothing to lose."""
    distance = metrics.get("rollout_corr/logprob_abs_diff_mean")
    if distance is None or "actor/pg_clipfrac" not in metrics:
        return
    message = too_far_apart(distance, run.config.actor_rollout_ref.actor.diffusion_loss.clip_ratio)
    if message:
        get_run_logger().warning(message)


def _due(iteration: int, every: int, run: TrainingRun) -> bool:
    last = iteration == run.config.trainer.total_training_steps
    return last or (every > 0 and iteration % every == 0)


def _time_metrics(run: TrainingRun, clock: Stopwatch, scores: Scores) -> dict[str, float]:
    """Where the iteration's time went, its records and its checkpoint included."""
    seconds = clock.finished()
    run.spent = cost_metrics(run.spent, seconds, run.config.gpus)
    return (
        compute_throughput_metrics_diffusion(
            {"sample_level_rewards": scores.rewards}, seconds, run.config.trainer.world_size
        )
        | compute_timing_metrics_diffusion(seconds, len(scores.samples))
        | orchestration_metrics(seconds)
        | run.spent
    )


def _iteration_metrics(scores: Scores, advantages: Any) -> dict[str, float]:
    batch = {"sample_level_rewards": scores.rewards, "uid": scores.uids}
    batch |= {"advantages": advantages, "returns": advantages}
    numbers = scores.samples.drop(columns=["sample_index", "reward"]).select_dtypes("number")
    return compute_data_metrics_diffusion(batch) | {
        f"train/{name}/mean": float(value) for name, value in numbers.mean().items()
    }


def _validation_records(result: Validation | None) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    if result is None:
        return {}, {}
    return {"validation": result.sheet}, {"validation": result.samples}


if __name__ == "__main__":
    from flows.recipes import train_command

    train_command(train)
