# SPDX-License-Identifier: Apache-2.0
"""The one way to open a run or a measurement: its lock, slots, cluster, tracker and actors."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from models.algorithms import needs_old_means
from models.config.section import AUTO
from models.samples.trajectories import LATENTS, PICTURES, Recording
from models.weights.canary import Canary
from tasks.actors.cluster import WorkerNeeds, gpus_are_free, ray_cluster, require_resources
from tasks.actors.machines import MachineWatch, watched_machines
from tasks.actors.rank_places import RankPlaces
from tasks.actors.reward_group import RewardGroup, wanted_inputs
from tasks.actors.reward_model import RewardModel, served_reward_model
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import TrainerGroup
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig, TrainOverrides
from tasks.data.pairs import SIDES
from tasks.records.flow_page import page_logger, say, tell
from tasks.records.guards import FloorWatch, Guard, GuardWatch
from tasks.records.headline import RUN_NAME_TAG
from tasks.records.lineage import lineage
from tasks.records.run_lock import run_lock
from tasks.records.run_store import CHECKPOINTS, STAGES, CheckpointError, CheckpointStore, RunState, other_data
from tasks.records.second_trackers import SecondTrackers, Subject
from tasks.records.tracking import RunGone, Tracker
from tasks.records.tracking_address import require_answer
from tasks.rewards.statistics import DIVERSITY
from tasks.rewards.statistics import GUARDS as STATISTICS
from tasks.run.capacity import Needs
from tasks.run.early import check_records
from tasks.run.expectation import BesideExpected
from tasks.run.gpu_capacity import check_own_gpus, warn_of_others
from tasks.run.gpu_slots import gpu_slots
from tasks.run.host_check import warn_of_little_memory
from tasks.run.kept_stages import KeptStages
from tasks.run.live_text import start_text_encoders
from tasks.run.measured_alike import (
    comparable_validations,
    measured_otherwise,
    record_measurement,
    recorded_measurements,
)
from tasks.run.note import run_label, source_tags, write_note
from tasks.run.preflight import Inputs
from tasks.run.reporting import RunReport
from tasks.run.start_times import StartTimes
from tasks.run.training import CANARY_PROMPTS, OnlineParts, TrainingRun
from tasks.run.utilisation import Utilisation
from tasks.run.watching import refuse_flagged
from tasks.system.files import put_in_place
from tasks.system.signals import heeded_once
from tasks.system.stopwatch import Stopwatch

RUN_RECORD = "run.json"
DATA_TAG = "doubleflow.data_digest"


def apply_overrides(config: TrainConfig, overrides: TrainOverrides | dict[str, Any] | None) -> TrainConfig:
    """The config with its overrides; what another algorithm's name takes from it is told in the flow run's log."""
    behind = config.left_behind(overrides)
    result = config.with_changes(overrides)
    if behind:
        fields = ", ".join(f"{path} {here} (now {there})" for path, (here, there) in behind.items())
        get_run_logger().warning(
            "algorithm.name is now %s, as published: without the recipe's %s", result.algorithm.name, fields
        )
    lost = config.lost_of_rewards(overrides)
    if lost:
        fields = ", ".join(f"{path} {value}" for path, value in lost.items())
        get_run_logger().warning("reward.functions is replaced as a whole: without the recipe's %s", fields)
    return result


@contextmanager
def open_cluster_and_tracker(
    config: TrainConfig,
    name: str,
    *,
    trains: bool,
    run_id: str | None = None,
    needed: Needs | None = None,
    on_host: Needs | None = None,
    start: StartTimes | None = None,
) -> Iterator[Tracker]:
    """What everything that needs actors begins with: the GPUs' slots, the cluster, proof that it is large enough, a
    word of other programs on its GPUs and in its memory, and the tracker. Afterwards the MLflow run is FINISHED, FAILED
    or KILLED, never RUNNING.

    Args:
        name: of a new MLflow run.
        trains: for training, under the lock of the run's folder; without, a measurement needs no trainer ranks.
        run_id: the MLflow run to continue.
        needed, on_host: what a rank and a rollout worker need, where a GPU and the machine's memory have room for it.
        start: counts the wait for the slots apart.

    Raises:
        ClusterError: the slots' pool or the cluster cannot hold the actors.
        TrackingAway: MLflow's server does not answer.
        RunGone: it has no run of that id any more.
        ConfigError: its data base or artifacts cannot be written.
    """
    require_answer(config.tracking.address)
    check_records(config.tracking)
    gpus = config.gpus_needed(trains)
    with gpu_slots(config.ray_init, gpus, config.run_dir if trains else None) as waited:
        if start is not None and waited:
            start.apart("the wait for GPU slots", waited)
        address = os.environ.get("RAY_ADDRESS")  # told, for a minute may pass until there is more to tell
        tell("Ray starts" if address is None else f"joins the Ray cluster at {address}")
        with ray_cluster(config.ray_init, worker_needs(config), gpus > 0), heeded_once():
            check_resources(config, trains)
            if needed is not None and gpus_are_free():
                warn_of_others(config, needed)
            if on_host is not None and address is None:
                warn_of_little_memory(config, on_host)
            tracker = _tracker(config, name, run_id)
            tell("Ray is there: the workers start and load their models")
            with tracker.concluded(ends_flow_run=True), heeded_once():
                yield tracker


def _tracker(config: TrainConfig, name: str, run_id: str | None) -> Tracker:
    """Of a new MLflow run, or of one that goes on, whose loss is told with how the run goes on without it."""
    try:
        return Tracker(config.tracking, name, run_id)
    except RunGone as error:
        error.add_note(f"for a new one, set mlflow_run_id in {config.run_dir / RUN_RECORD} to null, and keep all else")
        raise


def worker_needs(config: TrainConfig) -> WorkerNeeds:
    """What the actors' processes begin with."""
    trainer, kept = config.trainer, config.trainer.compile_cache
    compiles = config.actor_rollout_ref.model.compile
    return WorkerNeeds(trainer.full_determinism, compiles, None if kept is None else str(kept))


