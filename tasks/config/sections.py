# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration, from every floor, and what only all of them together say.

Field names follow the reference system (VeRL-Omni), so its users find their knobs: `actor_rollout_ref.rollout.n`,
`actor_rollout_ref.actor.optim.lr`, `algorithm.adv_estimator`, `trainer.total_training_steps`. Every value has one
place; what the reference mirrors between sections stands once here.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from pydantic import Field

from models.config.actor import DiffusionActorConfig
from models.config.bounds import LEAST_SHARE
from models.config.model import ModelConfig
from models.config.section import NotShaping, Section
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.config.data import DataConfig
from tasks.config.identity import paced_by_length
from tasks.config.reward import RewardConfig
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.tracking import TrackingConfig
from tasks.config.trainer import RayConfig, TrainerConfig

CUDA_CANARY_TOLERANCE = 0.01
OTHER_ENGINE_TOLERANCE = 1e-4
"""On the CPU, where the rollout engine is not the trainer's: sums in another order."""


class ActorRolloutRefConfig(Section):
    """The policy: the model, how it is sampled and how it is updated."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model and which of its weights.")
    rollout: DiffusionRolloutConfig = Field(default_factory=DiffusionRolloutConfig, description="Sampling.")
    actor: DiffusionActorConfig = Field(default_factory=DiffusionActorConfig, description="The update.")


class RunSections(Section):
    """What `tasks.config.tree.TrainConfig` consists of, before anything is checked of it as a whole."""

    data: DataConfig = Field(default_factory=DataConfig, description="The data set.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(
        default_factory=ActorRolloutRefConfig, description="The policy: model, rollout, update."
    )
    algorithm: DiffusionAlgoConfig = Field(
        default_factory=DiffusionAlgoConfig, description="Its name, advantages and rollout correction."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Rewards.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The loop.")
    ray_init: NotShaping[RayConfig] = Field(default_factory=RayConfig, description="The cluster.")
    tracking: NotShaping[TrackingConfig] = Field(default_factory=TrackingConfig, description="Where MLflow is.")

    @property
    def data_ranks(self) -> int:
        """Trainer ranks with samples of their own; those that share the tokens of a sample count once."""
        return self.trainer.world_size // self.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size

    @property
    def is_online(self) -> bool:
        """Does a run of training start rollout and reward?"""
        return self.algorithm.sample_source == "online"

    @property
    def canary_tolerance(self) -> float:
        """The largest relative difference of velocities after a weight sync."""
        if self.trainer.canary_tolerance is not None:
            return self.trainer.canary_tolerance
        if self.trainer.device == "cuda":
            return CUDA_CANARY_TOLERANCE
        settings = self.actor_rollout_ref
        same = settings.rollout.name == "diffusers" and settings.actor.fsdp_config.ulysses_sequence_parallel_size == 1
        return 0.0 if same else OTHER_ENGINE_TOLERANCE

    @property
    def records_unconditional(self) -> bool:
        """Does the update take the rollout's half of the guidance without the prompt as it is?

        Not where they were made ahead, from older weights than those of the update, nor where the trainer computes the
        old log-probs itself: with both halves its own, which the first update must repeat.
        """
        constant = self.actor_rollout_ref.actor.guidance_gradient == "conditional"
        bypasses = self.algorithm.rollout_correction.bypass_mode
        return constant and bypasses and not self.trainer.one_step_off_policy

    @property
    def shares_gpus(self) -> bool:
        """Do trainer and rollout take turns on the same GPUs?"""
        return self.trainer.device == "cuda" and self.actor_rollout_ref.rollout.placement == "colocated"

    @property
    def gpus(self) -> float:
        """GPUs that a run of training takes."""
        return self.gpus_needed()

    def gpus_needed(self, trains: bool = True) -> float:
        """GPUs of ranks, rollout workers, rewards and text encoders; without `trains`, of a validation alone.

        A share of a GPU is of one GPU, so three workers of .6 need three.
        """
        rollout, on_cuda = self.actor_rollout_ref.rollout, self.trainer.device == "cuda"
        holds = self.holds_places(trains)
        taken = [1.0] * self.trainer.world_size if holds and on_cuda else []
        taken += [] if self.data.encoders is None else [self.data.encoders.own_gpus]
        if trains and not self.is_online:
            return gpus_for(taken)
        if on_cuda and not (holds and self.shares_gpus):
            taken += [rollout.gpus_per_worker] * rollout.num_actors
        return gpus_for([*taken, *self.reward.gpus_of_processes()])

    def holds_places(self, trains: bool) -> bool:
        """Are the places of the trainer's ranks held? In a validation for what is to be on them besides the rollout."""
        encodes = self.data.encoders is not None and self.data.encoders.is_colocated
        return trains or encodes or self.reward.is_colocated

    @property
    def rollout_devices(self) -> float:
        """GPUs that sample, or on the CPU the rollout's processes."""
        rollout = self.actor_rollout_ref.rollout
        on_cpu = self.trainer.device == "cpu"
        shares = rollout.processes_per_worker if on_cpu or self.shares_gpus else rollout.gpus_per_worker
        return rollout.num_actors * shares

    @property
    def paced_by_length(self) -> str | None:
        """The setting by which a longer run is not the same at its beginning, if there is one."""
        policy = self.actor_rollout_ref
        return paced_by_length(policy.rollout.algo.sde_window_mode, policy.actor.optim)

    @property
    def planned_optimizer_steps(self) -> int:
        """The optimiser steps of the whole run, if no mini-batch drops out."""
        actor = self.actor_rollout_ref.actor
        iteration = self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
        return iteration * self.trainer.total_training_steps

    @property
    def scheduled_actor(self) -> DiffusionActorConfig:
        """`actor_rollout_ref.actor` as the trainer's ranks get it: a schedule knows how many steps it spans."""
        actor = self.actor_rollout_ref.actor
        return actor.model_copy(update={"optim": actor.optim.spanning(self.planned_optimizer_steps)})

    def data_read(self, trains: bool = True) -> list[Path]:
        """The files and folders that a run reads; without `trains`, a validation."""
        model = self.actor_rollout_ref.model
        start = [Path(model.initial_weights)] if trains and model.initial_weights is not None else []
        pairs = [self.data.pairs] if trains and not self.is_online else []
        embeddings = [self.data.embeddings] if isinstance(self.data.embeddings, Path) else []
        return [self.data.prompts, *embeddings, Path(model.path), *start, *pairs]


def gpus_for(processes: Sequence[float]) -> float:
    """GPUs on which these processes have room, each of which takes whole ones or a share of a single one: their sum, or
    more where what is left of one GPU is too little for any."""
    shares, left = sorted((share for share in processes if 0 < share < 1), reverse=True), list[float]()
    for share in shares:
        place = next((place for place, room in enumerate(left) if room >= share - LEAST_SHARE), None)
        if place is None:
            left.append(1 - share)
        else:
            left[place] -= share
    shared = sum(shares) if ceil(sum(shares) - LEAST_SHARE) >= len(left) else len(left)
    return sum(process for process in processes if process >= 1) + shared
