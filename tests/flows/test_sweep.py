# SPDX-License-Identifier: Apache-2.0
"""What a sweep tries: grid points once each, what was undone again, and nothing that is no field."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

import flows.sweep
from flows.sweep import TrainedRun, Trials, _of_one_type, run_trials
from tasks.actors.child_run import ChildDied
from tasks.config.errors import ConfigError
from tasks.config.recipes import parse_settings
from tasks.config.sweep import Dimension, SweepConfig, check_fields, with_search
from tasks.config.tree import TrainConfig
from tasks.records.study import check_continued, numbers, open_study, prepare_trials
from tests.support.patience import PATIENCE

GRID = {
    "sampler": "grid",
    "space": {"trainer.seed": {"low": 0, "high": 2, "step": 1}, "data.train_batch_size": {"choices": [4, 8]}},
}


def run_some(search: SweepConfig, folder: Path, objective, count: int | None = None) -> optuna.Study:
    study = open_study(search, folder)
    left = prepare_trials(study, search)
    run_trials(study, objective(search), left if count is None else count, parallel=1)
    return study


def seed_of(search: SweepConfig):
    def objective(trial: optuna.Trial) -> float:
        values = {name: dimension.suggest(trial, name) for name, dimension in search.space.items()}
        if trial.number == 1:
            raise ChildDied("a dead child")
        return values["trainer.seed"] / values["data.train_batch_size"]

    return objective


def test_a_grid_that_was_interrupted_is_completed_point_by_point(tmp_path: Path) -> None:
    """Four of six points: three done, one failed, and one more left running by a kill. Optuna says nothing of it."""
    said, search = [], SweepConfig(**GRID)
    listener = logging.Handler()
    listener.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("optuna").addHandler(listener)
    study = run_some(search, tmp_path, seed_of, count=4)
    study.ask()
    study = run_some(search, tmp_path, seed_of)
    complete = study.get_trials(states=[TrialState.COMPLETE])
    points = [tuple(trial.params.values()) for trial in complete]
    assert sorted(points) == [(seed, size) for seed in (0, 1, 2) for size in (4, 8)]
    assert not study.get_trials(states=[TrialState.RUNNING, TrialState.WAITING])
    assert study.best_params == {"trainer.seed": 2, "data.train_batch_size": 4}
    assert prepare_trials(study, search) == 0
    logging.getLogger("optuna").removeHandler(listener)
    assert [record.getMessage() for record in said] == []


def test_trials_at_a_time_are_different_ones(tmp_path: Path) -> None:
    """Twelve queued points for six threads: each is tried once, however they meet at the storage."""
    search = SweepConfig(sampler="grid", space={"trainer.seed": {"low": 0, "high": 11, "step": 1}})
    study, tried = open_study(search, tmp_path), []

    def objective(trial: optuna.Trial) -> float:
        tried.append(search.space["trainer.seed"].suggest(trial, "trainer.seed"))
        return float(tried[-1])

    run_trials(study, objective, prepare_trials(study, search), parallel=6)
    assert sorted(tried) == list(range(12))


class CountedRuns(Trials):
    """Runs that end at once; the first is dead."""

    def __init__(self, search: SweepConfig):
        super().__init__(TrainConfig(), search, folder=Path(), tracker=Any, environment={})
        self.trained = []

    def train(self, trial: optuna.Trial, config: TrainConfig) -> TrainedRun:
        self.trained.append(config.trainer.seed)
        if len(self.trained) == 1:
            raise ChildDied("a dead child")
        return TrainedRun(float(config.trainer.seed), f"run {config.trainer.seed}")


def test_trials_of_one_point_share_its_run(tmp_path: Path) -> None:
    """At a time, as here by a barrier, or one after the other; what has died is no run to share with later trials."""
    search = SweepConfig(sampler="random", trials=6, space={"trainer.seed": {"choices": [5]}})
    study, runs, together = open_study(search, tmp_path), CountedRuns(search), Barrier(2)

    def objective(trial: optuna.Trial) -> float:
        together.wait(PATIENCE)
        return runs(trial)

    run_trials(study, objective, prepare_trials(study, search), parallel=2)
    assert runs.trained == [5, 5]
    complete = study.get_trials(states=[TrialState.COMPLETE])
    assert len(complete) >= 4
    assert {(trial.value, trial.user_attrs["mlflow_run_id"]) for trial in complete} == {(5.0, "run 5")}


class SilentRun:
    """One that ends well and never logs what the sweep looks at."""

    run_id = "run 7"

    def new_values(self, metric: str) -> Iterator[tuple[int, float]]:
        return iter(())


def test_a_trial_without_a_value_tells_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody finds out by it why the metric is missing."""
    monkeypatch.setattr(flows.sweep, "child_run", lambda *_: nullcontext(SilentRun()))
    search = SweepConfig(sampler="random", trials=1, space={"trainer.seed": {"choices": [5]}})
    tracker: Any = SimpleNamespace(client=None, run_id=None)
    study, runs = open_study(search, tmp_path), Trials(TrainConfig(), search, tmp_path, tracker, environment={})
    run_trials(study, runs, prepare_trials(study, search), parallel=1)
    (trial,) = study.trials
    assert (trial.state, trial.user_attrs["mlflow_run_id"]) == (TrialState.FAIL, "run 7")


