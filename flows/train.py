# SPDX-License-Identifier: Apache-2.0
"""The training loop: collect (rollout -> reward -> advantage, or pairs) -> update -> sync (-> validate, save).

With `trainer.one_step_off_policy` the next iteration is sampled during the update.
"""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("train")

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from prefect import flow
from prefect.states import Completed, State

from models.training.engine import HeldWeights
from tasks.actors.trainer_group import Synced
from tasks.config.common import CommonSettings, combined
from tasks.config.overrides import NoChange
from tasks.config.tree import NO_OVERRIDES, Recipe, TrainOverrides
from tasks.records.flow_page import flow_page, page_logger, say
from tasks.records.metrics import (
    SYNC,
    compute_throughput_metrics_diffusion,
    compute_timing_metrics_diffusion,
    cost_metrics,
    inside_metrics,
    orchestration_metrics,
)
from tasks.run.collect import Iteration, SampledIteration, collect, finish_ahead, submit
from tasks.run.flow_run_names import name_training
from tasks.run.held_out_grids import keep_grid
from tasks.run.instruments import ask_memory, profiled
from tasks.run.iteration_prompts import have_encoded
from tasks.run.iteration_record import validation_records, write_record
from tasks.run.loss_checks import check_first_ratio
from tasks.run.opening import apply_overrides, open_run, recorded_config
from tasks.run.preflight import check_inputs
from tasks.run.progress import Progress
from tasks.run.schedule import FEWEST_ITERATIONS, is_exported, is_measured, is_saved, is_validated, parts
from tasks.run.start_times import StartTimes
from tasks.run.summary import Summary, keep_good_weights, register_export, summarise
from tasks.run.training import TrainingRun
from tasks.run.watching import stop_if_flagged, watch_floor, watch_guards
from tasks.stages.old_log_prob import old_log_prob
from tasks.stages.save import save_checkpoint
from tasks.stages.sync import sync_weights
from tasks.stages.update import update
from tasks.stages.validation import Validation, draw_and_score
from tasks.system.stopwatch import Stopwatch

NO_COMMON = CommonSettings()
WAITING = "wait_for_writes"
"""Of an iteration's seconds: what it waited for that was written of the one before."""


@flow(name="train", flow_run_name=name_training, persist_result=True, result_serializer="json")
def train(
    common: CommonSettings | NoChange = NO_COMMON,
    *,
    config: Recipe,
    overrides: TrainOverrides | NoChange = NO_OVERRIDES,
) -> State:
    """Post-train a flow-matching model by reinforcement learning.

    A run is named by its config: started again after anything killed it, it continues where its last checkpoint
    ends, in the same MLflow run. Called, it returns the fields of a `Summary`.

    Args:
        common: changes of the fields that are changed most, for use with a deployment.
        config: everything the run depends on.
        overrides: changes of any other field: only the fields given here are replaced.
    """
    start = StartTimes()
    with flow_page():
        recipe, config = config, apply_overrides(config, combined(common, overrides))
        inputs = check_inputs(config, recorded=recorded_config(config))
        start.mark("checks")
        with open_run(inputs.config, inputs, recipe, start) as run:
            summary, said = fit(run)
    return Completed(message=said, data=summary.as_dict())


def fit(run: TrainingRun) -> tuple[Summary, str]:
    """All iterations that are not done yet; the run's summary, and the same in a sentence."""
    settings = run.config.trainer
    total, started = settings.total_training_steps, time.perf_counter()
    first = run.next_iteration
    progress, clock = Progress(run, total, first - 1), Stopwatch(first - 1)
    ahead = sample_again(run, clock)
    inside: Mapping[str, float] = {}
    if run.is_online:
        inside = sync(run, clock, run.sampling_weights).seconds
        run.warm_up()
    run.start.mark("weights to the rollout", inside)
    if run.is_online and run.iteration == 0 and settings.val_before_train and not run.recorded(0):
        result = validate_weights(run, clock)
        run.tracker.log_step(0, result.metrics(), *validation_records(result))
        run.report.add(0, result.metrics())
        run.report.add_validation(0, result)
        run.report.write()
        progress.show_validation()
        run.start.mark("first validation")

    clock = Stopwatch(first)

    def advance(number: int) -> None:
        nonlocal ahead, clock
        metrics, ahead = iterate(run, number, ahead, clock)
        clock = clock.followed(number + 1)
        if is_measured(run.config, number):
            with clock.stage(WAITING):
                run.behind.settle()
            stop_if_flagged(run.config, run.guards, number, partial(save_unsaved, run, clock))
        with clock.stage("progress"):
            progress.advance(number, metrics)

    in_parts(first, total, advance)
    run.behind.settle()
    run.forget_stages()
    summary = summarise(run, (time.perf_counter() - started) / 60)
    run.report.write("FINISHED")
    return summary, progress.close(summary)