@contextmanager
def open_run(config: TrainConfig, inputs: Inputs, recipe: TrainConfig, start: StartTimes) -> Iterator[TrainingRun]:
    """Open training, and start or continue the run.

    Args:
        recipe: the config before its overrides.
        start: counts the seconds.

    Raises:
        ConfigError: it has checkpoints and is not to resume.
        CheckpointError: another process works on the run, its newest checkpoint cannot be used, or its folder is gone.
        RewardHacking, RewardCollapse: its guards have stopped it, and are to stop it still.
        ClusterError: as `open_cluster_and_tracker`.
        MachineLost: a machine with a trainer rank is lost.
    """
    check_own_gpus(config.gpus_needed(trains=True))
    with run_lock(config.run_dir), _told_if_gone(config.run_dir):
        store = _store(config)
        _check_kept(config, inputs.digest, store)
        label = run_label(config.asked, recipe)
        again = _remembered_run_id(config)
        with (
            open_cluster_and_tracker(
                config, label, trains=True, run_id=again, needed=inputs.needs, on_host=inputs.host, start=start
            ) as tracker,
            served_for(config) as model,
        ):
            # Which reads it, while models load. Not while Ray starts, which takes several times as long where all cores
            # digest.
            newest = store.behind.submit(store.latest, config.digest(), inputs.digest)
            _remember_run_id(config, tracker.run_id)
            guards = watched_guards(config, tracker)
            refuse_flagged(config, guards)
            _refuse_other_data(config, inputs.digest, tracker)
            store.behind.check()  # before a model loads, where it is known by now that the checkpoint cannot be used
            start.mark("Ray and MLflow")
            report = RunReport(config, tracker, recipe)
            run = _start_actors(config, inputs, tracker, store, guards, report, model, start)
            start.mark("workers and models")
            _begin_records(run, newest)
            beside = tracked_beside(config, tracker, label)
            # What is still written behind the run goes to the other trackers, too: they are closed after it.
            behind = store.behind
            with run.report.concluded(), beside, behind.left(), behind.settled(), _watched(run) as run.machines:
                yield run


