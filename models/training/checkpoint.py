# SPDX-License-Identifier: Apache-2.0
"""A training engine's state on disk: sharded, for any number of ranks to read, written at once or in the background."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.serialization import config as saving

from models.errors import naming_the_disk
from models.training.adamw import offload_adam_state
from models.training.gradients import NonfiniteSteps
from models.training.weight_copies import WeightAverage, WeightCopy

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig


class Saved(Protocol):
    """What of an engine is on disk, and how it keeps its optimiser."""

    actor_config: "DiffusionActorConfig"
    module: nn.Module
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    optimizer_steps: int
    updates: int
    nonfinite: NonfiniteSteps
    ema: WeightAverage | None
    old_policy: WeightCopy | None
    previous: WeightCopy | None


class EngineCheckpoint:
    """Saves and loads policy, its copies, optimiser, schedule and random state of one engine.

    Every rank makes every call.
    """

    def __init__(self, engine: Saved):
        self.engine = engine
        self._writing: Future | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, folder: Path) -> None:
        """Write the state of now."""
        with _errors_are_exceptions():
            dcp.save(self._state(), storage_writer=StateWriter(folder))

    def start_saving(self, folder: Path) -> None:
        """Copy the state of now to host memory and write it from there, in a thread.

        Raises:
            RuntimeError: a save is under way.
        """
        if self._writing is not None:
            raise RuntimeError(f"a checkpoint is being written, so {folder} cannot be begun: wait for it first")
        if self._group is None:  # its own: the ranks agree on files while training uses the other groups
            self._group = dist.new_group(backend="gloo")
        future = dcp.async_save(self._state(), storage_writer=StateWriter(folder), process_group=self._group)
        self._writing = cast(Future, future)

    def finished(self) -> bool:
        """Has what `start_saving` began been written? An error of the writing is raised here, once."""
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        with _errors_are_exceptions():
            writing.result()
        return True

    def load(self, folder: Path) -> None:
        """Restore what a save wrote, in place."""
        engine, state = self.engine, self._state()
        _forget_what_is_newer(state["extra"], folder)
        with _errors_are_exceptions():
            dcp.load(state, checkpoint_id=str(folder))
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(engine.module, state["model"], options=options)
        set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"], options=options)
        if engine.actor_config.fsdp_config.optimizer_offload:  # loading has put it where the parameters are
            offload_adam_state(engine.optimizer)
        extra = state["extra"]
        engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        engine.optimizer_steps, engine.updates = extra["optimizer_steps"], extra["updates"]
        engine.nonfinite.in_a_row = extra.get("nonfinite_in_a_row", 0)
        torch.set_rng_state(extra["torch_rng"])

    def _state(self) -> dict[str, Any]:
        engine, options = self.engine, StateDictOptions(ignore_frozen_params=True)
        state: dict[str, Any] = {
            "model": get_model_state_dict(engine.module, options=options),
            "optimizer": get_optimizer_state_dict(engine.module, engine.optimizer, options=options),
            "extra": {
                "lr_scheduler": engine.lr_scheduler.state_dict(),
                "optimizer_steps": engine.optimizer_steps,
                "updates": engine.updates,
                "nonfinite_in_a_row": engine.nonfinite.in_a_row,
                "torch_rng": torch.get_rng_state(),
            },
        }
        if engine.ema is not None:
            state["ema"] = engine.ema.shadow
        if engine.old_policy is not None:
            state["old_policy"] = engine.old_policy.shadow
        if engine.previous is not None:
            state["previous"] = engine.previous.shadow
        return state


NEWER = frozenset({"nonfinite_in_a_row"})
"""What checkpoints of earlier versions lack; it is 0 there."""


def _forget_what_is_newer(extra: dict[str, Any], folder: Path) -> None:
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in NEWER:
        if f"extra.{name}" not in there:
            del extra[name]


class StateWriter(dcp.FileSystemWriter):
    """Says of a disk that it is full, on the rank that meets it: where torch.save was stopped by that it raises what it
    misses at a file's end. Writes no checksums: nothing reads them, and a thread that makes them holds Python's lock,
    which training needs meanwhile."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As the base's, of this rank's share."""
        without_checksums = cast(Any, saving).patch("save.compute_crc32", False)
        with naming_the_disk(Path(self.path)), without_checksums:
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        """As the base's, of what says where everything is."""
        with naming_the_disk(Path(self.path)):
            super().finish(metadata, results)


@contextmanager
def _errors_are_exceptions() -> Iterator[None]:
    """torch's CheckpointException is none, and would pass whatever handles the errors of a run."""
    try:
        yield
    except CheckpointException as error:
        for found, _ in error.failures.values():
            if isinstance(found, OSError):  # the disk's fault: the same as from any other file
                raise found from error
        raise RuntimeError(f"a rank could not read or write a checkpoint: {error}") from error