def in_parts(first: int, total: int, work: Callable[[int], None]) -> None:
    """Call `work` with the number of each iteration from `first` to `total`.

    A long run's iterations are flow runs of their own, so that the run's page in Prefect stays readable.
    """

    @flow(name="iterations", flow_run_name="{first}-{last}", persist_result=False)
    def part(first: int, last: int) -> None:
        for number in range(first, last + 1):
            work(number)

    for bounds in parts(first, total):
        (part.fn if total <= FEWEST_ITERATIONS else part)(*bounds)


def iterate(
    run: TrainingRun, number: int, ahead: SampledIteration | None, clock: Stopwatch
) -> tuple[dict[str, float], SampledIteration | None]:
    """One iteration, as the paper has it. Of one that was killed, what is left of it.

    Args:
        ahead: its samples, where the iteration before has asked for them; of one that is in the weights already, the
            next one's.

    Returns:
        Its metrics, and the next iteration's samples if they are made ahead.
    """
    trained = number <= run.iteration
    sampled = trained or ahead or run.stages.has_rollout(number)  # that was traced then, and this would write over it
    with nullcontext() if sampled else profiled_rollout(run, number, clock):
        iteration = collect(run, number, clock, None if trained else ahead)
    if not trained:
        with sampling_ahead(run, number + 1, clock) as ahead:
            update_and_save(run, iteration, clock)
    metrics = iteration.metrics | run.learned
    if run.is_online:
        metrics |= sync(run, clock, run.sampling_weights).metrics()
    if not run.recorded(number):
        log_iteration(run, iteration, metrics, clock)
    return metrics, ahead


@contextmanager
def sampling_ahead(run: TrainingRun, number: int, clock: Stopwatch) -> Iterator[SampledIteration | None]:
    """An iteration that is sampled during the block, with the weights of before it; None where that is not to be.

    All of it is sampled when the block is left, so the next sync waits for it.
    """
    if not _is_sampled_ahead(run, number):
        yield None
        return
    with profiled_rollout(run, number, clock):
        ahead = submit(run, number, clock)
        yield ahead
        finish_ahead(run, ahead, clock)


def profiled_rollout(run: TrainingRun, number: int, clock: Stopwatch) -> AbstractContextManager[None]:
    """Trace the rollout during the block, in which an iteration is sampled, if that iteration is to be profiled."""
    return profiled(run.actor_groups(), "rollout", run.config.trainer.profile, number, run.tracker, clock)


def update_and_save(run: TrainingRun, iteration: Iteration, clock: Stopwatch) -> None:
    """The update, and the checkpoint that is due after it.

    Raises:
        RatioError: it is the process's first, and see `check_first_ratio`. No checkpoint has the update then.
    """
    correction, settings = run.config.algorithm.rollout_correction, run.config.trainer
    batches, advantages, early = iteration.batches, iteration.advantages, iteration.early
    is_first = not run.start.is_told
    if is_first:
        run.start.mark("samples and scores" if run.is_online else "pairs")
    with run.online.rollout.asleep(clock, with_policy=False) if run.is_online else nullcontext():
        old = None
        if not correction.bypass_mode:
            old = old_log_prob(clock, run.trainer, batches, advantages, correction, iteration.old)
            iteration.old = None  # the record, which may be written for longer, needs none of it
        left = (batches, advantages, old) if early is None else early.rest(batches, advantages, old)
        with profiled(run.actor_groups(), "trainer", settings.profile, iteration.number, run.tracker, clock):
            run.take_update(iteration.number, update(clock, run.trainer, *left))
    run.learned["perf/early_steps"] = 0.0 if early is None else float(early.steps)
    if is_first:
        run.start.mark("update")
        say(run.start.told())
        iteration.metrics |= {"perf/start_s": run.start.seconds}
    if not run.has_updated:
        # An update whose first step was left out, or that made none, says nothing of it: the next one is looked at.
        run.has_updated = not (run.learned.get("actor/nonfinite_steps") or run.learned["actor/update_skipped"])
        warning = check_first_ratio(run.config, run.learned, iteration.metrics.get("rollout/policy_lag", 0.0))
        if warning:
            page_logger().warning(warning)
    run.iteration = iteration.number
    if is_saved(run.config, iteration.number):
        state = run.state(iteration.number, run.learned)
        behind = partial(clock.stage_behind, "save_checkpoint") if settings.async_checkpoint else None
        save_checkpoint(clock, run.store, run.trainer, state, behind)


def save_unsaved(run: TrainingRun, clock: Stopwatch) -> None:
    """Write a checkpoint of the weights where none of them was due."""
    if run.iteration not in run.store.iterations():
        save_checkpoint(clock, run.store, run.trainer, run.state(run.iteration, run.learned), None)