def _store(config: TrainConfig) -> CheckpointStore:
    """The run's checkpoints. Raises ConfigError where it has begun and is not to resume."""
    store = CheckpointStore(config.run_dir / CHECKPOINTS, config.trainer.max_actor_ckpt_to_keep)
    begun = store.iterations() or os.path.lexists(config.run_dir / RUN_RECORD)
    if config.trainer.resume_mode == "disable" and begun:
        raise ConfigError(
            f"{config.run_dir} has a run's record or checkpoints and trainer.resume_mode is disable: use auto or "
            "another trainer.experiment_name"
        )
    return store


@contextmanager
def _told_if_gone(folder: Path) -> Iterator[None]:
    """What a run does not find in its folder, where that is gone as a whole, is told as that.

    Raises:
        CheckpointError: in place of the FileNotFoundError of whatever was read or written first.
    """
    try:
        yield
    except FileNotFoundError as error:
        if (folder / CHECKPOINTS).is_dir():
            raise
        raise CheckpointError(
            f"{folder} was removed, moved or unmounted while the run worked in it: bring it back and the same command "
            "continues from its newest checkpoint; without it that begins anew"
        ) from error


def _check_kept(config: TrainConfig, data_digest: str, store: CheckpointStore) -> None:
    """What the run would go on with is of its config and its data, as far as a moment tells: before Ray starts."""
    digests = config.digest(), data_digest
    store.check_newest(*digests)
    KeptStages(config.run_dir / STAGES).check(*digests, after=max(store.iterations(), default=0))


def _refuse_other_data(config: TrainConfig, data_digest: str, tracker: Tracker) -> None:
    """What MLflow has of the run, which may be more than a checkpoint has, was measured with this data.

    Raises:
        CheckpointError: it was with other data: the run would go on in the same curves.
    """
    if not tracker.logged_steps:
        return
    tags = tracker.client.get_run(tracker.run_id).data.tags
    if other := other_data(tags.get(DATA_TAG, data_digest), data_digest):
        raise CheckpointError(
            f"what MLflow has of {config.run_dir} was made {other} give the run another trainer.experiment_name"
        )


def _begin_records(run: TrainingRun, newest: Future[tuple[RunState, Path] | None]) -> None:
    """Have it recorded and told what the run is, and go on from its newest checkpoint, if there is one."""
    config, inputs, tracker = run.config, run.inputs, run.tracker
    versions = version_tags(run.online.reward if run.is_online else None, config.ray_init.start_timeout_s)
    tags = run_tags(config, inputs, versions)
    measurements = recorded_measurements(tracker)
    for otherwise in measured_otherwise(config, tags, tracker, measurements):
        page_logger().warning(otherwise)
    record_measurement(config, versions, tracker, measurements)
    tracker.log_start(config, tags)
    tell_sizes(inputs)
    if run.is_online and config.reward.guards.statistics and DIVERSITY not in run.guards.guards:
        tell("diversity is no guard here: it compares pictures of one prompt, and rollout.val_kwargs.n is 1")
    tell_expectation(run)
    run.resume(run.behind.wait(newest))
    if run.iteration:
        run.start.mark("the checkpoint")
    if run.elsewhere:
        told = "the run goes on after iteration %d in a new MLflow run: what came before is in the one before"
        page_logger().warning(told, run.elsewhere)
    tracker.log_lineage(lineage(config.data_read()), _begins_after(run.iteration, tracker.logged_steps), config)
    run.report.log_changes()
    write_note(run)
    patience = tracker.patience
    run.store.behind.held_up = lambda: patience.meanwhile() if patience.waits else None


def _begins_after(iteration: int, recorded: Set[int]) -> int:
    """Under which iteration a start is recorded: the last of the records, which stay what an earlier start has made of
    them, whether its checkpoint is of an earlier iteration or of the next one; without records, its checkpoint's."""
    return max(recorded, default=iteration)


def _watched(run: TrainingRun) -> AbstractContextManager[MachineWatch]:
    """During the block the run's machines are watched; the run ends with the command that continues it."""
    advice = "once the cluster has room for it again, the same command continues from the newest checkpoint"
    limit = run.config.ray_init.start_timeout_s
    return watched_machines(run.actor_groups(), get_run_logger(), advice + _same_command(), limit)


