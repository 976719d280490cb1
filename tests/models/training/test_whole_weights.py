# SPDX-License-Identifier: Apache-2.0
"""Weights that ranks share, in their whole shape, in as few exchanges as they fit into."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from models.training import whole_weights as module
from models.training.whole_weights import whole_weights
from tests.support.helpers import gloo_world, single_rank

SHAPES = {"even": (4, 3), "odd": (5, 3), "one_row": (1, 2), "flat": (7,), "deep": (3, 2, 2, 2)}
"""Of three ranks one has fewer rows, one none."""


def drawn() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def gathered(rank: int, limit: int | None) -> tuple[dict[str, Tensor], int]:
    """All weights as each rank has them in the end, and its exchanges; bf16 ones, one that all have and one by columns
    are among them."""
    if limit is not None:
        module.AT_ONCE = limit
    mesh = init_device_mesh("cpu", (3,))
    shards: dict[str, Tensor] = {
        name: nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for name, weight in drawn().items()
    }
    shards["bf16"] = distribute_tensor(drawn()["odd"].bfloat16(), mesh, [Shard(0)])
    shards["everywhere"] = distribute_tensor(drawn()["even"], mesh, [Replicate()])
    shards["columns"] = distribute_tensor(drawn()["even"], mesh, [Shard(1)])
    shards["plain"] = drawn()["flat"]
    with CommDebugMode() as counted:
        whole = dict(whole_weights(shards))
    return whole, sum(counted.get_comm_counts().values())


@pytest.mark.parametrize(("limit", "exchanges"), [(None, 3), (100, 5), (0, 7)], ids=["at_once", "in_groups", "each"])
def test_every_rank_has_every_weight_bit_for_bit(limit: int | None, exchanges: int, tmp_path: Path) -> None:
    """One exchange for the five of fp32, one for that of bf16, one for the columns."""
    expected = drawn()
    expected |= {"bf16": expected["odd"].bfloat16(), "everywhere": expected["even"], "columns": expected["even"]}
    expected["plain"] = expected["flat"]
    for whole, counted in gloo_world(gathered, 3, tmp_path / "world", limit):
        assert [*whole] == [*expected], "in the order given, which digests and buckets are in"
        for name, weight in expected.items():
            assert torch.equal(whole[name], weight), name
            assert whole[name].dtype == weight.dtype
            assert not whole[name].requires_grad
            assert whole[name].is_contiguous()
        assert counted == exchanges


def test_a_lone_rank_hands_out_what_it_has() -> None:
    with single_rank():
        mesh = init_device_mesh("cpu", (1,))
        shards = {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in drawn().items()}
        with CommDebugMode() as counted:
            whole = dict(whole_weights(shards))
        assert sum(counted.get_comm_counts().values()) == 0
        for name, shard in shards.items():
            assert whole[name].data_ptr() == shard.to_local().data_ptr(), "nothing is copied"
