# SPDX-License-Identifier: Apache-2.0
"""What one training run knows of itself, and what comes next in it."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from models.algorithms import DiffusionLossFn, get_diffusion_loss_fn
from models.algorithms.old_policy import is_copied
from models.training.engine import HeldWeights
from models.weights.canary import Canary, CanaryLimits
from tasks.actors.actor_group import ActorGroup
from tasks.actors.machines import MachineWatch
from tasks.actors.reward_group import RewardGroup
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.text_encoder_group import TextEncoderGroup
from tasks.actors.trainer_group import TrainerGroup
from tasks.config.tree import TrainConfig
from tasks.data.pairs import Pair, PairDataset
from tasks.data.prompts import Prompt
from tasks.records.flow_page import page_logger
from tasks.records.guards import FloorWatch, GuardWatch
from tasks.records.run_store import CheckpointStore, RunState
from tasks.records.tracking import Tracker
from tasks.run.expectation import BesideExpected
from tasks.run.kept_stages import KeptStages
from tasks.run.preflight import Inputs
from tasks.run.reporting import RunReport
from tasks.run.schedule import part_of, windows_of
from tasks.run.start_times import StartTimes
from tasks.run.utilisation import Utilisation
from tasks.system.behind import Behind
from tasks.system.ownership import require_own
from tasks.system.stopwatch import Stopwatch

T = TypeVar("T")
CANARY_PROMPTS = 2
OPTIMIZER_STEPS = "actor/optimizer_steps"
"""Of the run so far, as the engine counts them."""
NO_STEP = "no iteration made an optimiser step"


@dataclass(frozen=True)
class OnlineParts:
    """What an online run has beside its trainer.

    Attributes:
        rollout, reward: the actor groups that sample and score.
        canary: the input that proves a weight sync.
        floor: what shows a reward that tells no sample from another.
    """

    rollout: RolloutGroup
    reward: RewardGroup
    canary: Canary
    floor: FloorWatch


@dataclass
class TrainingRun:
    """Everything `flows.train` works with.

    Attributes:
        config, inputs: what was asked for.
        trainer: its ranks.
        tracker: the MLflow run.
        store: the checkpoints.
        stages: what is kept of iterations that are not in a checkpoint yet.
        guards: what shows reward hacking.
        report: the run's page.
        online_parts: what samples and scores; None where `sample_source` is offline.
        text_encoders: what encodes prompts; None where their embeddings are on disk.
        utilisation: of the devices; None where the model's operations cannot be counted.
        iteration: the last one that is in the weights.
        learned: metrics of the update that made them.
        held_out: the last held-out reward that was measured.
        held_out_of: the iteration whose weights that was measured of; None before there is one.
        spent: what the recorded iterations cost, under cost/.
        elsewhere: the iteration up to which another MLflow run has the record.
        has_updated: has this process made an update?
        prompts_ahead: iteration -> its prompts, which are being encoded ahead.
        machines: what tells of those that are lost, while the run is open.
        record: of the last iteration that was done, while it is written.
        beside_expected: what says how an iteration compares with what was expected; None where nothing was.
        start: where the seconds go until this process has made its first update.
    """

    config: TrainConfig
    inputs: Inputs
    trainer: TrainerGroup
    tracker: Tracker
    store: CheckpointStore
    stages: KeptStages
    guards: GuardWatch
    report: RunReport
    online_parts: OnlineParts | None = None
    text_encoders: TextEncoderGroup | None = None
    utilisation: Utilisation | None = None
    iteration: int = 0
    learned: dict[str, float] = field(default_factory=dict)
    held_out: float = float("nan")
    held_out_of: int | None = None
    spent: dict[str, float] = field(default_factory=dict)
    elsewhere: int = 0
    has_updated: bool = False
    prompts_ahead: dict[int, list[Prompt]] = field(default_factory=dict)
    machines: MachineWatch | None = None
    record: Future | None = None
    beside_expected: BesideExpected | None = None
    start: StartTimes = field(default_factory=StartTimes)

    @property
    def is_online(self) -> bool:
        """Does the run sample? Offline it reads pairs, and neither syncs nor validates."""
        return self.online_parts is not None

    @property
    def online(self) -> OnlineParts:
        """What samples and scores, of a run that `is_online`."""
        if self.online_parts is None:
            raise RuntimeError("an offline run has nothing that samples: ask is_online first")
        return self.online_parts

    @property
    def pair_dataset(self) -> PairDataset:
        """What an offline run learns from."""
        if self.inputs.pairs is None:
            raise RuntimeError("an online run has no pairs: ask is_online first")
        return self.inputs.pairs

    def warm_up(self) -> None:
        """Let the trainer compile its update while the rollout samples, where there is memory for both at a time."""
        policy = self.config.actor_rollout_ref
        waits = self.config.shares_gpus and policy.rollout.sleeps
        if not policy.model.compile or waits or self.iteration >= self.config.trainer.total_training_steps:
            return
        samples = policy.actor.micro_batch
        if self.loss.process == "reverse":
            samples = min(samples, policy.rollout.batch_size)
        rows = samples * policy.actor.levels_per_pass
        self.trainer.warm_up(replace(self.online.canary, rows=rows))

    def actor_groups(self) -> dict[str, ActorGroup]:
        """The run's processes, by the name that metrics and traces call them."""
        groups = {"trainer": self.trainer.group}
        if self.text_encoders is not None:
            groups["text_encoder"] = self.text_encoders.group
        if self.online_parts is None:
            return groups
        return groups | {"rollout": self.online_parts.rollout.group} | self.online_parts.reward.groups()

    @property
    def sampling_weights(self) -> HeldWeights:
        """Which of the trainer's weights the rollout samples with. Where the old policy is a copy, it is the policy."""
        lags = self.loss.samples_from_old_policy and not is_copied(self.config.algorithm)
        return "old" if lags else "policy"

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
        return self._part_of(self.pair_dataset.pairs, iteration)

    def _part_of(self, items: Sequence[T], iteration: int) -> list[T]:
        return part_of(items, self.config.data.train_batch_size, self.config.trainer.seed, iteration)

    def windows(self, iteration: int) -> dict[str, list[int]]:
        """The stochastic steps of each of the iteration's prompts, by uid."""
        return windows_of(self.config, iteration, [prompt.uid for prompt in self.prompts(iteration)])

    @property
    def canary_limits(self) -> CanaryLimits:
        """How far a rollout worker's canary may be from the trainer's."""
        return CanaryLimits(self.config.canary_tolerance, self.config.trainer.canary_missing_share)

    def take_update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Remember an update's metrics; one that made no optimiser step is a warning and actor/update_skipped."""
        skipped = metrics.get(OPTIMIZER_STEPS) == self.learned.get(OPTIMIZER_STEPS, 0.0)
        self.learned = {**metrics, "actor/update_skipped": float(skipped)}
        if skipped:
            page_logger().warning("the update of iteration %d was skipped: it made no optimiser step", iteration)

    @property
    def why_unmoved(self) -> str | None:
        """Why the weights that validation and export use still are those that the run began with, in a clause; None
        where they are not. An engine that does not count its optimiser steps is taken to have made enough."""
        made, ema = self.learned.get(OPTIMIZER_STEPS, math.inf), self.config.actor_rollout_ref.actor.ema
        if made == 0:
            return NO_STEP
        if ema.enable and made < ema.update_interval:
            return (
                f"of the {ema.update_interval} optimiser steps after which actor.ema first moves its average only "
                f"{made:g} were made"
            )
        return None

    @property
    def moved(self) -> bool:
        """Are the weights that validation and export use others than the run began with?"""
        return self.why_unmoved is None

    def state(self, iteration: int, metrics: Mapping[str, float] | None = None) -> RunState:
        """The record of what is kept of an iteration."""
        digests = self.config.digest(), self.inputs.digest
        return RunState(iteration, *digests, self.tracker.run_id, dict(metrics or {}))

    @property
    def behind(self) -> Behind:
        """What is written while the next iteration goes on, in order: kept stages, checkpoints, records."""
        return self.store.behind

    def write_behind(self, clock: Stopwatch, stage: str, work: Callable[..., None], *arguments: Any) -> Future:
        """Have something written, after all that was given before; `clock` counts its seconds as the stage's."""

        def timed() -> None:
            with clock.stage_behind(stage):
                work(*arguments)

        return self.behind.submit(timed)

    def forget_stages(self) -> None:
        """Remove what is kept of iterations that MLflow and a checkpoint have."""
        for saved in self.store.iterations()[-1:]:  # of an earlier iteration, where one is being written
            self.stages.forget(saved)

    def recorded(self, iteration: int) -> bool:
        """Has MLflow everything of the iteration, be it in the run that this one takes up?"""
        return iteration in self.tracker.logged_steps or 0 < iteration <= self.elsewhere

    @property
    def next_iteration(self) -> int:
        """The first that is not done: the last one that is in the weights, where MLflow has not got all of it."""
        return self.iteration + 1 if self.iteration == 0 or self.recorded(self.iteration) else self.iteration

    def resume(self, found: tuple[RunState, Path] | None) -> None:
        """Continue from the checkpoint that `CheckpointStore.latest` found, if it is one, with what MLflow has of the
        iterations that are done.

        It may have some without any checkpoint: they are made again, and not recorded again.
        """
        recorded = self.tracker.latest()
        self.spent = {name: value for name, value in recorded.items() if name.startswith("cost/")}
        if measured := self.tracker.history("val/reward/mean"):
            self.held_out_of = max(measured)
            self.held_out = measured[self.held_out_of]
        if found is None:
            return
        state, weights = found
        require_own(weights)
        self.trainer.load(weights)
        self.iteration, self.learned = state.iteration, state.metrics
        if state.mlflow_run_id != self.tracker.run_id and not self.stages.has_scores(state.iteration):
            self.elsewhere = state.iteration  # its scores are in the record there, and nowhere else
        self.stages.forget(self.next_iteration - 1)
