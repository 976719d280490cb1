# SPDX-License-Identifier: Apache-2.0
"""How fast is a checkpoint copied, written beside an iteration that trains, digested and read, torch's way and ours?

    python -m benchmarks.checkpoints [--gib 4] [--columns 1536] [--turns 4] [--folder build/checkpoints]

`dcp.async_save` of random sharded tensors to the folder, which should be in memory (/dev/shm) where the disk is not
what is asked about, and `dcp.load` into tensors that are there. A tensor has 3072 rows: 18 MiB with 1536 columns (a
square weight of Stable Diffusion 3.5 or a half of Qwen-Image's). While it is written the main thread makes small
operations one after the other, as one that hands kernels to a GPU does. The file is digested twice, as those of two
ranks are: one after the other, and side by side. Prints a line a turn; the ways take turns.
"""

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from models.training.checkpoint import EXTRA, HostCopy, StateReader, StateWriter
from tasks.system.files import sha256_of, sha256_of_each
from tasks.system.ports import free_port

ROWS = 3072
GIB = 2**30


class Way(NamedTuple):
    """What copies, writes, digests and reads a checkpoint; the copies' memory is kept by who copies or by nobody."""

    copies: BlockingAsyncStager
    writer: Callable[[Path], dcp.FileSystemWriter]
    digests: Callable[[list[Path]], list[str]]
    reader: Callable[[Path], dcp.FileSystemReader]


class Turn(NamedTuple):
    """One checkpoint.

    Attributes:
        copied: GiB a second, to host memory; training waits for it.
        copy_new: GiB of memory that is touched for the first time then, for each GiB.
        written: GiB a second.
        operations: that the main thread made meanwhile, a second.
        longest_ms: of them.
        digested: GiB a second.
        read: GiB a second.
        read_new: as `copy_new`.
    """

    copied: float
    copy_new: float
    written: float
    operations: float
    longest_ms: float
    digested: float
    read: float
    read_new: float


class Spent(NamedTuple):
    """Seconds, and GiB of memory that was touched for the first time."""

    seconds: float
    new: float


def spent(work: Callable[[], object]) -> Spent:
    """By a call."""
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Spent(seconds, pages * resource.getpagesize() / GIB)


def small_operations(until: Future) -> tuple[int, float]:
    """How many the main thread makes, and the seconds of the longest."""
    made, longest, small = 0, 0.0, torch.zeros(64)
    while not until.done():
        start = time.perf_counter()
        small.add_(1)
        longest, made = max(longest, time.perf_counter() - start), made + 1
    return made, longest


def turn(state: dict[str, Any], target: dict[str, Any], way: Way, folder: Path) -> Turn:
    """A checkpoint that is written behind small operations, and read."""
    gib = sum(tensor.to_local().nbytes for tensor in state["model"].values()) / GIB
    writing: list[Future] = []

    def begin() -> None:
        saved = dcp.async_save(state, storage_writer=way.writer(folder), async_stager=way.copies)
        writing.append(cast(Future, saved))

    copy, start = spent(begin), time.perf_counter()
    made, longest = small_operations(writing[0])
    writing[0].result()
    seconds = time.perf_counter() - start
    files = 2 * list(folder.glob("*.distcp"))
    digested = spent(lambda: way.digests(files))
    read = spent(lambda: dcp.load(target, storage_reader=way.reader(folder)))
    speeds = (gib / copy.seconds, copy.new / gib, gib / seconds, made / seconds, 1e3 * longest)
    return Turn(*speeds, len(files) * gib / digested.seconds, gib / read.seconds, read.new / gib)


def one_by_one(files: list[Path]) -> list[str]:
    """Digests of files in one thread."""
    return [sha256_of(file) for file in files]


def state_of(gib: float, columns: int, make: Callable[[int, int], Tensor]) -> dict[str, Any]:
    """So many GiB of sharded tensors [3072, columns] fp32, and what is beside them."""
    shards = init_device_mesh("cpu", (1,))
    count = round(gib * GIB / (4 * ROWS * columns))
    weights = {f"weight {n}": distribute_tensor(make(ROWS, columns), shards, [Shard(0)]) for n in range(count)}
    return {"model": weights, EXTRA: {"step": 1}}


def main() -> None:
    """Print each turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--columns", type=int, default=1536)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoints"))
    chosen = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    state, target = (state_of(chosen.gib, chosen.columns, make) for make in (torch.randn, torch.zeros))
    ways = {
        "torch's": Way(BlockingAsyncStager(), dcp.FileSystemWriter, one_by_one, dcp.FileSystemReader),
        "ours": Way(HostCopy(), StateWriter, sha256_of_each, StateReader),
    }
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(chosen.turns):
        for name, way in ways.items():
            shutil.rmtree(chosen.folder, ignore_errors=True)
            found[name].append(turn(state, target, way, chosen.folder))
            print(name, *(f"{field} {value:.2f}" for field, value in found[name][-1]._asdict().items()), flush=True)
    shutil.rmtree(chosen.folder, ignore_errors=True)
    for field in Turn._fields:
        medians = {name: statistics.median(getattr(one, field) for one in turns) for name, turns in found.items()}
        print("median", field, *(f"{name} {value:.2f}" for name, value in medians.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
