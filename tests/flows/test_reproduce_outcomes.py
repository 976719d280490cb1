# SPDX-License-Identifier: Apache-2.0
"""How two runs' metrics compare, and how far a run may be shortened. Whole runs: `platform/test_reproduce.py`."""

import pytest

from flows.reproduce import compare_metrics, shortened
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig


def test_outcomes_metric_by_metric() -> None:
    old = {
        "same": {1: 0.1, 2: 0.2, 3: 9.0},
        "near": {1: 1000.0},
        "far": {1: 1.0},
        "gone": {1: 1.0, 2: 1.0},
        "nan": {1: float("nan")},
        "late": {3: 1.0},
        "timing_s/step": {1: 5.0},
    }
    new = {"same": {1: 0.1, 2: 0.2}, "near": {1: 1000.001}, "far": {1: 1.1}, "gone": {1: 1.0}, "nan": {1: float("nan")}}
    found = {outcome.metric: outcome.outcome for outcome in compare_metrics(old, new, 2, 1e-5)}
    assert found == {
        "same": "equal",
        "near": "within tolerance",
        "far": "different",
        "gone": "different",
        "nan": "equal",
    }


def test_a_run_that_paces_itself_by_its_length_is_done_again_whole() -> None:
    window = {"rollout": {"algo": {"sde_window_mode": "decay", "sde_window_size": 2}}}
    schedule = {"actor": {"optim": {"lr_scheduler_type": "linear"}}}
    for policy, paced in ((window, "sde_window_mode decay"), (schedule, "lr_scheduler_type linear")):
        config = TrainConfig.model_validate({"actor_rollout_ref": policy}).model_dump(mode="json")
        assert shortened(config, 100, "again")["trainer"]["experiment_name"] == "again"
        with pytest.raises(ConfigError, match=f"{paced} paces itself by the run's length: iterations must be all 100"):
            shortened(config, 3, "again")
    with pytest.raises(ConfigError, match="give 1 to 100"):
        shortened(config, 101, "again")
