# SPDX-License-Identifier: Apache-2.0
"""What surrounds a recording: kinds of input, buffers, weights that must stay. tests/gpu has the recordings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime.cuda_graphs import KEPT, CudaGraphs
from tasks.config.rollout import DiffusionRolloutConfig
from tests.support.helpers import model_config


class Rewriting:
    """Has of a CUDA graph that a replay reads where the inputs lay, and rewrites one and the same output."""

    def __init__(self) -> None:
        self.made = self.replayed = self.begun = 0

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.made += 1
        with torch.no_grad():
            output = function()

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                output[0].copy_(function()[0])

        return replay, output

    def begin_anew(self) -> None:
        self.begun += 1


class Net(nn.Module):
    """Counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, tensor: Tensor, sign: int = 1, shapes: list[int] | None = None) -> tuple[Tensor]:
        self.calls += 1
        return (sign * self.layer(tensor),)


@torch.no_grad()
def test_a_kind_of_input_is_recorded_once_and_replayed_with_other_values() -> None:
    net, plain, recorder = Net(), Net(), Rewriting()
    plain.load_state_dict(net.state_dict())
    graphs = CudaGraphs(net, recorder)
    inputs = [torch.randn(2, 3) for _ in range(4)]
    outputs = [net(tensor, shapes=[1, 2])[0] for tensor in inputs]
    assert (recorder.made, recorder.replayed) == (1, 4)
    for tensor, output in zip(inputs, outputs, strict=True):  # none was overwritten by a later call
        assert torch.equal(output, plain(tensor)[0])
    kinds: list[tuple[Tensor, dict[str, Any]]] = [
        (torch.randn(5, 3), {}),
        (torch.randn(3, 2).T, {}),
        (torch.randn(2, 3), {"sign": -1}),
        (torch.randn(2, 3), {"shapes": [2, 1]}),
    ]
    for number, (tensor, named) in enumerate(kinds, 2):
        assert torch.equal(net(tensor, **named)[0], plain(tensor, **named)[0])
        assert torch.equal(net(tensor + 1, **named)[0], plain(tensor + 1, **named)[0])
        assert recorder.made == len(graphs) == number


@torch.no_grad()
def test_the_least_used_graph_goes_first() -> None:
    net, recorder = Net(), Rewriting()
    graphs = CudaGraphs(net, recorder)
    for rows in range(1, KEPT + 1):
        net(torch.ones(rows, 3))
    net(torch.ones(1, 3))
    net(torch.ones(KEPT + 1, 3))
    assert len(graphs) == KEPT
    net(torch.ones(1, 3))
    assert recorder.made == KEPT + 1
    net(torch.ones(2, 3))
    assert recorder.made == KEPT + 2


def test_new_weights_are_read_where_the_old_ones_lay_and_a_move_is_refused() -> None:
    net, recorder = Net(), Rewriting()
    graphs = CudaGraphs(net, recorder)
    given = torch.ones(2, 3)
    with torch.no_grad():
        net(given)
        net.layer.weight.add_(1)
        assert torch.equal(net(given)[0], net.layer(given))
        net.layer.weight.data = net.layer.weight.data.clone()
        for tensor in (given, torch.ones(4, 3)):
            with pytest.raises(RuntimeError, match=r"lie elsewhere .* call drop\(\) before"):
                net(tensor)
        graphs.drop()
        assert (len(graphs), recorder.begun) == (0, 1)
        assert torch.equal(net(given)[0], net.layer(given))
    assert net(given)[0].requires_grad
    assert recorder.made == 2


@torch.no_grad()
def test_a_replay_that_computes_something_else_is_refused() -> None:
    class Wrong(Rewriting):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
            replay, output = super().record(function)

            def wrong() -> None:
                replay()
                output[0].add_(1e-6)

            return wrong, output

    net = Net()
    graphs = CudaGraphs(net, Wrong())
    with pytest.raises(RuntimeError, match=r"rollout.cuda_graphs: .* another policy .* set it to false"):
        net(torch.ones(2, 3))
    assert len(graphs) == 0


@torch.no_grad()
def test_a_forward_that_cannot_be_recorded_says_what_to_do() -> None:
    class Refusing(Rewriting):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
            raise RuntimeError("operation not permitted when stream is capturing")

    net = Net()
    CudaGraphs(net, Refusing())
    with pytest.raises(RuntimeError, match=r"cannot be recorded.*set it to false \(operation not permitted"):
        net(torch.ones(2, 3))


def test_they_are_refused_where_there_is_no_gpu_and_beside_another_engine(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.cuda_graphs is true, but the rollout's device is cpu"):
        DiffusersRolloutEngine(model_config(tiny_model), "cpu", cuda_graphs=True)
    with pytest.raises(ValidationError, match=r"cuda_graphs is true, but rollout.name is vllm_omni"):
        DiffusionRolloutConfig(name="vllm_omni", cuda_graphs=True)