def log_iteration(run: TrainingRun, iteration: Iteration, metrics: dict[str, float], clock: Stopwatch) -> None:
    """Validate and export where that is due, and have the iteration logged; `metrics` gets what is measured on the way.

    Returns once the record of the iteration before is whole: no more than one is written behind.
    """
    number, images = iteration.number, len(iteration.advantages)
    validation = validate_weights(run, clock) if run.is_online and is_validated(run.config, number) else None
    metrics |= validation.metrics() if validation else {}
    held_out = validation.samples if validation else None
    metrics |= watch_guards(run.config, run.guards, run.tracker, run.iteration, metrics, held_out)
    if validation and run.config.reward.guards.action == "stop" and run.moved and run.guards.is_clean:
        keep_good_weights(clock, run)
    if run.is_online:
        watch_floor(run.online.floor, run.tracker, run.iteration, metrics)
    metrics["cost/images"] = float(number * images)
    if is_exported(run.config, number) and run.moved:
        register_export(clock, run)
    memory = ask_memory(run.actor_groups())
    if run.record is not None:
        with clock.stage(WAITING):
            run.behind.wait(run.record)
    metrics |= _time_metrics(run, clock, images)
    if run.utilisation is not None and "update_actor" in clock.seconds:  # else an earlier process made the update
        metrics |= run.utilisation.metrics(iteration.batches, metrics, clock.seconds)
        if run.beside_expected is not None and (line := run.beside_expected.observe(number, metrics)) is not None:
            say(line)
    metrics |= {} if run.machines is None else run.machines.metrics()
    run.record = run.behind.submit(write_record, run, iteration, dict(metrics), memory, validation, clock)


def sample_again(run: TrainingRun, clock: Stopwatch) -> SampledIteration | None:
    """The samples that were being made ahead when the checkpoint was written, made from the same older weights."""
    if run.iteration == 0 or not _is_sampled_ahead(run, run.iteration + 1):
        return None
    sync(run, clock, "previous")
    with sampling_ahead(run, run.iteration + 1, clock) as ahead:
        return ahead


def sync(run: TrainingRun, clock: Stopwatch, which: HeldWeights) -> Synced:
    """Give the rollout one of the trainer's sets of weights."""
    version = run.iteration - 1 if which == "previous" else run.iteration
    online = run.online
    synced = sync_weights(clock, run.trainer, online.rollout, online.canary, version, run.canary_limits, which)
    clock.add_inside(SYNC, synced.seconds)
    return synced


def validate_weights(run: TrainingRun, clock: Stopwatch) -> Validation:
    """Validate the present weights, or their moving average where one is kept."""
    rollout = run.config.actor_rollout_ref.rollout
    measured: HeldWeights = "average" if run.config.actor_rollout_ref.actor.ema.enable else "policy"
    # Before the first update all of them are the same, and are there.
    other = run.iteration > 0 and measured != run.sampling_weights
    if other:
        sync(run, clock, measured)
    pipeline = rollout.validation_pipeline()
    online, n = run.online, rollout.val_kwargs.n
    have_encoded(clock, online.rollout, run.inputs.test, pipeline)
    result = draw_and_score(clock, online.rollout, online.reward, run.inputs.test, n, pipeline)
    if other:
        sync(run, clock, run.sampling_weights)
    run.held_out, run.held_out_of = result.reward, run.iteration
    keep_grid(run.config, run.iteration, result.sheet)
    return result


def _is_sampled_ahead(run: TrainingRun, iteration: int) -> bool:
    """Is it to be sampled during the update before it? Not if an earlier process of this run has sampled it."""
    settings = run.config.trainer
    due = settings.one_step_off_policy and iteration <= settings.total_training_steps
    return due and not run.stages.has_rollout(iteration)


def _time_metrics(run: TrainingRun, clock: Stopwatch, images: int) -> dict[str, float]:
    """Where the iteration's time went, its records and its checkpoint included."""
    seconds, trainer = clock.finished(), run.config.trainer
    run.spent = cost_metrics(run.spent, seconds, run.config.gpus)
    devices = run.config.gpus if trainer.device == "cuda" else trainer.world_size
    speed = compute_throughput_metrics_diffusion({"sample_level_rewards": range(images)}, seconds, devices)
    if "update_actor" not in seconds:  # an earlier process made the update, and most of what the iteration took
        speed = {"perf/total_num_images": speed["perf/total_num_images"]}
    return (
        speed
        | compute_timing_metrics_diffusion(seconds, images)
        | orchestration_metrics(seconds)
        | inside_metrics(clock.inside)
        | run.spent
    )