class EndsWithNothing(SilentRun):
    """Its last value is no number, as after an iteration of which all rewards are missing."""

    def new_values(self, metric: str) -> Iterator[tuple[int, float]]:
        yield from ((1, 0.5), (2, float("nan")))


def test_a_trial_that_ends_with_no_number_has_failed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.sweep, "child_run", lambda *_: nullcontext(EndsWithNothing()))
    search, told = SweepConfig(sampler="random", trials=1, space={"trainer.seed": {"choices": [5]}}), list[str]()
    tracker: Any = SimpleNamespace(client=None, run_id=None)
    study, runs = open_study(search, tmp_path), Trials(TrainConfig(), search, tmp_path, tracker, environment={})
    run_trials(study, runs, prepare_trials(study, search), parallel=1, tell=told.append)
    (trial,) = study.trials
    assert trial.state == TrialState.FAIL
    assert "is nan at its end" in trial.user_attrs["error"]
    assert len(told) == 1


def test_the_trials_of_choices_of_several_types_are_a_table(tmp_path: Path) -> None:
    """Hours of training would end in a traceback, and so would each start after it."""
    table = pd.DataFrame(
        {"size": ["auto", 24, None], "on": [True, 0.5, 1], "range": [[0, 4], [1, 2], None], "lr": [1, 2.5, None]}
    )
    table.apply(_of_one_type).to_parquet(tmp_path / "trials.parquet")
    read = pd.read_parquet(tmp_path / "trials.parquet")
    assert read["size"].dropna().tolist() == ['"auto"', "24"]
    assert read["on"].tolist() == ["true", "0.5", "1"]
    assert read["range"].dropna().tolist() == ["[0, 4]", "[1, 2]"]
    assert read["lr"].tolist()[:2] == [1, 2.5]


def test_an_error_that_is_no_dead_child_ends_the_sweep(tmp_path: Path) -> None:
    search, begun = SweepConfig(sampler="random", trials=500, space={"trainer.seed": {"low": 0, "high": 9}}), []
    study = open_study(search, tmp_path)

    def objective(trial: optuna.Trial) -> float:
        begun.append(trial.number)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        run_trials(study, objective, prepare_trials(study, search), parallel=2)
    assert len(begun) < 500


