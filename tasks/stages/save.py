# SPDX-License-Identifier: Apache-2.0
"""The task that saves a checkpoint."""

from tasks.actors.trainer_group import TrainerGroup
from tasks.records.run_store import CheckpointStore, RunState
from tasks.stages.stage import stage


@stage("save_checkpoint")
def save_checkpoint(store: CheckpointStore, trainer: TrainerGroup, state: RunState, in_background: bool) -> None:
    """Write policy, optimiser and run state of an iteration: the update is kept. The one before is complete then.

    Args:
        in_background: return once the ranks have copied their state to host memory, and write from there.
    """
    if in_background:
        store.save_in_background(state, trainer.start_saving, trainer.wait_until_saved)
    else:
        store.save(state, trainer.save)
