"""What one training run knows of itself, and what comes next in it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prefect import get_run_logger

from models.algorithms import DiffusionLossFn, get_diffusion_loss_fn
from models.training.engine import HeldWeights
from models.weights.canary import Canary, CanaryLimits
from tasks.actors.memory import resident_mb
from tasks.actors.profiling import traced
from tasks.actors.reward_group import RewardGroup
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import TrainerGroup
from tasks.config.tree import TrainConfig
from tasks.data.pairs import Pair
from tasks.data.prompts import Prompt
from tasks.records.guards import FLOOR_TAG, HACKING_TAG, FloorWatch, GuardWatch
from tasks.records.retention import remove_old_pictures
from tasks.records.run_store import CheckpointStore, RunState
from tasks.records.tracking import Tracker
from tasks.run.kept_stages import KeptStages
from tasks.run.preflight import Inputs
from tasks.run.schedule import part_of, window_of
from tasks.run.utilisation import Utilisation
from tasks.stages.validation import Validation
from tasks.system.ownership import require_own
from tasks.system.stopwatch import Stopwatch

T = TypeVar("T")
CANARY_PROMPTS = 2
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
        return self._part_of(self.inputs.train, iteration)

    def pairs(self, iteration: int) -> list[Pair]:
        """The iteration's preference pairs."""
        return self._part_of(self.inputs.pairs.pairs, iteration)

    def _part_of(self, items: Sequence[T], iteration: int) -> list[T]:
        return part_of(items, self.config.data.train_batch_size, self.config.trainer.seed, iteration)

    def window(self, iteration: int) -> list[int]:
        """The iteration's stochastic steps."""
        return window_of(self.config, iteration)

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