def test_values_that_make_no_run_fail_their_trial_alone(tmp_path: Path) -> None:
    """As a config that is refused, or a metric that the run never measured."""
    search = SweepConfig(**GRID)

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise ValueError("rollout.n is 1")
        return 0.5

    study = open_study(search, tmp_path)
    run_trials(study, objective, prepare_trials(study, search), parallel=1)
    assert [trial.state for trial in study.trials].count(TrialState.COMPLETE) == 5
    (failed,) = study.get_trials(states=[TrialState.FAIL])
    assert (failed.number, failed.user_attrs["error"]) == (1, "rollout.n is 1")


def test_what_failed_is_told_and_counts_until_it_is_done(tmp_path: Path) -> None:
    """A run that dies says why at the end of its log; what fails since the sweep is ended is no news."""
    search, told = SweepConfig(**GRID), []
    study = open_study(search, tmp_path)

    def objective(trial: optuna.Trial) -> float:
        for name, dimension in search.space.items():
            dimension.suggest(trial, name)
        if trial.number in (1, 6):
            raise ChildDied("the run ended with 1, see runs/sweeps/s/a.log: 50 %: of it\nerror: a disk is full: b\nc")
        if trial.number == 2:
            raise ValueError("rollout.n\nis 1")
        return 0.5

    run_trials(study, objective, prepare_trials(study, search), parallel=1, tell=told.append)
    assert [line.rpartition("}: ")[2] for line in told] == [
        "the run ended with 1, see runs/sweeps/s/a.log: a disk is full: b",
        "rollout.n is 1",
    ]
    assert told[0].startswith(f"trial 1 failed, of {study.trials[1].params}: ")
    assert numbers(study).items() >= {"complete": 4, "fail": 2}.items()
    run_trials(study, objective, prepare_trials(study, search), parallel=1)
    assert numbers(study).items() >= {"complete": 5, "fail": 1}.items(), "one of the two failed again"
    run_trials(study, objective, prepare_trials(study, search), parallel=1)
    assert numbers(study).items() >= {"complete": 6, "fail": 0}.items()


def test_what_ends_a_sweep_ends_its_runs(tmp_path: Path) -> None:
    """Ctrl-C does not reach them: they have process groups of their own."""
    search = SweepConfig(sampler="random", trials=20, space={"trainer.seed": {"low": 0, "high": 9}})
    study, stopped = open_study(search, tmp_path), Event()

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 0:
            raise OSError("the disk is full")
        stopped.wait()
        raise ChildDied("it was asked to end")

    with pytest.raises(OSError, match="full"):
        run_trials(study, objective, prepare_trials(study, search), parallel=2, stop=stopped.set)
    assert stopped.is_set()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_as_many_trials_as_asked_for_in_all(tmp_path: Path, sampler: str) -> None:
    search = SweepConfig(**GRID | {"sampler": sampler, "trials": 9, "startup_trials": 3})
    run_some(search, tmp_path, seed_of, count=4)
    study = run_some(search, tmp_path, seed_of)
    assert len(study.get_trials(states=[TrialState.COMPLETE])) == 9
    assert prepare_trials(study, search.model_copy(update={"trials": 3})) == 0, "a sweep that asks for fewer has all"
    assert {trial.params["data.train_batch_size"] for trial in study.trials} == {4, 8}


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_lengthened_sweep_draws_no_point_again(tmp_path: Path, sampler: str) -> None:
    """Equal values have equal run names: such a trial would be a run that is there, counted twice."""
    drawn = {}
    for trials in (4, 8):
        search = SweepConfig(sampler=sampler, trials=trials, space={"rate": {"low": 1e-6, "high": 1e-3, "log": True}})
        study = run_some(search, tmp_path, lambda search: lambda trial: search.space["rate"].suggest(trial, "rate"))
        drawn[trials] = [done.params["rate"] for done in study.trials]
    assert drawn[8][:4] == drawn[4]
    assert len(set(drawn[8])) == 8


