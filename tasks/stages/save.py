"""The task that saves a checkpoint."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.actors.trainer_group import TrainerGroup
from tasks.records.run_store import CheckpointStore, RunState
from tasks.system.stopwatch import Stopwatch


@task(name="save-checkpoint", cache_policy=NO_CACHE, persist_result=False)
def save_checkpoint(
    clock: Stopwatch, store: CheckpointStore, trainer: TrainerGroup, state: RunState, in_background: bool
) -> None:
    """Write policy, optimiser and run state of an iteration: the update is kept. The one before is complete then.

    Args:
        in_background: return once the ranks have copied their state to host memory, and write from there.
    """
    with clock.stage("save_checkpoint"):
        if in_background:
            store.save_in_background(state, trainer.start_saving, trainer.wait_until_saved)
        else:
            store.save(state, trainer.save)