def served_for(config: TrainConfig) -> AbstractContextManager[RewardModel | None]:
    """The model that the rewards of a run of training ask; an offline one asks nobody."""
    return served_reward_model(config.reward) if config.is_online else nullcontext()


@contextmanager
def tracked_beside(config: TrainConfig, tracker: Tracker, label: str) -> Iterator[None]:
    """During the block the trackers of `tracking.also` get what MLflow gets."""
    subject = Subject(
        label,
        tracker.run_id,
        config.run_dir,
        max(tracker.logged_steps, default=-1) + 1,
        config.tracking,
        config.model_dump(mode="json"),
    )
    tracker.also = SecondTrackers(page_logger().warning)
    for name, where in tracker.also.open(config.tracking.also, subject).items():
        tracker.tag(f"doubleflow.{name}", where)
    failed = True
    try:
        yield
        failed = False
    finally:
        tracker.also.close(failed)


def _same_command() -> str:
    """The command of this process, where it is one of this project's and not a server's worker."""
    _, *rest = sys.orig_argv
    return f": `python {shlex.join(rest)}`" if rest[:1] == ["-m"] and rest[1].startswith("flows.") else ""


@dataclass(frozen=True)
class MeasuringRun:
    """What `flows.validate` and `flows.validation_sweep` work with: samplers, rewards and their MLflow run.

    Attributes:
        reward_versions: by which the rewards' versions are known, as tags of MLflow.
    """

    rollout: RolloutGroup
    reward: RewardGroup
    tracker: Tracker
    reward_versions: Mapping[str, str]


@contextmanager
def open_measurement(
    config: TrainConfig, inputs: Inputs, name: str, tags: Mapping[str, str] | None = None
) -> Iterator[MeasuringRun]:
    """Open a measurement of weights, an MLflow run of its own. Raises ClusterError as `open_cluster_and_tracker`."""
    check_own_gpus(config.gpus_needed(trains=False))
    with (
        open_cluster_and_tracker(config, name, trains=False) as tracker,
        served_reward_model(config.reward) as model,
    ):
        places = rank_places(config) if config.holds_places(trains=False) else None
        encoders = start_text_encoders(config, inputs.embeddings, places)
        shared, limit = places if config.shares_gpus else None, config.ray_init.start_timeout_s
        reward = RewardGroup(config.reward, model, limit, places)
        rollout = start_rollout(config, inputs, shared)
        if encoders is not None:
            encoders.check(inputs.to_encode(trains=False), limit)
        rollout.wait_ready(limit)
        versions = version_tags(reward, limit)
        tracker.log_start(config, run_tags(config, inputs, versions) | dict(tags or {}))
        tell_sizes(inputs)
        tracker.log_lineage(lineage(config.data_read(trains=False)), 0)
        groups = {"rollout": rollout.group} | reward.groups()
        groups |= {} if encoders is None else {"text_encoder": encoders.group}
        with watched_machines(groups, get_run_logger(), "the same command measures again", limit):
            yield MeasuringRun(rollout, reward, tracker, versions)


def start_rollout(config: TrainConfig, inputs: Inputs, places: RankPlaces | None = None) -> RolloutGroup:
    """The rollout workers of a config, at the ranks' `places` or elsewhere; their models load in the background."""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    recording = Recording(
        record_means=config.algorithm.rollout_correction.bypass_mode and needs_old_means(loss.loss_mode, loss.options),
        record_unconditional=config.records_unconditional,
        record_finished=config.algorithm.trainer_type == "direct_preference",
        outputs=frozenset(LATENTS if wants == "latents" else PICTURES for wants in wanted_inputs(config.reward)),
    )
    return RolloutGroup(
        inputs.model_config,
        inputs.embeddings,
        config.actor_rollout_ref.rollout,
        device=config.trainer.device,
        seed=config.trainer.seed,
        recording=recording,
        places=places,
    )


def check_resources(config: TrainConfig, trains: bool = True) -> None:
    """Raise ClusterError where the cluster cannot hold the actors: Ray would wait for ever."""
    rewards = config.reward.num_cpus if config.is_online or not trains else 0.0
    require_resources(config.gpus_needed(trains), rewards)


