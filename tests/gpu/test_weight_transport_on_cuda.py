# SPDX-License-Identifier: Apache-2.0
"""Weights between processes on CUDA: the trainer's own memory on one GPU, NCCL between two. Prints seconds a GiB.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu/test_weight_transport_on_cuda.py -s`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from models.weights.buckets import BroadcastGroup, buckets, byte_count, export_handle, open_handle, pack, settle, unpack
from tests.support.helpers import gloo_world
from tests.support.weight_actors import assert_equal, pictures, started

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

GIB = 2**30
ROUNDS = 4


def weights(device: str) -> dict[str, Tensor]:
    """One GiB of fp32, and of bf16 a bit, in matrices and vectors."""
    generator = torch.Generator(device).manual_seed(0)
    large = {f"w{i}": torch.randn(4096, 4096, device=device, generator=generator) for i in range(16)}
    return large | {f"b{i}": torch.randn(4097, device=device, generator=generator).bfloat16() for i in range(16)}


def checksum(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in tensors.items()}


def copy_from_handles(handles: Any, answers: Any) -> None:
    """Another process: copies what each handle names, and says so."""
    own: dict[str, Tensor] = {}
    while (parcel := handles.get()) is not None:
        slots, handle = parcel
        for name, tensor in unpack(slots, open_handle(handle)).items():
            own[name] = own[name].copy_(tensor) if name in own else tensor.clone()
        del tensor
        settle("cuda")
        answers.put(None)
    answers.put(checksum(own))


def timed(what: str, transfer: Callable[[], None]) -> None:
    """The first round opens memory and connections."""
    for number in range(ROUNDS):
        start = time.perf_counter()
        transfer()
        print(f"{what}, round {number + 1}: {time.perf_counter() - start:.4f} s a GiB")


def test_a_process_on_the_same_gpu_copies_the_senders_memory() -> None:
    context = mp.get_context("spawn")
    handles, answers, given = context.Queue(), context.Queue(), weights("cuda")
    receiver = context.Process(target=copy_from_handles, args=(handles, answers))
    receiver.start()

    def transfer() -> None:
        for bucket in buckets(given.items()):
            slots, flat = pack(bucket)
            handles.put((slots, export_handle(flat)))
            answers.get(timeout=120)

    try:
        timed("ipc", transfer)
        handles.put(None)
        assert answers.get(timeout=120) == checksum(given)
    finally:
        receiver.join(30)
        receiver.kill()
    assert torch.cuda.memory_allocated() < 1.2 * GIB, "no bucket is kept"


def broadcast_between(rank: int, port_file: Path) -> dict[str, float]:
    """A rank of a broadcast group beside the default group that it is in already."""
    torch.cuda.set_device(rank)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.1)
        store = TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)
    group = BroadcastGroup(PrefixStore("weights", store), rank, 2, "cuda")
    given, device = weights(f"cuda:{rank}"), f"cuda:{rank}"
    own = {name: tensor if rank == 0 else torch.zeros_like(tensor) for name, tensor in given.items()}

    def transfer() -> None:
        for bucket in buckets(own.items()):
            slots, flat = pack(bucket)
            received = flat if rank == 0 else torch.empty(byte_count(slots), dtype=torch.uint8, device=device)
            group.broadcast(received)
            for name, tensor in unpack(slots, received).items():
                own[name].copy_(tensor)
        settle("cuda")

    timed(f"nccl, rank {rank}", transfer)
    assert rank == 0 or checksum(own) == checksum(given)
    return checksum(own)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; there are fewer here")
def test_nccl_broadcasts_to_a_process_on_another_gpu(tmp_path: Path) -> None:
    sender, receiver = gloo_world(broadcast_between, 2, tmp_path / "world", tmp_path / "port")
    assert sender == receiver


@pytest.mark.parametrize(("transport", "gpus"), [("ipc", 1), ("collective", 2)])
def test_a_rollout_worker_gets_the_trainers_bits(tiny_model: Path, tmp_path: Path, transport: str, gpus: int) -> None:
    """One rank and one worker; the worker dies once, and comes back to the weights and to the next sync."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{transport} needs {gpus} CUDA devices; there are {torch.cuda.device_count()} here")
    with started(tiny_model, tmp_path, device="cuda", ranks=1, workers=1, colocated=gpus == 1) as actors:
        for _ in range(2):
            synced, group = actors.sync(transport)
            assert synced.agreement.difference == 0.0
            assert_equal(actors.held())
        before = pictures(group)
        ray.kill(actors.rollout.group.actors[0], no_restart=False)
        assert np.array_equal(pictures(group), before)
        actors.sync(transport)
        assert_equal(actors.held())
