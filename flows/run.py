"""A training run's long-lived parts: actors, tracker, checkpoints, and what it remembers between iterations."""

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ray
from prefect import get_run_logger

from flows.checks import Inputs
from flows.config import TrainConfig, TrainOverrides
from flows.utilisation import Utilisation
from models.algorithms import DiffusionLossFn, get_diffusion_loss_fn, needs_old_means
from models.engines.canary import Canary, CanaryLimits
from models.engines.ema import HeldWeights
from models.schedulers.windows import window_steps
from tasks.checkpoint import CheckpointError, CheckpointStore, RunState, alone
from tasks.clock import Stopwatch
from tasks.cluster import RankPlaces, gpu_slots, ray_cluster, require_resources
from tasks.dataset import Prompt
from tasks.guards import FLOOR_TAG, HACKING_TAG, FloorWatch, GuardWatch
from tasks.in_place import put_in_place
from tasks.lineage import lineage
from tasks.memory import resident_mb
from tasks.ownership import require_own
from tasks.pairs import SIDES, Pair
from tasks.picture_statistics import NAMES as STATISTICS
from tasks.profiling import traced
from tasks.retention import remove_old_pictures
from tasks.reward import RewardGroup, wanted_inputs
from tasks.rollout import LATENTS, PICTURES, RolloutGroup
from tasks.stages import KeptStages
from tasks.tracking import Tracker
from tasks.update import TrainerGroup
from tasks.validate import Validation

T = TypeVar("T")
CANARY_PROMPTS = 2
RUN_RECORD = "run.json"
OPTIMIZER_STEPS = "actor/optimizer_steps"
"""Of the run so far, as the engine counts them."""
CUDA_CANARY_TOLERANCE = 0.01
OTHER_ENGINE_TOLERANCE = 1e-4
"""On the CPU, where the rollout engine is not the trainer's: sums in another order."""


