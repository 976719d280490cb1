# SPDX-License-Identifier: Apache-2.0
"""How the metrics of an update's pieces become one number."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.training.micro_batches import WeightedMetrics


def test_metrics_are_averaged_by_the_samples_that_they_stand_for() -> None:
    metrics, others = WeightedMetrics(), WeightedMetrics()
    metrics.add({"loss": 1.0, "ratio/max": 7.0}, weight=3)
    metrics.add({"loss": 9.0, "ratio/max": 99.0}, weight=0)  # of no sample
    others.add({"loss": 5.0, "ratio/max": 2.0, "kl": 4.0}, weight=1)
    metrics.join(others)
    assert metrics.combined() == pytest.approx({"loss": 2.0, "ratio/max": 7.0, "kl": 4.0})


class Reads(TorchDispatchMode):
    """Counts numbers that are read from a tensor one by one, each of which waits for the GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_metrics_of_a_pass_are_not_read_before_the_last() -> None:
    metrics, plain = WeightedMetrics(), WeightedMetrics()
    generator = torch.Generator().manual_seed(0)
    with Reads() as reads:
        for weight in range(1, 5):
            of_pass = {
                "loss": torch.randn((), generator=generator, requires_grad=True),
                "error": torch.randn(1, generator=generator, dtype=torch.float64),
                "deviation/max": torch.rand((), generator=generator).bfloat16(),
                "share": 0.25 * weight,
            }
            metrics.add(of_pass, weight)
            assert reads.count == 0
            plain.add({name: float(value) for name, value in of_pass.items()}, weight)
            reads.count = 0
    assert metrics.combined() == plain.combined()
