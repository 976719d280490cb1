# SPDX-License-Identifier: Apache-2.0
"""perf/throughput is per GPU, of all that a run holds."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.train import _time_metrics
from tasks.config.recipes import load_recipe
from tasks.records.headline import headline
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
    clock = Stopwatch()
    with clock.stage("update_actor"):
        pass
    metrics = _time_metrics(run, clock, images=512)
    assert metrics["perf/throughput"] * metrics["perf/time_per_step"] == pytest.approx(512 / gpus)


@pytest.mark.parametrize(("recipe", "gpus"), [("qwen-image-ocr-flow-grpo", 4 + 4), ("quickstart", 0)])
def test_what_an_iteration_cost_is_added_to_what_was_spent_before(recipe: str, gpus: int) -> None:
    """Hours of the clock, and of all GPUs that the run holds; on the CPU there are none of these."""
    spent = {"cost/hours": 0.5, "cost/gpu_hours": 0.5 * gpus}
    run: Any = SimpleNamespace(config=load_recipe(recipe, PREFECT_YAML), spent=spent)
    metrics = _time_metrics(run, Stopwatch(begun=time.perf_counter() - 1800), images=512)
    hours = 0.5 + metrics["timing_s/step"] / 3600
    assert run.spent == pytest.approx({"cost/hours": hours, "cost/gpu_hours": gpus * hours})
    assert hours > 1
    assert {name: metrics[name] for name in spent} == run.spent


def test_an_iteration_that_an_earlier_process_has_trained_has_no_speed() -> None:
    """It was killed before the record, whose seconds are then those of a validation or of nothing."""
    run: Any = SimpleNamespace(config=load_recipe("quickstart", PREFECT_YAML), spent={})
    clock = Stopwatch()
    with clock.stage("update_weights"):
        pass
    metrics = _time_metrics(run, clock, images=512)
    assert metrics["perf/total_num_images"] == 512
    assert "timing_s/update_weights" in metrics
    assert not {"perf/throughput", "perf/time_per_step"} & metrics.keys()
    assert "images_per_second" not in " ".join(headline(metrics))