@dataclass
class TrainingRun:
    """Everything `flows.train` works with.

    Attributes:
        config, inputs: what was asked for.
        rollout, reward, trainer: the actor groups; the first two are None where `sample_source` is offline.
        tracker: the MLflow run.
        store: the checkpoints.
        stages: what is kept of iterations that are not in a checkpoint yet.
        canary: the input that proves a weight sync; None where there is nothing to sync to.
        guards: what shows reward hacking.
        floor: what shows a reward that tells no sample from another; None where nothing is scored.
        utilisation: of the devices; None where the model's operations cannot be counted.
        iteration: the last one that is in the weights.
        learned: metrics of the update that made them.
        held_out: the last held-out reward that was measured.
        spent: what the recorded iterations cost, under cost/.
        has_updated: has this process made an update?
    """

    config: TrainConfig
    inputs: Inputs
    rollout: RolloutGroup | None
    reward: RewardGroup | None
    trainer: TrainerGroup
    tracker: Tracker
    store: CheckpointStore
    stages: KeptStages
    canary: Canary | None
    guards: GuardWatch
    utilisation: Utilisation | None = None
    iteration: int = 0
    learned: dict[str, float] = field(default_factory=dict)
    held_out: float = float("nan")
    spent: dict[str, float] = field(default_factory=dict)
    floor: FloorWatch | None = None
    has_updated: bool = False

    @property
    def samples(self) -> bool:
        """Does the run sample? Offline it reads pairs, and neither syncs nor validates."""
        return self.rollout is not None

    @property
    def sampling_weights(self) -> HeldWeights:
        """Which of the trainer's weights the rollout samples with."""
        return "old" if self.loss.samples_from_old_policy else "policy"

    @property
    def loss(self) -> DiffusionLossFn:
        """What the run minimises."""
        settings = self.config.actor_rollout_ref.actor.diffusion_loss
        return get_diffusion_loss_fn(settings.loss_mode, settings.options)

    def prompts(self, iteration: int) -> list[Prompt]:
        """The iteration's train prompts."""
        return self._part(self.inputs.train, iteration)

    def pairs(self, iteration: int) -> list[Pair]:
        """The iteration's preference pairs."""
        return self._part(self.inputs.pairs.pairs, iteration)

    def _part(self, items: Sequence[T], iteration: int) -> list[T]:
        """Consecutive parts of one permutation an epoch, the remainder left out.

        A function of (seed, iteration) alone, so there is no cursor to lose.
        """
        size = self.config.data.train_batch_size
        epoch, part = divmod(iteration - 1, len(items) // size)
        order = list(items)
        random.Random(f"data/{self.config.trainer.seed}/{epoch}").shuffle(order)
        return order[part * size : (part + 1) * size]

    def window(self, iteration: int) -> list[int]:
        """The iteration's stochastic steps; none where finished samples are trained on."""
        rollout = self.config.actor_rollout_ref.rollout
        trainer = self.config.trainer
        if self.config.algorithm.trainer_type == "direct_preference":
            return []
        return window_steps(
            rollout.algo,
            rollout.pipeline.num_inference_steps,
            trainer.seed,
            iteration,
            trainer.total_training_steps,
        )

    @property
    def canary_limits(self) -> CanaryLimits:
        """How far a rollout worker's canary may be from the trainer's."""
        return CanaryLimits(self._canary_tolerance, self.config.trainer.canary_missing_share)

    @property
    def _canary_tolerance(self) -> float:
        if self.config.trainer.canary_tolerance is not None:
            return self.config.trainer.canary_tolerance
        if self.config.trainer.device == "cuda":
            return CUDA_CANARY_TOLERANCE
        settings = self.config.actor_rollout_ref
        same = settings.rollout.name == "diffusers" and settings.actor.fsdp_config.ulysses_sequence_parallel_size == 1
        return 0.0 if same else OTHER_ENGINE_TOLERANCE

    def keep_validation(self, result: Validation) -> None:
        """Remember the held-out reward, and the pictures of this iteration in the run's folder."""
        self.held_out = result.reward
        folder = self.config.run_dir / "validation"
        folder.mkdir(exist_ok=True)
        result.sheet.save(folder / f"{self.iteration:06d}.png")

    def take_update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Remember an update's metrics; one that made no optimiser step is a warning and actor/update_skipped."""
        skipped = metrics.get(OPTIMIZER_STEPS) == self.learned.get(OPTIMIZER_STEPS, 0.0)
        self.learned = {**metrics, "actor/update_skipped": float(skipped)}
        if skipped:
            get_run_logger().warning("the update of iteration %d was skipped: it made no optimiser step", iteration)

    @property
    def moved(self) -> bool:
        """Has any optimiser step been made? An engine that does not count them is taken to have made some."""
        return self.learned.get(OPTIMIZER_STEPS, 1.0) > 0

    def watch(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The guards' metrics of this iteration; a new flag is a warning and a tag of the run."""
        before = self.guards.sentence()
        found = self.guards.observe(self.iteration, metrics)
        now = self.guards.sentence()
        if now is not None and now != before:
            self.tracker.tag(HACKING_TAG, now)
            get_run_logger().warning("this may be reward hacking: %s; look at the pictures", now)
        stuck = self.floor.observe(self.iteration, metrics) if self.floor else None
        if stuck is not None:
            self.tracker.tag(FLOOR_TAG, stuck)
            get_run_logger().warning(
                "the reward may not work: %s; look at the pictures and at what the reward makes of them, and see "
                "docs/rewards.md",
                stuck,
            )
        return found

    def validation_pictures(self) -> dict[int, Path]:
        """Iteration -> grid of held-out pictures."""
        return {int(path.stem): path for path in (self.config.run_dir / "validation").glob("*.png")}

    def remove_old_pictures(self, clock: Stopwatch) -> None:
        """Remove the pictures that `tracking` does not keep, and log which."""
        with clock.stage("log"):
            removed = remove_old_pictures(self.tracker, self.config.tracking, self.config.run_dir / "validation")
        for kind, steps in removed.items():
            get_run_logger().info("removed by tracking.keep_%s: iterations %s", kind, ", ".join(map(str, steps)))

    def memory(self) -> dict[str, float]:
        """Host memory of the driver and of every actor, and what the stages took of the GPUs, under memory/."""
        groups = {"trainer": self.trainer.group}
        if self.rollout is not None and self.reward is not None:
            pools = {f"reward_{name}".replace(":", "/"): pool.group for name, pool in self.reward.pools.items()}
            groups |= {"rollout": self.rollout.group, **pools}
        metrics = {"memory/driver_mb": resident_mb()}
        for name, group in groups.items():
            metrics |= group.memory(name)
        return metrics

    @contextmanager
    def profiled(self, name: str, iteration: int, clock: Stopwatch) -> Iterator[None]:
        """Trace what the config asks for of "rollout" or "trainer" during the block, as artifacts of the iteration."""
        settings = self.config.trainer.profile
        group = self.trainer.group if name == "trainer" else self.rollout and self.rollout.group
        numbers = settings.ranks if name == "trainer" else settings.rollout_workers
        if iteration not in settings.iterations or group is None:
            yield
            return
        traces: dict[int, bytes] = {}
        with traced(group, numbers, settings, traces):
            yield
        with clock.stage("profile"):
            for number, trace in traces.items():
                self.tracker.log_bytes(trace, f"profile/{iteration:06d}/{name}_{number}.json.gz")

    def state(self, iteration: int, metrics: Mapping[str, float] | None = None) -> RunState:
        """The record of what is kept of an iteration."""
        digests = self.config.digest(), self.inputs.digest
        return RunState(iteration, *digests, self.tracker.run_id, dict(metrics or {}))

    def forget_stages(self) -> None:
        """Remove what is kept of iterations that MLflow and a checkpoint have."""
        for saved in self.store.iterations()[-1:]:  # of an earlier iteration, where one is being written
            self.stages.forget(saved)

    def recorded(self, iteration: int) -> bool:
        """Has MLflow everything of the iteration?"""
        return iteration in self.tracker.logged_steps

    @property
    def next_iteration(self) -> int:
        """The first that is not done: the last one that is in the weights, where MLflow has not got all of it."""
        return self.iteration + 1 if self.iteration == 0 or self.recorded(self.iteration) else self.iteration

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        found = self.store.latest(self.config.digest(), self.inputs.digest)
        if found is None:
            return
        state, weights = found
        require_own(weights)
        self.trainer.load(weights)
        self.iteration, self.learned = state.iteration, state.metrics
        self.stages.forget(self.next_iteration - 1)
        self.spent = {name: value for name, value in self.tracker.latest().items() if name.startswith("cost/")}


def changed(config: TrainConfig, overrides: TrainOverrides | None) -> TrainConfig:
    """The config with its overrides; what another algorithm's name takes from it is told in the flow run's log."""
    behind = config.left_behind(overrides)
    result = config.with_changes(overrides)
    if behind:
        fields = ", ".join(f"{path} {here} (now {there})" for path, (here, there) in behind.items())
        get_run_logger().warning(
            "algorithm.name is now %s, as published: without the recipe's %s", result.algorithm.name, fields
        )
    return result


@contextmanager
def opened(config: TrainConfig, name: str, *, trains: bool, run_id: str | None = None) -> Iterator[Tracker]:
    """What everything that needs actors begins with: the GPUs' slots, the cluster, proof that it is large enough, and
    the tracker. Afterwards the MLflow run is FINISHED, FAILED or KILLED, never RUNNING.

    Args:
        name: of a new MLflow run.
        trains: for training; without, a measurement needs no trainer ranks.
        run_id: the MLflow run to continue.

    Raises:
        ClusterError: the slots' pool or the cluster cannot hold the actors.
    """
    with (
        gpu_slots(config.ray_init, config.gpus_needed(trains)),
        ray_cluster(config.ray_init, config.trainer.full_determinism),
    ):
        check_resources(config, trains)
        tracker = Tracker(config.tracking, name, run_id)
        with tracker.concluded():
            yield tracker


@contextmanager
def open_run(config: TrainConfig, inputs: Inputs) -> Iterator[TrainingRun]:
    """Open training, and start or continue the run.

    Raises:
        CheckpointError: another process works on the run, or it has checkpoints that it should not have.
        ClusterError: as `opened`.
    """
    with alone(config.run_dir):
        store = CheckpointStore(config.run_dir / "checkpoints", config.trainer.max_actor_ckpt_to_keep)
        if config.trainer.resume_mode == "disable" and store.iterations():
            raise CheckpointError(
                f"{config.run_dir} has checkpoints and trainer.resume_mode is disable: use auto or another "
                "trainer.experiment_name"
            )
        with opened(config, config.run_name, trains=True, run_id=_remembered_run_id(config)) as tracker:
            _remember_run_id(config, tracker.run_id)
            run = _start_actors(config, inputs, tracker, store)
            tracker.log_start(config, run_tags(config, inputs, run.reward))
            run.resume()
            tracker.log_lineage(lineage(config.data_read()), run.iteration)
            with store.settled():
                yield run


@dataclass(frozen=True)
class MeasuringRun:
    """What `flows.validate` and `flows.validation_sweep` work with: samplers, rewards and their MLflow run."""

    rollout: RolloutGroup
    reward: RewardGroup
    tracker: Tracker


@contextmanager
def open_measurement(
    config: TrainConfig, inputs: Inputs, name: str, tags: Mapping[str, str] | None = None
) -> Iterator[MeasuringRun]:
    """Open a measurement of weights, an MLflow run of its own. Raises ClusterError as `opened`."""
    with opened(config, name, trains=False) as tracker:
        run = MeasuringRun(start_rollout(config, inputs), RewardGroup(config.reward), tracker)
        tracker.log_start(config, run_tags(config, inputs, run.reward) | (tags or {}))
        tracker.log_lineage(lineage(config.data_read()), 0)
        yield run


def start_rollout(config: TrainConfig, inputs: Inputs, places: RankPlaces | None = None) -> RolloutGroup:
    """The rollout workers of a config, at the ranks' `places` or elsewhere; their models load in the background."""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    return RolloutGroup(
        inputs.model_config,
        inputs.embeddings,
        config.actor_rollout_ref.rollout,
        device=config.trainer.device,
        seed=config.trainer.seed,
        record_means=config.algorithm.rollout_correction.bypass_mode and needs_old_means(loss.loss_mode, loss.options),
        record_unconditional=config.records_unconditional,
        record_finished=config.algorithm.trainer_type == "direct_preference",
        outputs=frozenset(LATENTS if wants == "latents" else PICTURES for wants in wanted_inputs(config.reward)),
        places=places,
    )


def check_resources(config: TrainConfig, trains: bool = True) -> None:
    """Raise ClusterError where the cluster cannot hold the actors: Ray would wait for ever."""
    rewards = config.reward.num_cpus if config.samples or not trains else 0.0
    require_resources(config.gpus_needed(trains), rewards)


def rank_places(config: TrainConfig) -> RankPlaces:
    """Of the trainer's ranks, and of the rollout workers that are colocated with them."""
    trainer, placement = config.trainer, config.actor_rollout_ref.rollout.placement
    shared = config.samples and placement == "colocated"
    return RankPlaces(trainer.nnodes, trainer.n_gpus_per_node, trainer.device, shared)


def _start_actors(config: TrainConfig, inputs: Inputs, tracker: Tracker, store: CheckpointStore) -> TrainingRun:
    """All groups load their models at the same time."""
    settings, trainer_settings = config.actor_rollout_ref, config.trainer
    online = config.samples
    # Before the rollout, whose workers could else take a GPU here and there, and leave no machine with enough of them.
    places = rank_places(config)
    together = settings.rollout.placement == "colocated"
    rollout = start_rollout(config, inputs, places if together else None) if online else None
    reward = RewardGroup(config.reward) if online else None
    per_prompt = settings.rollout.n if online else len(SIDES)
    trainer = TrainerGroup(
        inputs.model_config,
        settings.actor,
        config.algorithm,
        world_size=trainer_settings.world_size,
        device=trainer_settings.device,
        num_threads=trainer_settings.num_threads,
        mini_batch_samples=settings.actor.ppo_mini_batch_size * per_prompt,
        keeps_previous=trainer_settings.one_step_off_policy,
        places=places,
        max_nonfinite_steps=trainer_settings.skippable_steps,
    )
    started = trainer.start()
    canary = None
    if rollout is not None:
        rollout.group.call_all("ready")
        canary = Canary(
            rollout.prompt_table([prompt.uid for prompt in inputs.test[:CANARY_PROMPTS]]),
            rows=trainer_settings.canary_batch or settings.rollout.micro_batch_size,
            timesteps=trainer_settings.canary_timesteps,
        )
    ray.get(started)
    guards = GuardWatch(config.reward.guards, guard_metrics(config), tracker.history)
    utilisation = None
    if inputs.flops is not None:
        utilisation = Utilisation(config, inputs.flops, rollout and rollout.group, trainer.group)
    stages = KeptStages(config.run_dir / "stages")
    run = TrainingRun(config, inputs, rollout, reward, trainer, tracker, store, stages, canary, guards, utilisation)
    if reward is not None:
        run.floor = FloorWatch(config.reward, trainer_settings.total_training_steps, tracker.history)
    return run


def guard_metrics(config: TrainConfig) -> dict[str, str]:
    """Name of each guard -> the metric of an iteration that is watched."""
    rewards = {name: f"train/reward/{name}/mean" for name, entry in config.reward.functions.items() if entry.guard}
    watched = STATISTICS if config.reward.guards.statistics else ()
    return rewards | {name: f"train/image/{name}/mean" for name in watched}


def run_tags(config: TrainConfig, inputs: Inputs, reward: RewardGroup | None) -> dict[str, str]:
    """What a run is found and compared by: digests of config and data, and the rewards' versions."""
    found = {} if reward is None else reward.versions()
    versions = {f"reward.{name.replace(':', '/')}": version for name, version in found.items()}
    return versions | {"doubleflow.config_digest": config.digest(), "doubleflow.data_digest": inputs.digest}


def _remembered_run_id(config: TrainConfig) -> str | None:
    """The MLflow run to continue; None where the run begins. Raises CheckpointError where the record is damaged."""
    file = config.run_dir / RUN_RECORD
    if not os.path.lexists(file):
        return None
    try:
        run_id = json.loads(file.read_text())["mlflow_run_id"]
        if isinstance(run_id, str) and run_id:
            return run_id
        reason = f"mlflow_run_id is {run_id!r}"
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        reason = repr(error)
    raise CheckpointError(
        f"{file} does not say which MLflow run to continue ({reason}): write "
        '{"mlflow_run_id": "..."} into it, with the id in any checkpoints/iter_*/state.json beside it, or remove it to '
        "go on in a new MLflow run"
    )


def _remember_run_id(config: TrainConfig, run_id: str) -> None:
    """A run killed here, or a power cut, leaves the old record or the new one."""
    record = {"mlflow_run_id": run_id, "run_name": config.run_name, "config": config.model_dump(mode="json")}
    with put_in_place(config.run_dir / RUN_RECORD) as aside:
        aside.write_text(json.dumps(record, indent=1))
