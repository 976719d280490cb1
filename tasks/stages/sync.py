# SPDX-License-Identifier: Apache-2.0
"""The task that gives the trainer's weights to the rollout workers."""

from models.training.engine import HeldWeights
from models.weights.canary import Canary, CanaryLimits
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import Synced, TrainerGroup
from tasks.stages.stage import stage


@stage("update_weights", "sync-weights")
def sync_weights(
    trainer: TrainerGroup,
    rollout: RolloutGroup,
    canary: Canary,
    version: int,
    limits: CanaryLimits,
    which: HeldWeights,
) -> Synced:
    """Give the rollout the trainer's weights, on the way that `rollout.weight_transport` says.

    Args:
        which: the policy's or one of the copies that the trainer keeps, see `TrainingEngine.holding`.

    Raises:
        WeightSyncError: a worker holds other weights or its canary is beyond `limits`, or they could not be sent.
    """
    return trainer.broadcast(rollout, canary, version, limits, which)
