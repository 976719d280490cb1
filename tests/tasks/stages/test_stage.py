# SPDX-License-Identifier: Apache-2.0
"""A stage is a Prefect task that is timed, and takes its stopwatch before its own arguments."""

import importlib
import inspect
import pkgutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect import Task, flow
from prefect.states import Completed, Failed, State

import tasks.stages
from tasks.stages.advantage import advantage
from tasks.stages.log import register_weights
from tasks.stages.old_log_prob import old_log_prob
from tasks.stages.pairs import read_pairs
from tasks.stages.reward import finish_reward
from tasks.stages.rollout import finish_rollout, finish_rollout_ahead
from tasks.stages.save import save_checkpoint
from tasks.stages.stage import stage
from tasks.stages.sync import sync_weights
from tasks.stages.update import update
from tasks.stages.validation import draw_and_score
from tasks.system.stopwatch import Stopwatch

ROOT = Path(__file__).parents[3]


@stage("half_done", "half")
def half(number: float, other: float = 0.0) -> float:
    if number < 0:
        raise ValueError("negative")
    return number / 2 + other


def test_a_stage_gets_its_arguments_without_the_stopwatch_and_is_timed_also_where_it_fails() -> None:
    clock = Stopwatch()
    assert half.fn(clock, 4.0, other=1.0) == 3.0
    assert list(clock.seconds) == ["half_done"]
    failed = Stopwatch()
    with pytest.raises(ValueError, match="negative"):
        half.fn(failed, -1.0)
    assert list(failed.seconds) == ["half_done"]


def test_the_parts_of_a_time_are_its_whole_and_nothing_is_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage within another one counts there alone, and what no stage has is orchestration."""
    now = 100.0

    def go_on(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Stopwatch(1)
    with clock.stage("outer"):
        go_on(1)
        with clock.stage("inner"):
            go_on(5)
    go_on(0.25)
    with clock.stage_behind("written"):
        go_on(2)
    for seconds in (0.5, 0.25):  # as an iteration that syncs twice
        clock.add_inside("outer", {"their part": seconds})
    assert clock.inside == {"outer/their part": 0.75}
    assert clock.finished() == {"outer": 1, "inner": 5, "orchestration": 2.25, "step": 8.25}
    assert clock.behind == {"written": 2}
    go_on(0.5)
    after = clock.followed(2)
    go_on(0.125)
    assert after.label == "2"
    assert after.finished() == {"orchestration": 0.625, "step": 0.625}, "the next one begins where this one ended"


@pytest.mark.slow  # it starts Prefect's temporary server
def test_prefect_binds_a_stages_arguments_and_its_stopwatch() -> None:
    assert list(inspect.signature(half.fn).parameters) == ["clock", "number", "other"]

    @flow(persist_result=False)
    def outer() -> tuple[float, list[str]]:
        clock = Stopwatch()
        return half(clock, 4.0, other=1.0), list(clock.seconds)

    assert outer() == (3.0, ["half_done"])


@stage("given")
def given(sequence: Sequence[State], by_name: Mapping[str, State]) -> tuple[Sequence[State], Mapping[str, State]]:
    return sequence, by_name


@pytest.mark.slow  # it starts Prefect's temporary server
def test_prefect_looks_into_no_sequence_of_a_stages_arguments() -> None:
    """What it looks into, it replaces states in; and it would look into each prompt and noise key of each sample."""
    states = [Completed(data=1), Completed(data=2)]

    @flow(persist_result=False)
    def outer() -> tuple[Any, Any]:
        by_place = given(Stopwatch(), states, {"one": Completed(data=1)})
        return by_place, given(Stopwatch(), sequence=tuple(states), by_name={})

    (first, looked_into), (second, _) = outer()
    assert first is states
    assert looked_into == {"one": 1}, "so the test sees what Prefect looks into"
    assert [*map(id, second)] == [*map(id, states)]


@pytest.mark.slow  # it starts Prefect's temporary server
def test_a_stage_waits_for_what_it_is_to_wait_for() -> None:
    @flow(persist_result=False)
    def outer() -> str:
        return str(given(Stopwatch(), [], {}, wait_for=[Failed(message="before")], return_state=True).name)

    assert outer() == "NotReady"


def test_the_tasks_names_are_those_that_the_docs_and_recorded_flow_runs_have() -> None:
    stages = [advantage, register_weights, old_log_prob, read_pairs, finish_reward, finish_rollout]
    stages += [finish_rollout_ahead, save_checkpoint, sync_weights, update, draw_and_score]
    names = ["advantage", "register", "old-log-prob", "read-pairs", "reward", "rollout"]
    names += ["rollout", "save-checkpoint", "sync-weights", "update", "validate"]
    assert [made.name for made in stages] == names
    assert not any(made.persist_result for made in stages)


def test_a_module_of_the_room_holds_one_stage_and_no_flow_is_below_its_floor() -> None:
    named = {}
    for module in pkgutil.iter_modules(tasks.stages.__path__, "tasks.stages."):
        found = vars(importlib.import_module(module.name)).values()
        named[module.name] = {value.name for value in found if isinstance(value, Task)}
    assert {name: stages for name, stages in named.items() if len(stages) != 1} == {"tasks.stages.stage": set()}
    sources = [path for path in ROOT.glob("tasks/**/*.py") if "@flow" in path.read_text()]
    assert sources == []
