"""The task that gives the trainer's weights to the rollout workers."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from models.training.engine import HeldWeights
from models.weights.canary import Canary, CanaryLimits
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import Synced, TrainerGroup
from tasks.system.stopwatch import Stopwatch


@task(name="sync-weights", cache_policy=NO_CACHE, persist_result=False)
def sync_weights(
    clock: Stopwatch,
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
    with clock.stage("update_weights"):
        return trainer.broadcast(rollout, canary, version, limits, which)