def rank_places(config: TrainConfig) -> RankPlaces:
    """The places of the trainer's ranks, and of the rollout workers, text encoders and rewards on the same GPUs."""
    trainer, placement = config.trainer, config.actor_rollout_ref.rollout.placement
    shared = config.is_online and placement == "colocated"
    encodes = config.data.encoders is not None and config.data.encoders.is_colocated
    scores = config.reward.colocated_workers(trainer.world_size)  # also of an offline recipe, which a validation scores
    return RankPlaces(trainer.nnodes, trainer.n_gpus_per_node, trainer.device, 1 + shared + encodes + scores)


def _start_actors(
    config: TrainConfig,
    inputs: Inputs,
    tracker: Tracker,
    store: CheckpointStore,
    guards: GuardWatch,
    report: RunReport,
    model: RewardModel | None,
    start: StartTimes,
) -> TrainingRun:
    """All groups load their models at the same time."""
    online, limit = config.is_online, config.ray_init.start_timeout_s
    # Before the rollout, whose workers could else take a GPU here and there, and leave no machine with enough of them.
    places = rank_places(config)
    together = config.actor_rollout_ref.rollout.placement == "colocated"
    rollout = start_rollout(config, inputs, places if together else None) if online else None
    reward = RewardGroup(config.reward, model, limit, places) if online else None
    encoders = start_text_encoders(config, inputs.embeddings, places)
    trainer = _trainer(config, inputs, places)
    started = trainer.start(limit)
    if encoders is not None:
        encoders.check(inputs.to_encode(), limit)
    parts = None
    if rollout is not None and reward is not None:
        parts = _online_parts(config, inputs, tracker, rollout, reward)
    trainer.wait_started(started, limit)
    utilisation = None
    if inputs.flops is not None:
        utilisation = Utilisation(config, inputs.flops, None if rollout is None else rollout.group, trainer.group)
    stages = KeptStages(config.run_dir / STAGES)
    return TrainingRun(
        config, inputs, trainer, tracker, store, stages, guards, report, parts, encoders, utilisation, start=start
    )


def _trainer(config: TrainConfig, inputs: Inputs, places: RankPlaces) -> TrainerGroup:
    """The trainer's ranks, which have not begun to load."""
    settings = config.actor_rollout_ref
    per_prompt = settings.rollout.n if config.is_online else len(SIDES)
    return TrainerGroup(
        inputs.model_config,
        config.scheduled_actor,
        config.algorithm,
        config.trainer,
        mini_batch_samples=settings.actor.ppo_mini_batch_size * per_prompt,
        places=places,
        gives_back=config.is_online and config.shares_gpus and settings.rollout.sleeps,
    )


def _online_parts(
    config: TrainConfig, inputs: Inputs, tracker: Tracker, rollout: RolloutGroup, reward: RewardGroup
) -> OnlineParts:
    """What only a run that samples has, once its rollout workers have loaded."""
    rollout.wait_ready(config.ray_init.start_timeout_s)
    tracker.patience.meanwhile = lambda: rollout.asleep(Stopwatch())
    floor = FloorWatch(config.reward, config.trainer.total_training_steps, tracker.history)
    return OnlineParts(rollout, reward, _canary(config, inputs, rollout), floor)


def _canary(config: TrainConfig, inputs: Inputs, rollout: RolloutGroup) -> Canary:
    """The first held-out prompts, at as many timesteps as the config says."""
    return Canary(
        rollout.prompt_table([prompt.uid for prompt in inputs.test[:CANARY_PROMPTS]]),
        rows=config.trainer.canary_batch or config.actor_rollout_ref.rollout.batch_size,
        timesteps=config.trainer.canary_timesteps,
        one_pass=not config.records_unconditional,
    )