def test_a_fresh_sweep_draws_by_its_seed_alone(tmp_path: Path) -> None:
    """The largest seed, too, after which a continued one goes on from 0."""
    search = SweepConfig(sampler="random", seed=2**32 - 1, space={"rate": {"low": 0.0, "high": 1.0}})
    by_seed = optuna.create_study(sampler=optuna.samplers.RandomSampler(search.seed))
    fresh, wanted = (one.ask().suggest_float("rate", 0.0, 1.0) for one in (open_study(search, tmp_path), by_seed))
    assert fresh == wanted
    assert open_study(search, tmp_path).ask().suggest_float("rate", 0.0, 1.0) != wanted


def test_the_median_pruner_stops_the_worse_half(tmp_path: Path) -> None:
    search = SweepConfig(**GRID | {"sampler": "random", "trials": 12, "startup_trials": 3})

    def objective(_search: SweepConfig):
        def run(trial: optuna.Trial) -> float:
            for step in range(3):
                trial.report(float(-trial.number), step)  # each run is worse than all before it
                if trial.should_prune():
                    raise optuna.TrialPruned
            return float(-trial.number)

        return run

    study = run_some(search, tmp_path, objective)
    assert [trial.state == TrialState.PRUNED for trial in study.trials] == [False] * 3 + [True] * 9
    assert {trial.last_step for trial in study.trials[3:]} == {1}, "at iteration 0 the base model is measured"
    assert prepare_trials(study, search) == 0, "what was pruned is done, and not tried again"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"trainer.sed": {"choices": [1]}}, "trainer.sed cannot be 1"),
        ({"trainer.seed": {"choices": [-1]}}, "trainer.seed cannot be -1"),
        ({"actor_rollout_ref.rollout.n": {"low": 1, "high": 4}}, "rollout.n is 1"),
        ({"reward.functions.shapes.options.low": {"choices": [1, 2]}}, "there is no reward shapes here, so this would"),
    ],
)
def test_a_dimension_that_is_no_field_is_refused(space: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fields(TrainConfig(), SweepConfig(space=space))


def test_dimensions_are_lists_or_ranges() -> None:
    assert Dimension(low=0.5, high=1.0, step=0.25).grid() == [0.5, 0.75, 1.0]
    both, zero = {"choices": [1], "low": 1, "high": 2}, {"low": 0, "high": 1, "log": True}
    for bad in ({}, both, {"low": 1}, {"low": 2, "high": 1}, zero):
        with pytest.raises(ValueError, match=r"either choices|must be below"):
            Dimension(**bad)
    with pytest.raises(ConfigError, match="needs choices, or a step"):
        Dimension(low=0.1, high=0.2).grid()


def test_a_space_that_is_given_replaces_the_one_before_and_a_path_below_it_changes_one_dimension() -> None:
    lr, before = "actor_rollout_ref.actor.optim.lr", {"low": 1e-5, "high": 1e-3, "log": True}
    search = SweepConfig.model_validate({"name": "a", "space": {lr: before, "data.train_batch_size": {"choices": [4]}}})
    batch = {"data.train_batch_size": {"choices": [4]}}

    def searched(*settings: str) -> tuple[dict, dict]:
        values, lost = with_search(search, parse_settings([*settings], "--search"))
        checked = SweepConfig.model_validate(values)
        assert checked.name == "a"
        return checked.model_dump(exclude_unset=True)["space"], lost

    assert searched("trials=3") == (search.model_dump(exclude_unset=True)["space"], {})
    assert searched("space={trainer.seed: {choices: [1, 2]}}") == ({"trainer.seed": {"choices": [1, 2]}}, {})
    choices = {lr: {"choices": [1e-4]}}
    dropped = {f"space.{lr}.{field}": value for field, value in before.items()}
    assert searched(f"space={{{lr}: {{choices: [1.0e-4]}}}}") == (choices, dropped)
    assert searched(f"space.{lr}={{choices: [1.0e-4]}}") == (choices | batch, dropped)
    assert searched(f"space.{lr}.high=0.1") == ({lr: before | {"high": 0.1}} | batch, {})
    seeds = {"trainer.seed": {"low": 1, "high": 9}}
    assert searched("space.trainer.seed={low: 1, high: 9}") == ({lr: before} | batch | seeds, {})
    assert searched("space={trainer.seed: {low: 1, high: 3}}", "space.trainer.seed.high=9") == (seeds, {})
    option = {"reward.functions.mine.options.low": {"choices": [1]}}
    assert searched("space.reward.functions.mine.options.low={choices: [1]}") == ({lr: before} | batch | option, {})
    for wrong in ("space={}", "space.trainer.seed=5", f"space.{lr}.choices=[1]"):
        with pytest.raises(ValueError, match="space"):
            searched(wrong)


@pytest.mark.parametrize("field", ["trainer.total_training_steps", "actor_rollout_ref.rollout.val_kwargs.max_prompts"])
def test_a_dimension_whose_values_are_all_one_run_is_refused(field: str) -> None:
    """The second trial would go on with the first one's run, and get its result."""
    with pytest.raises(ConfigError, match=f"{field} is no part of a run's name"):
        check_fields(TrainConfig(), SweepConfig(space={field: {"choices": [4, 8]}}))
    check_fields(TrainConfig(), SweepConfig(space={field: {"choices": [4]}}))


RATE = {"choices": [1.0e-4, 1.0e-3]}
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        ({}, {}, None),
        (
            {"trials": 30, "sampler": "random", "pruner": "none"},
            {"actor_rollout_ref": {"rollout": {"num_actors": 2}}},
            None,
        ),
        ({"space": {LR: RATE, "trainer.seed": {"low": 0, "high": 9}}}, {}, None),
        ({"space": {LR: {"choices": [1.0e-4, 1.0e-3, 1.0e-2]}}}, {}, "search.space: .*choices stay the same"),
        ({"space": {LR: {"low": 1.0e-4, "high": 1.0e-3}}}, {}, "search.space: .*choices stay the same"),
        ({"metric": "val/ocr/mean"}, {}, "search.metric is val/ocr/mean, .* began with val/reward/mean"),
        ({"direction": "minimize"}, {}, "search.direction is minimize, .* began with maximize"),
        ({}, {"trainer": {"total_training_steps": 16}}, "trainer.total_training_steps is 16, .* began with 100"),
        ({}, {"data": {"train_batch_size": 32}}, "data.train_batch_size is 32, .* began with 16"),
    ],
)
def test_a_sweep_is_continued_with_what_it_compares(
    tmp_path: Path, search: dict, changes: dict, message: str | None
) -> None:
    """Else it gives the results of runs of before for those that are asked for, or fails each run of a new choice."""
    config = TrainConfig()
    first, again = (SweepConfig(**{"space": {LR: RATE}} | more) for more in ({}, search))
    study = open_study(first, tmp_path)
    check_continued(study, first, config)
    run_trials(study, lambda trial: first.space[LR].suggest(trial, LR), 2, parallel=1)
    study = open_study(again, tmp_path)
    if message is None:
        check_continued(study, again, config.with_changes(changes))
        return
    with pytest.raises(ConfigError, match=message):
        check_continued(study, again, config.with_changes(changes))


def test_a_start_that_is_refused_is_not_what_a_sweep_began_with(tmp_path: Path) -> None:
    """A study that is older than the record of what it compares takes it from the first start that is none."""
    config, search = TrainConfig(), SweepConfig(space={LR: RATE})
    study = open_study(search, tmp_path)
    run_trials(study, lambda trial: search.space[LR].suggest(trial, LR), 2, parallel=1)
    other = SweepConfig(space={LR: {"choices": [1.0e-4, 1.0e-2]}}, metric="val/ocr/mean")
    with pytest.raises(ConfigError, match="choices stay the same"):
        check_continued(study, other, config)
    check_continued(study, search, config)
