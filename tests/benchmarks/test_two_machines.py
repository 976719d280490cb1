# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a machine that is killed: its runs are those that two machines can hold, and its table has them."""

import pytest

from benchmarks.local_services import ROOT, import_path
from benchmarks.two_machines import changes, seconds_of, table
from tasks.config.recipes import load_recipe, parse_changes


@pytest.mark.parametrize(
    ("recipe", "device", "ranks"), [("words", "cuda", 2), ("sd35-ocr-flow-grpo", "cuda", 4), ("quickstart", "cpu", 1)]
)
def test_a_recipe_becomes_a_run_with_as_many_ranks_on_both_machines(recipe: str, device: str, ranks: int) -> None:
    config = load_recipe(recipe)
    run = config.with_changes(parse_changes(changes(device, ranks, ["trainer.total_training_steps=4"]), recipe=config))
    rollout = run.actor_rollout_ref.rollout
    assert (run.trainer.nnodes, run.trainer.n_gpus_per_node, rollout.num_actors) == (2, ranks, 2 * ranks)
    assert run.shares_gpus == (device == "cuda")
    assert run.trainer.total_training_steps == 4, "what is given goes before what the benchmark sets"


def test_an_iteration_counts_when_its_line_tells_its_seconds() -> None:
    lines = ["iteration 1/6: reward 0.250, held-out 0.500, clipped 1.0%, 5.7 s, 3.3 images/s, 00:22 left"]
    lines += ["iteration 2/6: done before, 00:10 left", "a warning of iteration 3/6: 4.0 s"]
    assert seconds_of([*enumerate(lines)]) == {1: 5.7}


def test_a_row_that_was_cut_off_is_in_the_table() -> None:
    whole = {"recipe": "words", "ranks": "2 x 2", "lost_s": 5.1, "ended_s": 6.0, "code": 1, "checkpoint": 2}
    whole |= {"joined_s": 3.0, "on_s": 40.0, "code_again": 0}
    *_, first, last = table([whole, {"recipe": "words", "failed": "no update"}]).splitlines()
    assert first == "| words | 2 x 2 | 5.1 | 6.0 | 1 | 2 | 3.0 | 40.0 | 0 |"
    assert last.count("None") == 8


def test_a_benchmark_s_processes_find_the_packages_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert import_path(ROOT).split(":") == [str(ROOT), "/packages"]
    monkeypatch.delenv("PYTHONPATH")
    assert import_path(ROOT) == str(ROOT), "an empty entry would be the working folder"
