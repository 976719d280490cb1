# SPDX-License-Identifier: Apache-2.0
"""A step over a rank's parts is AdamW's step over the weights."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.training.adamw import MOMENTS, LocalAdamW, allocate_adam_state
from tests.support.helpers import single_rank

SHAPES = ((5, 3), (4,), (1, 2))
WHOLE = 1
"""The number of the weight that is not sharded."""
STEPS = 3


def gradients(number: int) -> list[Tensor]:
    """Of a step; the last weight gets none at the first."""
    generator = torch.Generator().manual_seed(number)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return found if number else found[:-1]


def weights(mesh: DeviceMesh | None = None) -> list[nn.Parameter]:
    """The same ones, all but one of them sharded over a mesh."""
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if mesh is not None:
        values = [v if i == WHOLE else distribute_tensor(v, mesh, [Shard(0)]) for i, v in enumerate(values)]
    return [nn.Parameter(value) for value in values]


def train(optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter], mesh: DeviceMesh | None = None) -> None:
    """Some steps, each with gradients of its own."""
    for number in range(STEPS):
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients(number), strict=False)):
            parameter.grad = gradient if mesh is None or i == WHOLE else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_weights_and_moments_are_those_of_whole_weights(way: dict[str, bool]) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2} | way
    expected = weights()
    reference = torch.optim.AdamW(expected, **settings)
    train(reference, expected)
    with single_rank():
        mesh = init_device_mesh("cpu", (1,))
        parameters = weights(mesh)
        optimizer = LocalAdamW(parameters, **settings)
        allocate_adam_state(optimizer)
        train(optimizer, parameters, mesh)
        for i, (parameter, wanted) in enumerate(zip(parameters, expected, strict=True)):
            held = [parameter, *(optimizer.state[parameter][name] for name in MOMENTS)]
            assert all(isinstance(one, DTensor) == (i != WHOLE) for one in held), "a checkpoint would not see shards"
            found = [one.full_tensor() if isinstance(one, DTensor) else one for one in held]
            for one, other in zip(found, [wanted, *(reference.state[wanted][name] for name in MOMENTS)], strict=True):
                assert torch.equal(one, other)
            assert optimizer.state[parameter]["step"] == reference.state[wanted]["step"]


def test_a_state_that_was_saved_by_several_kernels_goes_on_in_one() -> None:
    """As a checkpoint of an earlier version does, whose numbers of steps were on the CPU."""
    saved, loaded = weights(), weights()
    several, one = torch.optim.AdamW(saved, lr=0.1), LocalAdamW(loaded, lr=0.1, fused=True)
    allocate_adam_state(one)
    train(several, saved)
    one.load_state_dict(copy.deepcopy(several.state_dict()))
    assert [group["fused"] for group in one.param_groups] == [True]
    with torch.no_grad():
        for mine, other in zip(loaded, saved, strict=True):
            mine.copy_(other)
    train(several, saved)
    train(one, loaded)
    for mine, other in zip(loaded, saved, strict=True):
        torch.testing.assert_close(mine, other)
