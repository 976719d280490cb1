# SPDX-License-Identifier: Apache-2.0
"""perf/throughput is per GPU, of all that a run holds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.train import _time_metrics
from tasks.config.recipes import load_recipe
from tasks.system.stopwatch import Stopwatch

PREFECT_YAML = Path(__file__).parents[2] / "prefect.yaml"
COLOCATED = {"actor_rollout_ref": {"rollout": {"placement": "colocated", "num_actors": 4}}}
SCORED_ON_GPUS = {"reward": {"functions": {"pickscore": {"num_workers": 4, "num_gpus": 0.5}}}}


@pytest.mark.parametrize(
    ("recipe", "changes", "gpus"),
    [
        ("qwen-image-ocr-flow-grpo", {}, 4 + 4),
        ("qwen-image-ocr-flow-grpo", COLOCATED, 4),
        ("qwen-image-ocr-flow-grpo", SCORED_ON_GPUS, 4 + 4 + 2),
        ("quickstart", {}, 2),
        ("quickstart", SCORED_ON_GPUS, 2),
    ],
)
def test_pictures_a_second_are_shared_among_all_gpus_or_on_the_cpu_the_ranks(
    recipe: str, changes: dict[str, Any], gpus: float
) -> None:
    config = load_recipe(recipe, PREFECT_YAML).with_changes(changes)
    run: Any = SimpleNamespace(config=config, spent={})
    metrics = _time_metrics(run, Stopwatch(), images=512)
    assert metrics["perf/throughput"] * metrics["perf/time_per_step"] == pytest.approx(512 / gpus)
