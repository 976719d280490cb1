# SPDX-License-Identifier: Apache-2.0
"""What a trainer rank asks of its engine, whichever it is, and how an engine is found by its name."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from models.families.base import DiffusionModelConfig
from models.registry import NameRegistry
from models.samples.trajectories import Trajectories
from models.weights.canary import Canary

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig, ForwardProcessConfig
    from models.training.micro_batches import ActorBatch

HeldWeights = Literal["policy", "average", "old", "previous"]
"""The trained weights, their moving average, the old policy of DiffusionNFT and its kin, and the trained weights of
before the last update."""
FIRST_RATIO = "ratio_deviation/first"
"""`ratio_deviation/mean` of the first optimiser step: of the loss's own ratio, so in the unit of its clip range."""
LOG_PROB_DISTANCES = ("logprob_abs_diff/mean", "logprob_abs_diff/max", FIRST_RATIO)
"""Metrics that mean something only before the weights move."""


class TrainingEngine(Protocol):
    """One rank of the trainer. torch.distributed is initialised; every rank makes every call, one at a time.

    An engine may have two methods more, as `DiffusersFSDPEngine` does: `warm_up`, to compile its update ahead, and
    `step_early`, to take an optimiser step before the other batches of its update are there.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: "DiffusionActorConfig",
        device: str = "cpu",
        forward_config: "ForwardProcessConfig | None" = None,
        keeps_previous: bool = False,
        max_nonfinite_steps: int = 0,
    ) -> None:
        """Keep the settings; nothing is loaded yet.

        Args:
            model_config: which model and which of its weights.
            actor_config: loss, optimiser, micro-batches, and how the ranks share the model. Of its `optim` a named
                `lr_scheduler_type` spans `total_training_steps`, which a run has filled in.
            device: "cpu" (gloo) or "cuda" (nccl, and gloo for what lies in host memory).
            forward_config: noise levels and old policy; losses of the forward process need it.
            keeps_previous: hold on to the weights of before the last update, as `holding("previous")`.
            max_nonfinite_steps: leave out so many optimiser steps in a row whose gradient is not finite, and report
                them as `nonfinite_steps`; given only where it is not 0.
        """

    def initialize(self) -> None:
        """Load the model, with `model.initial_weights` where there are some, and build optimiser and copies of the
        weights."""

    def update_policy(self, batches: Sequence["ActorBatch"], epochs: int = 1) -> dict[str, float]:
        """One optimiser step for each of this rank's batches, `epochs` times over; its metrics, without prefix.

        Raises:
            GradientNotFinite: a gradient is not finite, as were `max_nonfinite_steps` in a row before it; the weights
                are then untouched by it.
        """

    def rescored(self, trajectories: Trajectories, with_means: bool = False) -> Trajectories:
        """The same samples with `log_probs`, and if asked `means`, under the present weights."""

    def holding(self, which: HeldWeights) -> AbstractContextManager[None]:
        """Context in which the engine's weights are its own or one of the copies that it keeps.

        Raises:
            ValueError: the config keeps no such weights.
        """

    def gather_weights(self) -> dict[str, Tensor]:
        """The trained weights by the names of `models.weights.trainable.trainable`, each of its whole shape, on the
        CPU; on rank 0 (empty on the others)."""

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same one by one, of whole shape, on the device and on every rank, which must take them all; as they are
        trained or already rounded to the format in which a rollout holds them."""

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What the trainer's model predicts for the canary, [S, n, ...] fp32 on the CPU (`canary_velocity`)."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write all that training needs to go on into a folder that exists, for any number of ranks to read."""

    def start_saving(self, folder: Path) -> None:
        """The same of the state of now, but return as soon as training may go on. One save is under way at a time."""

    def saving_finished(self) -> bool:
        """Has what `start_saving` began been written? Does not wait. An error of the writing is raised here."""

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what a save wrote, in place."""


OWN = ("fsdp", "veomni_engine")
"""Modules of this package, each of which registers one engine when imported; by name, for they import this one."""

TRAINING_ENGINES: NameRegistry[type[TrainingEngine]] = NameRegistry("A training engine", "actor.strategy")
"""Engines by name; a class may also be given as package.module:Class."""


def get_training_engine(strategy: str) -> type[TrainingEngine]:
    """The class that `actor.strategy` names.

    Raises:
        ValueError: there is none, and the message lists the known names; or it is no class.
    """
    for module in OWN:
        importlib.import_module(f"{__package__}.{module}")
    found = TRAINING_ENGINES.get(strategy)
    if not isinstance(found, type):
        raise ValueError(f"actor.strategy is {strategy!r}, which is no class but a {type(found).__name__}: name one")
    return found
