# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files are read to the bit, no more of them than a rank has, and not where they are damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.training import checkpoint
from models.training.checkpoint import HostCopy, StateReader, StateWriter
from tests.support.helpers import gloo_world, single_rank

ROWS, COLUMNS = 12000, 500
NAN_BITS = torch.tensor([0x7FC00001, 0x7FA00002, -1], dtype=torch.int32)
STATES: dict[str, Callable[[], Any]] = {
    "fp32": lambda: torch.randn(30, 7),
    "bf16": lambda: torch.randn(30, 7).bfloat16(),
    "whole numbers": lambda: torch.arange(11),
    "one number": lambda: torch.tensor(3.5),
    "nothing": lambda: torch.zeros(0, 4),
    "bits that are no number": lambda: NAN_BITS.view(torch.float32).clone(),
    "other order": lambda: torch.randn(4, 6).t(),
    "part of another": lambda: torch.randn(4, 6)[1:3],
    "an object": lambda: "constant",
}


def bits(value: Any) -> Any:
    return value.contiguous().flatten().view(torch.uint8).tolist() if isinstance(value, Tensor) else value


def read_into(folder: Path, target: dict[str, Any], reader: Callable[[Path], dcp.FileSystemReader]) -> dict[str, Any]:
    dcp.load(target, storage_reader=reader(folder))
    return target


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.full_like(value, 7) if isinstance(value, Tensor) else None for name, value in state.items()}


@pytest.mark.parametrize(("piece", "small"), [(8, 0), (checkpoint.PIECE_BYTES, 0), (8, checkpoint.SMALL_BYTES)])
def test_what_was_written_is_read_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, small: int
) -> None:
    """Also what takes several reads, and into memory that lies otherwise."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", piece)
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", small)
    state = {name: make() for name, make in STATES.items()}
    with single_rank():
        dcp.save(state, storage_writer=StateWriter(tmp_path))
        found = read_into(tmp_path, blank(state), StateReader)
        assert {name: bits(value) for name, value in found.items()} == {name: bits(v) for name, v in state.items()}
        turned = {"fp32": torch.zeros(7, 30).t(), "bf16": torch.zeros(30, 7)}
        read_into(tmp_path, turned, StateReader)
    assert torch.equal(turned["fp32"], state["fp32"])
    assert torch.equal(turned["bf16"], state["bf16"].float())


def whole_tensors() -> dict[str, Tensor]:
    """Of two formats, and a small one of fewer rows than ranks."""
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return {"weight": drawn, "moment": drawn.bfloat16(), "few": drawn[:2].clone()}


def sharded(tensors: dict[str, Tensor], ranks: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def written_by(rank: int, ranks: int, folder: Path) -> None:
    dcp.save(sharded(whole_tensors(), ranks), storage_writer=StateWriter(folder))


def read_by(rank: int, ranks: int, folder: Path) -> tuple[dict[str, Tensor], int, int]:
    """What a rank has after reading, how many bytes that are, and how many it read."""
    target = sharded({name: torch.zeros_like(whole) for name, whole in whole_tensors().items()}, ranks)
    before = bytes_read()
    dcp.load(target, storage_reader=StateReader(folder))
    read = bytes_read() - before
    local = {name: tensor.to_local() for name, tensor in target.items()}
    return local, sum(tensor.nbytes for tensor in local.values()), read


def bytes_read() -> int:
    """By this process's threads, from wherever."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (1, 3), (3, 1)])
def test_any_number_of_ranks_reads_its_part_and_no_more(tmp_path: Path, writers: int, readers: int) -> None:
    """A rank that has a third of a tensor does not read the rest for it."""
    gloo_world(written_by, writers, tmp_path / "writing", writers, tmp_path / "state")
    found = gloo_world(read_by, readers, tmp_path / "reading", readers, tmp_path / "state")
    for name, whole in whole_tensors().items():
        assert bits(torch.cat([local[name] for local, _, _ in found])) == bits(whole)
    for _, has, read in found:
        assert has <= read < has + 2**18


def cut_off(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)


def without_a_head(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - 100)
        stream.write(bytes(100))


def garbled(file: Path) -> None:
    """What says of which kind the tensor is."""
    content = file.read_bytes()
    assert content.count(b"FloatStorage") == 1
    file.write_bytes(content.replace(b"FloatStorage", b"F\xffoatStorage"))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (cut_off, "0_0.distcp is damaged or cut off"),
        (without_a_head, "0_0.distcp is damaged or cut off"),
        (garbled, "0_0.distcp is damaged or cut off"),
        (Path.unlink, "No such file or directory: .*0_0.distcp"),
    ],
)
def test_a_file_that_a_rank_cannot_read_is_named(tmp_path: Path, harm: Callable[[Path], None], told: str) -> None:
    """As where a machine sees other files than the one that has checked their digests."""
    state = {"weight": torch.randn(1000, 300)}
    with single_rank():
        dcp.save(state, storage_writer=StateWriter(tmp_path))
        harm(tmp_path / "__0_0.distcp")
        with pytest.raises(CheckpointException, match=told):
            read_into(tmp_path, blank(state), StateReader)


def test_a_file_that_is_cut_off_meanwhile_leaves_no_half_read_weights(tmp_path: Path) -> None:
    """Its archive was whole when it was looked at."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(100))
    with file.open("rb", buffering=0) as stream, pytest.raises(OSError, match="weights is cut off within a tensor"):
        checkpoint._fill(torch.zeros(26), stream)


def test_a_later_copy_takes_the_memory_of_the_first_one() -> None:
    """Of sharded tensors and whole ones; what is beside them may change its keys."""
    copies = HostCopy()
    with single_rank():

        def state(value: float, **extra: Any) -> dict[str, Any]:
            weights = {"weight": torch.full((5, 3), value), "bias": torch.tensor(value)}
            return {
                "model": sharded({"weight": weights["weight"]}, 1),
                "optimizer": {"state": weights, "param_groups": [{"lr": value}]},
                "extra": extra,
            }

        first = copies.stage(state(1.0, steps=1))
        places = {leaf.data_ptr() for leaf in leaves(first)}
        now = state(2.0, steps=2, more=torch.ones(2))
        second = copies.stage(now)
        assert [bits(leaf) for leaf in leaves(second)] == [bits(leaf) for leaf in leaves(now)]
        assert {leaf.data_ptr() for leaf in leaves(second)} == places
        assert not places & {leaf.data_ptr() for leaf in leaves(now)}
    assert (first["extra"], second["extra"]["steps"], second["extra"]["more"].tolist()) == ({"steps": 1}, 2, [1, 1])
    assert second["optimizer"]["param_groups"] == [{"lr": 2.0}]


def leaves(state: dict[str, Any]) -> list[Tensor]:
    return [state["model"]["weight"].to_local(), *state["optimizer"]["state"].values()]
