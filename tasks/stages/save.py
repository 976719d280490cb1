# SPDX-License-Identifier: Apache-2.0
"""The task that saves a checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tasks.actors.trainer_group import TrainerGroup
from tasks.records.run_store import CheckpointStore, RunState
from tasks.stages.stage import stage


@stage("save_checkpoint")
def save_checkpoint(
    store: CheckpointStore,
    trainer: TrainerGroup,
    state: RunState,
    in_background: Callable[[], AbstractContextManager[None]] | None,
) -> None:
    """Write policy, optimiser and run state of an iteration: the update is kept. The one before is complete then.

    Args:
        in_background: return once the ranks have copied their state to host memory, and write from there, in this
            context; None waits until it is written.
    """
    if in_background is not None:
        store.save_in_background(state, trainer.start_saving, trainer.wait_until_saved, in_background)
    else:
        store.save(state, trainer.save)
