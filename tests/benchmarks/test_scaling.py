# SPDX-License-Identifier: Apache-2.0
"""The benchmark of scaling: its cells are runs that a machine of so many GPUs can hold, and its table is of the log."""

import json

import pytest

from benchmarks import scaling
from benchmarks.followed_runs import parts_of_an_iteration
from benchmarks.scaling import Cell, cells, prompts_of_a_gpu
from tasks.config.recipes import load_recipe, parse_changes
from tasks.config.tree import TrainConfig

GPUS = (1, 2, 4, 8)


def run_of(cell: Cell, config: TrainConfig) -> TrainConfig:
    return config.with_changes(parse_changes(cell.changes(config, 5, "cuda")))


@pytest.mark.parametrize(
    ("recipe", "prompts"), [("words", 64), ("sd35-ocr-flow-grpo", 6), ("qwen-image-ocr-flow-grpo-lora", 4)]
)
def test_every_number_of_gpus_has_a_run_with_the_recipes_steps(recipe: str, prompts: int) -> None:
    config = load_recipe(recipe)
    policy = config.actor_rollout_ref
    steps = config.data.train_batch_size // policy.actor.ppo_mini_batch_size
    assert prompts_of_a_gpu(config) == prompts
    for cell in cells(("weak", "strong"), GPUS, prompts, ()):
        run = run_of(cell, config)
        assert run.shares_gpus
        assert (run.trainer.world_size, run.actor_rollout_ref.rollout.num_actors) == (cell.gpus, cell.gpus)
        assert run.data.train_batch_size == prompts * (cell.gpus if cell.kind == "weak" else 8)
        assert run.data.train_batch_size // run.actor_rollout_ref.actor.ppo_mini_batch_size == steps
        assert run.actor_rollout_ref.rollout.batch_size == policy.rollout.batch_size, "the same work for each GPU"


def test_gpus_are_divided_among_rollout_and_trainer() -> None:
    config = load_recipe("sd35-ocr-flow-grpo")
    for cell in cells(["ahead"], GPUS, 6, [2, 4, 6]):
        run = run_of(cell, config)
        rollout = run.actor_rollout_ref.rollout
        assert run.trainer.world_size + rollout.num_actors == cell.gpus == 8
        assert run.trainer.one_step_off_policy
        assert (rollout.placement, rollout.weight_transport, run.data.train_batch_size) == (
            "separate",
            "collective",
            48,
        )


def test_the_parts_of_an_iteration_leave_out_what_compiles_and_validations() -> None:
    steps = {1: 99.0, 2: 50.0, 3: 4.0, 4: 5.0, 5: 7.0, 6: 80.0}
    metrics = {
        "timing_s/step": steps,
        "timing_s/sync/gather": dict.fromkeys(steps, 0.25),
        "timing_s/save_checkpoint": {2: 9.0, 5: 3.0},
        "timing_s/testing": {0: 9.0, 6: 70.0},
        "perf/total_num_images": dict.fromkeys(steps, 8.0),
    }
    parts = {"step": 5.0, "sync/gather": 0.25, "save_checkpoint": 0.0, "testing": 0.0}
    assert parts_of_an_iteration(metrics) == parts
    first = {name: {step: value for step, value in points.items() if step < 3} for name, points in metrics.items()}
    assert parts_of_an_iteration(first) == {}


def test_a_row_leaves_out_what_compiles_and_the_table_compares_with_one_gpu() -> None:
    def logged(cell: Cell, seconds: float, pictures: float) -> dict:
        steps = {1: 99.0, 2: 50.0, 3: seconds, 4: seconds, 5: 80.0, 6: 1.0}
        metrics = {
            "timing_s/step": steps,
            "timing_s/gen": dict.fromkeys(steps, 1.5),
            "timing_s/testing": {0: 9.0, 6: 70.0},
            "perf/total_num_images": dict.fromkeys(steps, pictures),
            "memory/trainer/gpu_peak_gib/update": {1: 3.0, 5: 4.26},
        }
        found = {"recipe": "words", "cell": cell.name, "kind": cell.kind, "gpus": cell.gpus, "end": "finished"}
        return json.loads(json.dumps(found | scaling.row(metrics)))

    alone, four = logged(Cell("weak", 1, 1, 2), 4.0, 8.0), logged(Cell("weak", 4, 4, 8), 5.0, 32.0)
    four["end"] = "limit"
    failed = {"recipe": "words", "cell": "weak 8", "kind": "weak", "gpus": 8, "end": "failed"} | scaling.row({})
    assert (alone["step"], alone["gen"], alone["other"], alone["iterations"]) == (4.0, 1.5, 2.5, 3)
    assert scaling.table([alone, four, failed]).splitlines() == [
        "| Recipe | GPUs | Pictures | Seconds | gen | other | images/s | of one GPU's, times the GPUs | GiB | Count |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| words | weak 1 (2 prompts) | 8 | 4.00 | 1.50 | 2.50 | 2.00 | 100.0% | 4.3 | 3 |",
        "| words | weak 4 (8 prompts) | 32 | 5.00 | 1.50 | 3.50 | 6.40 | 80.0% | 4.3 | 3, limit |",
    ]
    other = alone | {"set": ["trainer.canary_batch=6"], "step": 2.0}
    rows = scaling.table([alone, other, four]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| words", "| words trainer.canary_batch=6", "| words"]
    assert rows[1].split(" | ")[-3] == "100.0%", "of its own settings' one GPU"
