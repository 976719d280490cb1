# SPDX-License-Identifier: Apache-2.0
"""A training engine's state on disk: sharded, for any number of ranks to read, written at once or in the background."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
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
        self._copy = HostCopy()

    def save(self, folder: Path) -> None:
        """Write the state of now."""
        with _errors_are_exceptions():
            dcp.save(self._state(), storage_writer=StateWriter(folder))

    def start_saving(self, folder: Path) -> None:
        """Copy the state of now to host memory, which is kept for the next, and write it from there, in a thread.

        Raises:
            RuntimeError: a save is under way.
        """
        if self._writing is not None:
            raise RuntimeError(f"a checkpoint is being written, so {folder} cannot be begun: wait for it first")
        if self._group is None:  # its own: the ranks agree on files while training uses the other groups
            self._group = dist.new_group(backend="gloo")
        writer, copy = StateWriter(folder), self._copy
        future = dcp.async_save(self._state(), storage_writer=writer, process_group=self._group, async_stager=copy)
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
        _forget_what_is_newer(state[EXTRA], folder)
        with _errors_are_exceptions():
            dcp.load(state, storage_reader=StateReader(folder))
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(engine.module, state["model"], options=options)
        set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"], options=options)
        if engine.actor_config.fsdp_config.optimizer_offload:  # loading has put it where the parameters are
            offload_adam_state(engine.optimizer)
        extra = state[EXTRA]
        engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        engine.optimizer_steps, engine.updates = extra["optimizer_steps"], extra["updates"]
        engine.nonfinite.in_a_row = extra.get("nonfinite_in_a_row", 0)
        torch.set_rng_state(extra["torch_rng"])

    def _state(self) -> dict[str, Any]:
        engine, options = self.engine, StateDictOptions(ignore_frozen_params=True)
        state: dict[str, Any] = {
            "model": get_model_state_dict(engine.module, options=options),
            "optimizer": get_optimizer_state_dict(engine.module, engine.optimizer, options=options),
            EXTRA: {
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


EXTRA = "extra"
"""Key of what is in a state beside tensors of the weights' number."""
NEWER = frozenset({"nonfinite_in_a_row"})
"""What checkpoints of earlier versions lack; it is 0 there."""


def _forget_what_is_newer(extra: dict[str, Any], folder: Path) -> None:
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in NEWER:
        if f"{EXTRA}.{name}" not in there:
            del extra[name]


READERS = 4
"""Threads of a rank that read its state."""
SMALL_BYTES = 1 << 20
"""What is smaller takes longer to look at than to read, which is done in Python, where threads do not help."""
PIECE_BYTES = 1 << 22
"""That are read at a time: what is on its way to a GPU stays in the processor's cache."""


class StateReader(dcp.FileSystemReader):
    """Reads what a rank has of a large tensor, and no more, from the file to where it belongs, in several threads: the
    base reads each stored tensor whole into memory of its own, for every rank that has a part, and copies from there.
    """

    def read_data(self, plan: Any, planner: Any) -> Any:
        """As the base's, which gets what is small, no tensor, or there in another format or order than here.

        Raises:
            OSError: a file is not there, cut off or no longer what was written.
        """
        with ThreadPoolExecutor(READERS) as threads:
            read = list(threads.map(partial(self._read, planner), plan.items))
        others = [item for item, is_read in zip(plan.items, read, strict=True) if not is_read]
        return super().read_data(replace(plan, items=others), planner)

    def _read(self, planner: Any, item: Any) -> bool:
        """Has the item been read? Else it is one for the base."""
        if item.type == LoadItemType.BYTE_IO:
            return False
        place, target = self.storage_data[item.storage_index], planner.resolve_tensor(item).detach()
        if target.nbytes < SMALL_BYTES:
            return False
        with (Path(self.path) / place.relative_path).open("rb", buffering=0) as file:
            stored, begin = _stored_in(cast(Any, self)._slice_file(file, place), file.name)
            wanted = zip(item.storage_offsets, item.lengths, strict=True)
            part = stored[tuple(slice(first, first + length) for first, length in wanted)]
            alike = (part.dtype, part.shape) == (target.dtype, target.shape)
            if not (alike and part.is_contiguous() and target.is_contiguous()):
                return False
            file.seek(place.offset + begin + part.storage_offset() * part.itemsize)
            _fill(target, file)
        planner.commit_tensor(item, target)
        return True


def _stored_in(archive: Any, name: str) -> tuple[Tensor, int]:
    """The tensor that torch.save wrote, on no device, and where in the archive its bytes begin: none of them is read.

    torch.save numbers what it stores, and of one tensor there is one.
    """
    try:
        stored = torch.load(archive, map_location="meta", weights_only=True)
        archive.seek(0)
        return stored, cast(Any, torch._C.PyTorchFileReader)(archive).get_record_offset("data/0")
    except OSError:
        raise
    except Exception as error:  # whatever a reader meets that takes other bytes for its own
        raise OSError(f"{name} is damaged or cut off: {error}") from error


def _fill(target: Tensor, file: FileIO) -> None:
    """Read a contiguous tensor from here on. Raises OSError where the file ends before."""
    buffer = None if target.is_cpu else torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda)
    for piece in target.view(-1).view(torch.uint8).split(PIECE_BYTES):
        read = piece if buffer is None else buffer[: len(piece)]
        if file.readinto(cast(Any, read.numpy())) != len(piece):
            raise OSError(f"{file.name} is cut off within a tensor")
        if buffer is not None:
            piece.copy_(read)


class HostCopy(BlockingAsyncStager):
    """Copies states to host memory, from the second on to where the first was: memory that nobody has touched yet takes
    longer than the copy, and torch takes it three times for a sharded tensor. What it would keep by itself has locked
    pages, in sizes that are powers of two."""

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy, which the next one overwrites but for `extra`: the keys of what is there may be others then."""
        copy = super().stage({name: part for name, part in state.items() if name != EXTRA})
        self.cache_staged_state_dict, self.state_dict_cache = True, copy
        return copy | BlockingAsyncStager().stage({EXTRA: state[EXTRA]})


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
