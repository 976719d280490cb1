# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from one process to another without a copy on disk or in an object store.

A bucket is a run of whole tensors in one flat buffer of bytes. It is handed over by a handle to the sender's own memory
(CUDA IPC on a GPU, shared memory of the machine on the CPU) or broadcast (NCCL on GPUs, gloo on the CPU).
"""

import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

BUCKET_BYTES = 1 << 29
ALIGNMENT = 16
TRANSFER_TIMEOUT = timedelta(minutes=5)
"""For one broadcast; a receiver that died leaves the others waiting so long."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket; `start` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Runs of whole tensors, of any shape, that reach `limit` bytes each, in the order given; the last may be smaller.

    Reads ahead no further than the bucket that it gives, so what is gathered one by one is never there all at once.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        bucket[name] = tensor
        size += tensor.nbytes
        if size >= limit:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def pack(bucket: Mapping[str, Tensor]) -> tuple[tuple[Slot, ...], Tensor]:
    """(where each tensor lies, the bytes of all of them uint8 [n] on their device)."""
    slots, end = [], 0
    for name, tensor in bucket.items():
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(end, dtype=torch.uint8, device=next(iter(bucket.values())).device)
    for name, view in unpack(slots, flat).items():
        view.copy_(bucket[name].detach())
    return tuple(slots), flat


def unpack(slots: Iterable[Slot], flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a bucket, each of its slot's shape, as views of its bytes `flat`, uint8 [n]."""
    return {s.name: flat[s.start : s.start + s.size].view(s.dtype).view(s.shape) for s in slots}


def byte_count(slots: Iterable[Slot]) -> int:
    """Bytes of a bucket, with what alignment leaves empty."""
    return sum(-(-slot.size // ALIGNMENT) * ALIGNMENT for slot in slots)


class HostBucket(NamedTuple):
    """A bucket in host memory, in a form that passes between processes as it lies there: a tensor is pickled, copied
    and unpickled piece by piece.

    Attributes:
        slots: where each tensor lies.
        content: the bytes of all of them, uint8 [n].
    """

    slots: tuple[Slot, ...]
    content: np.ndarray


def to_host(bucket: Mapping[str, Tensor]) -> HostBucket:
    """A copy of tensors of any shape, of one device."""
    slots, flat = pack(bucket)
    return HostBucket(slots, flat.cpu().numpy())


def from_host(bucket: HostBucket, device: torch.device | str) -> dict[str, Tensor]:
    """The tensors, in their shapes, on a device. On the CPU they are the bucket's own memory, which is another process'
    too: nothing may be written to them."""
    with warnings.catch_warnings():  # torch says at the first of them that it cannot be written to
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(bucket.content)
    return unpack(bucket.slots, flat.to(device))


def export_handle(flat: Tensor) -> bytes:
    """A handle with which another process of this machine reads the same memory, as long as `flat`, of any shape, is
    kept alive."""
    settle(flat.device)
    if flat.device.type == "cpu":
        # The other strategy passes open files, and only among a process' own children.
        torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps(flat))


def open_handle(handle: bytes) -> Tensor:
    """What another process exported with `export_handle`, of that shape: its memory, no copy."""
    return pickle.loads(handle)


def settle(device: torch.device | str) -> None:
    """Wait for what the GPU is still to do: another process reads or reuses the memory next."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


class BroadcastGroup:
    """Processes that rank 0 broadcasts to, beside whatever process group each of them is in already.

    torch.distributed has one default group a process. The trainer's is the ranks' and vLLM-Omni makes one of its own,
    so this one is a bare backend on a store.

    Args:
        store: where the processes find each other.
        rank, size: this process, and how many there are.
        device: cuda is NCCL, cpu gloo.
    """

    def __init__(self, store: Store, rank: int, size: int, device: str):
        self.device = device
        self._backend: Any
        if device == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = TRANSFER_TIMEOUT
            self._backend = ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = ProcessGroupGloo(store, rank, size, TRANSFER_TIMEOUT)

    def broadcast(self, flat: Tensor) -> None:
        """Rank 0's `flat`, of one shape and format on all ranks, into everybody's."""
        options = BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([flat], options).wait()
        settle(self.device)

    def leave(self) -> None:
        """Give the connections up, also where others of the group are gone."""
        if self.device == "cuda":
            self._backend.abort()
