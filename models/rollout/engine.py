# SPDX-License-Identifier: Apache-2.0
"""What a rollout worker asks of its engine, whichever it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from models.samples.trajectories import Generated, RolloutRequest
from models.weights.canary import Canary

if TYPE_CHECKING:
    from models.config.pipeline import DiffusionPipelineConfig


class WeightLoad(Protocol):
    """The trainer's weights, coming in pieces."""

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Some of them, each of its whole shape; nothing of the given tensors is needed afterwards."""

    def finish(self) -> None:
        """All have come.

        Raises:
            WeightSyncError: some of the engine's own are as they were.
        """


class RolloutEngine(Protocol):
    """Holds one copy of a model and samples with it. Calls come one at a time."""

    def produce(self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None) -> Generated:
        """Sample one request.

        Args:
            request: what to sample.
            pipeline: how, if not as in the training rollout (validation).
        """

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the trainer's weights (names and shapes as `models.weights.trainable.trainable` gives them)."""

    def begin_load(self) -> WeightLoad:
        """Take the trainer's weights piece by piece. Nothing is sampled until the load is finished."""

    def load_exported(self, folder: Path) -> None:
        """Take weights from a folder that a run exported."""

    def held_weights(self) -> Mapping[str, Tensor] | None:
        """The trained weights as they are in the engine now, under the trainer's names and in its shapes; None where it
        keeps them in another form."""

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What this copy of the model predicts for the canary, [S, n, ...] fp32 on the CPU (`canary_velocity`)."""

    def sleep(self, with_policy: bool = True) -> None:
        """Move the weights off the GPU: the trainer needs it. Nothing is sampled until `wake`.

        Args:
            with_policy: without them an engine need not keep those that the trainer trains: new ones are loaded after
                `wake`, before anything is sampled.
        """

    def wake(self) -> None:
        """Bring the weights back; new ones may be loaded then."""
