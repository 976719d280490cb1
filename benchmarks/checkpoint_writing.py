# SPDX-License-Identifier: Apache-2.0
"""How fast is a checkpoint written beside an iteration that trains, by torch's own writer and by ours?

    python -m benchmarks.checkpoint_writing [--gib 4] [--turns 4] [--folder build/checkpoint_writing]

`dcp.async_save` of random tensors of 18 MiB (a square weight of Stable Diffusion 3.5 or a half of Qwen-Image's) to the
folder, which should be in memory (/dev/shm) where the disk is not what is asked about. Meanwhile the main thread makes
small operations one after the other, as one that hands kernels to a GPU does. Prints a line a turn; the writers take
turns.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.local_services import free_port
from models.training.checkpoint import StateWriter

SHAPE = (3072, 1536)
WRITERS: dict[str, Callable[[Path], dcp.FileSystemWriter]] = {"torch's": dcp.FileSystemWriter, "ours": StateWriter}


class Turn(NamedTuple):
    """One checkpoint.

    Attributes:
        gib_s: written a second, the copy to host memory before it left out.
        operations_s: that the main thread made meanwhile, a second.
        longest_ms: of them.
    """

    gib_s: float
    operations_s: float
    longest_ms: float


def write(state: dict[str, Tensor], writer: dcp.FileSystemWriter) -> Turn:
    """Of a checkpoint that is written behind small operations."""
    writing = cast(Future, dcp.async_save(state, storage_writer=writer))
    began, made, longest, small = time.perf_counter(), 0, 0.0, torch.zeros(64)
    while not writing.done():
        start = time.perf_counter()
        small.add_(1)
        longest, made = max(longest, time.perf_counter() - start), made + 1
    writing.result()
    seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for tensor in state.values()) / 2**30
    return Turn(size / seconds, made / seconds, 1e3 * longest)


def main() -> None:
    """Print each turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoint_writing"))
    chosen = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    count = round(chosen.gib * 2**30 / (4 * SHAPE[0] * SHAPE[1]))
    state = {f"weight {number}": torch.randn(SHAPE) for number in range(count)}
    found: dict[str, list[Turn]] = {name: [] for name in WRITERS}
    for _ in range(chosen.turns):
        for name, kind in WRITERS.items():
            shutil.rmtree(chosen.folder, ignore_errors=True)
            found[name].append(write(state, kind(chosen.folder)))
            print(name, *(f"{field} {value:.2f}" for field, value in found[name][-1]._asdict().items()), flush=True)
    shutil.rmtree(chosen.folder, ignore_errors=True)
    speeds = {name: statistics.median(turn.gib_s for turn in turns) for name, turns in found.items()}
    print("medians, GiB/s:", {name: round(speed, 2) for name, speed in speeds.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
