# SPDX-License-Identifier: Apache-2.0
"""How the metrics of an update's pieces become one number."""

import pytest

from models.training.micro_batches import WeightedMetrics


def test_metrics_are_averaged_by_the_samples_that_they_stand_for() -> None:
    metrics, others = WeightedMetrics(), WeightedMetrics()
    metrics.add({"loss": 1.0, "ratio/max": 7.0}, weight=3)
    metrics.add({"loss": 9.0, "ratio/max": 99.0}, weight=0)  # of no sample
    others.add({"loss": 5.0, "ratio/max": 2.0, "kl": 4.0}, weight=1)
    metrics.join(others)
    assert metrics.combined() == pytest.approx({"loss": 2.0, "ratio/max": 7.0, "kl": 4.0})