def watched_guards(config: TrainConfig, tracker: Tracker) -> GuardWatch:
    """What shows reward hacking: the rewards that are guards, and the picture statistics whose fall says something."""
    settings = config.reward.guards
    names = [name for name, entry in config.reward.functions.items() if entry.guard]
    guards = {name: Guard(f"train/reward/{name}/mean", f"reward/{name}", settings.reward_margin) for name in names} | {
        name: Guard(f"train/image/{name}/mean", f"image/{name}", settings.statistics_margin)
        for name in _watched_statistics(config)
    }
    return GuardWatch(settings, guards, tracker.history, partial(comparable_validations, tracker))


def _watched_statistics(config: TrainConfig) -> list[str]:
    """Picture statistics that are guards; diversity only where validations draw several pictures of a prompt."""
    several = config.actor_rollout_ref.rollout.val_kwargs.n > 1
    return [name for name in STATISTICS if config.reward.guards.statistics and (several or name != DIVERSITY)]


def version_tags(reward: RewardGroup | None, seconds: float) -> dict[str, str]:
    """The rewards' versions as tags; waits until the workers are up, of which each may load for so many seconds."""
    found = {} if reward is None else reward.versions(seconds)
    return {f"reward.{name.replace(':', '/')}": version for name, version in found.items()}


def run_tags(config: TrainConfig, inputs: Inputs, versions: Mapping[str, str]) -> dict[str, str]:
    """What a run is found and compared by: digests of config and data, and what `version_tags` gives."""
    digests = {"doubleflow.config_digest": config.digest(), DATA_TAG: inputs.digest}
    found_out = {f"doubleflow.auto.{field}": why for field, why in inputs.said.items()}
    return dict(versions) | digests | found_out | source_tags() | {RUN_NAME_TAG: config.run_name}


def tell_sizes(inputs: Inputs) -> None:
    """What auto stands for, on the flow run's page and in the terminal."""
    told = inputs.said | {field: f"{value}, as the run's first start chose it" for field, value in inputs.kept.items()}
    for field, why in told.items():
        say(f"{field} is auto: {why}")


def tell_expectation(run: TrainingRun) -> None:
    """What an iteration should take, likewise, and that the run is to set what it took beside it."""
    if run.utilisation is None:
        return
    for line in run.utilisation.expectation():
        say(line)
    known = run.utilisation.expected
    if known is not None:
        workers = len(run.online.rollout.group) if run.is_online else 0
        run.beside_expected = BesideExpected(known, workers)


def recorded_config(config: TrainConfig) -> TrainConfig | None:
    """The config of the run's last start, with values in place of auto; None where the run begins.

    Raises:
        CheckpointError: the record has none.
    """
    policy, file = config.actor_rollout_ref, config.run_dir / RUN_RECORD
    is_auto = AUTO in (policy.rollout.micro_batch_size, policy.actor.ppo_micro_batch_size_per_gpu)
    if not is_auto or not os.path.lexists(file):
        return None
    try:
        return TrainConfig.model_validate(json.loads(file.read_text())["config"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} does not say with which config the run began ({error!r:.200}), which has the numbers in place of "
            'auto: write {"config": ...} into it, with what config.json of the run has in MLflow'
        ) from error


def _remembered_run_id(config: TrainConfig) -> str | None:
    """The MLflow run to continue; None where the run begins, or goes on in a new one. Raises CheckpointError where the
    record is damaged."""
    file = config.run_dir / RUN_RECORD
    if not os.path.lexists(file):
        return None
    try:
        run_id = json.loads(file.read_text())["mlflow_run_id"]
        if run_id is None or (isinstance(run_id, str) and run_id):
            return run_id
        reason = f"mlflow_run_id is {run_id!r}"
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        reason = repr(error)
    raise CheckpointError(
        f"{file} does not say which MLflow run to continue ({reason}): write "
        '{"mlflow_run_id": "..."} into it, with the id in any checkpoints/iter_*/state.json beside it, or null in its '
        "place to go on in a new MLflow run"
    )


def _remember_run_id(config: TrainConfig, run_id: str) -> None:
    """A run killed here, or a power cut, leaves the old record or the new one."""
    record = {"mlflow_run_id": run_id, "run_name": config.run_name, "config": config.model_dump(mode="json")}
    with put_in_place(config.run_dir / RUN_RECORD) as aside:
        aside.write_text(json.dumps(record, indent=1))
