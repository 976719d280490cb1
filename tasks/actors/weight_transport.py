# SPDX-License-Identifier: Apache-2.0
"""Weights that go from a trainer rank straight to rollout workers, `rollout.weight_transport`.

The sender calls each receiver for every bucket, and goes on when all have copied it; Ray carries the call, and the
bytes go by memory that both see (`ipc`) or by a broadcast (`collective`). Ray's own direct transports are not used: its
NCCL groups need CuPy, and its gloo groups take torch.distributed's default group, which the trainer's ranks have.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor
from torch.distributed import TCPStore

from models.rollout.engine import WeightLoad
from models.weights.buckets import (
    TRANSFER_TIMEOUT,
    BroadcastGroup,
    Slot,
    byte_count,
    export_handle,
    open_handle,
    pack,
    settle,
    unpack,
)
from models.weights.trainable import WeightSyncError
from tasks.actors.messages import Address
from tasks.actors.waiting import get


@dataclass(frozen=True)
class Parcel:
    """What a receiver is told of one bucket.

    Attributes:
        number: of the weights that it is part of, see `PolicyWeights`.
        index: its place among their buckets.
        slots: where its tensors lie.
        place: where the handle is valid, see `Courier.place`.
        handle: of the sender's memory; None where the bytes come by broadcast.
    """

    number: int
    index: int
    slots: tuple[Slot, ...]
    place: str
    handle: bytes | None


@dataclass(frozen=True)
class Route:
    """To whom a trainer rank sends, and how; nobody for a rank that only takes part in gathering."""

    transport: Literal["ipc", "collective"]
    receivers: tuple[ActorHandle, ...]


class Courier:
    """One process' end of the direct transports.

    Attributes:
        group_name: the broadcast group that this process is in; empty before the first and after a restart.
    """

    def __init__(self, device: str):
        self.device, self.group_name = device, ""
        self._group: BroadcastGroup | None = None
        self._store: TCPStore | None = None

    def place(self) -> str:
        """Where this process' memory can be read from by others: the machine, and on CUDA the GPU."""
        node = ray.get_runtime_context().get_node_id()
        if self.device != "cuda":
            return node
        return f"{node}/{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

    def open_group(self) -> Address:
        """Where a store is in this process, where the ranks of a new broadcast group meet; it is rank 0."""
        self._leave()
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TRANSFER_TIMEOUT)
        return Address(host, self._store.port)

    def join_group(self, name: str, address: Address, rank: int, size: int) -> None:
        """Become a rank of a broadcast group; returns when all have."""
        if rank:
            self._leave()
            self._store = TCPStore(address.host, address.port, is_master=False, timeout=TRANSFER_TIMEOUT)
        assert self._store is not None, "rank 0 has it of `open_group`"
        self._group, self.group_name = BroadcastGroup(self._store, rank, size, self.device), name

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self.group_name, self._group, self._store = "", None, None

    def send(self, number: int, index: int, bucket: Mapping[str, Tensor], route: "Route") -> None:
        """Returns when every receiver has taken the bucket, tensors of any shape; raises the error of one of them."""
        slots, flat = pack(bucket)
        handle = export_handle(flat) if route.transport == "ipc" else None
        parcel = Parcel(number, index, slots, self.place(), handle)
        taken = [worker.take.remote(parcel) for worker in route.receivers]
        if handle is None:
            assert self._group is not None, "`Routes` made the group"
            self._group.broadcast(flat)
        ray.get(taken)  # the memory behind the handle lives until here

    def receive(self, parcel: Parcel) -> dict[str, Tensor]:
        """The bucket's tensors, in their shapes: the sender's own memory, or this process' part of the broadcast.

        Raises:
            WeightSyncError: its bytes cannot reach this process.
        """
        if parcel.handle is not None:
            if parcel.place != self.place():
                raise WeightSyncError(
                    f"rollout.weight_transport is ipc, but trainer ({parcel.place}) and rollout ({self.place()}) see "
                    "no common memory: use object_store"
                )
            return unpack(parcel.slots, open_handle(parcel.handle))
        if self._group is None:
            raise WeightSyncError("a rollout worker was started again during a weight transfer")
        flat = torch.empty(byte_count(parcel.slots), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat)
        return unpack(parcel.slots, flat)


class Arrival:
    """Weights that are coming to a rollout worker, bucket by bucket."""

    def __init__(self, number: int, load: WeightLoad, device: str):
        self._number, self._load, self._device, self._buckets = number, load, device, 0

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """The next bucket, tensors of whole shape; it is copied when this returns."""
        self._load.take(weights)
        settle(self._device)
        self._buckets += 1

    def finish(self, number: int, buckets: int) -> bool:
        """Are these the weights of that number, with all their buckets? Then the engine has them now."""
        if not buckets:
            raise WeightSyncError("the trainer sent none of its weights")
        if (self._number, self._buckets) != (number, buckets):
            return False
        self._load.finish()
        return True


class Routes:
    """The driver's part: which rank sends to which workers.

    Args:
        ranks: the trainer's actors. They and the workers have a `courier`.
    """

    def __init__(self, ranks: Sequence[ActorHandle]):
        self._ranks, self._numbers = ranks, itertools.count(1)

    def to(self, workers: Sequence[ActorHandle], transport: Literal["ipc", "collective"]) -> list[Route]:
        """The route of each rank, found out anew for every transfer: a worker may have been started again since.

        Raises:
            WeightSyncError: a worker sees no rank's memory.
        """
        if transport == "ipc":
            return [Route(transport, tuple(near)) for near in self._by_place(workers)]
        self._join(workers)
        return [Route(transport, tuple(workers)), *(Route(transport, ()) for _ in self._ranks[1:])]

    def _by_place(self, workers: Sequence[ActorHandle]) -> list[list[ActorHandle]]:
        routes: list[list[ActorHandle]] = [[] for _ in self._ranks]
        places = _of_all([*self._ranks, *workers], _place)
        ranks, others = places[: len(self._ranks)], places[len(self._ranks) :]
        for number, (worker, place) in enumerate(zip(workers, others, strict=True)):
            near = [rank for rank, its_place in enumerate(ranks) if its_place == place]
            if not near:
                raise WeightSyncError(
                    f"rollout.weight_transport is ipc, but no trainer rank is where rollout worker {number} is "
                    f"({place}; the ranks are at {', '.join(sorted(set(ranks)))}): use object_store"
                )
            routes[min(near, key=lambda rank: len(routes[rank]))].append(worker)
        return routes

    def _join(self, workers: Sequence[ActorHandle]) -> None:
        """Rank 0 and the workers are in one broadcast group: the last one, if nobody was started again since."""
        members: list[Any] = [self._ranks[0], *workers]
        names = set(_of_all(members, _group_name))
        if len(names) == 1 and "" not in names:
            return
        address: Address = get(members[0].__ray_call__.remote(_open_group))
        name = f"group-{next(self._numbers)}"
        get(
            [
                member.__ray_call__.remote(_join_group, name, address, rank, len(members))
                for rank, member in enumerate(members)
            ]
        )


def _of_all(actors: Sequence[ActorHandle], ask: Callable[[Any], str]) -> list[str]:
    return get([actor.__ray_call__.remote(ask) for actor in actors])


def _place(actor: Any) -> str:
    return actor.courier.place()


def _group_name(actor: Any) -> str:
    return actor.courier.group_name


def _open_group(actor: Any) -> Address:
    return actor.courier.open_group()


def _join_group(actor: Any, *arguments: Any) -> None:
    actor.courier.join_group(*arguments)
