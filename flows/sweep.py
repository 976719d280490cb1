# SPDX-License-Identifier: Apache-2.0
"""Sweeps: many training runs over some fields of a config, as children of one MLflow run."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("sweep")

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

import optuna
import pandas as pd
from optuna.trial import TrialState
from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from tasks.actors.child_run import ChildDied, ChildRun, child_run, shared_place
from tasks.config.overrides import NoChange
from tasks.config.sweep import SweepConfig, check_fields
from tasks.config.tree import NO_OVERRIDES, Recipe, TrainConfig, TrainOverrides
from tasks.records.run_lock import run_lock
from tasks.records.study import check_continued, numbers, open_study, prepare_trials
from tasks.records.tracking import Tracker
from tasks.run.flow_run_names import name_search
from tasks.run.opening import apply_overrides
from tasks.run.preflight import check_inputs
from tasks.system.access import shared_server


@flow(name="sweep", flow_run_name=name_search, persist_result=False)
def sweep(config: Recipe, search: SweepConfig, overrides: TrainOverrides | NoChange = NO_OVERRIDES) -> dict[str, Any]:
    """Train with many settings, at most `search.parallel` at a time, and find the best.

    Every run is a process and an MLflow run under the sweep's own; all share a Ray cluster and Prefect's server. One
    that dies counts as failed and the others go on. Started again under the same name, a sweep continues: what was
    running, and what had failed, is tried again, each run from its own last checkpoint.

    Args:
        config: what the runs share.
        search: which fields are tried, how, and what is compared.
        overrides: changes to the config.

    Raises:
        CheckpointError: another process works on the sweep of this name.
    """
    config = apply_overrides(config, overrides)
    config = config.with_changes({"trainer": {"experiment_name": search.name}})
    check_inputs(config)
    check_fields(config, search)
    folder = config.trainer.default_local_dir / "sweeps" / search.name
    with run_lock(folder):
        study = open_study(search, folder)
        check_continued(study, search, config)
        tracker = Tracker(config.tracking, f"sweep-{search.name}", study.user_attrs.get("mlflow_run_id"))
        study.set_user_attr("mlflow_run_id", tracker.run_id)
        with tracker.concluded(ends_flow_run=True):
            tracker.log_start(search, {"doubleflow.sweep": search.name})
            remaining = prepare_trials(study, search)
            if remaining:
                with shared_place(config, search.parallel) as joined:
                    trials = Trials(config, search, folder, tracker, joined | shared_server())
                    run_trials(study, trials, remaining, search.parallel, trials.stop, get_run_logger().warning)
            return _conclude(study, tracker)


class TrainedRun(NamedTuple):
    """What a trial is told of its run.

    Attributes:
        value: the metric's last.
    """

    value: float
    mlflow_run_id: str | None


class Trials:
    """The objective: one call is one training run, which calls with the same values share.

    Args:
        config, search: of the sweep.
        folder: for the runs' configs and output.
        tracker: the sweep's MLflow run.
        environment: variables that lead a run to what all of them share.
    """

    def __init__(
        self,
        config: TrainConfig,
        search: SweepConfig,
        folder: Path,
        tracker: Tracker,
        environment: Mapping[str, str],
    ):
        self.config, self.search, self.folder, self.tracker = config, search, folder, tracker
        self.children: list[ChildRun] = []
        self._runs: dict[str, Future[TrainedRun]] = {}
        self._one_begins = Lock()
        self.stopped = False
        self.environment = environment

    def __call__(self, trial: optuna.Trial) -> float:
        """Train with the trial's values; the metric's last value.

        Raises:
            TrialPruned: it was stopped.
            ChildDied: it ended with an error.
            ValueError: the values make no valid config, or the run never measured the metric.
        """
        values = {name: dimension.suggest(trial, name) for name, dimension in self.search.space.items()}
        changes = self.config.at_paths(values)
        config = self.config.with_changes(changes)
        trial.set_user_attr("run", config.run_name)
        behind = {path: str(here) for path, (here, _) in self.config.left_behind(changes).items()}
        if behind:  # for another algorithm.name
            trial.set_user_attr("left_behind", behind)
        run = self._once(config.run_name, lambda: self.train(trial, config))
        trial.set_user_attr("mlflow_run_id", run.mlflow_run_id)
        return run.value

    def train(self, trial: optuna.Trial, config: TrainConfig) -> TrainedRun:
        """The run of this config in a process of its own, whose values the trial is told. Raises as a call does."""
        file = self.folder / f"{config.run_name}.json"
        file.write_text(config.model_dump_json(indent=1, exclude_unset=True))
        value = None
        log, client, parent = file.with_suffix(".log"), self.tracker.client, self.tracker.run_id
        with child_run(file, config.run_dir, log, client, parent, self.environment) as child:
            self.children.append(child)
            if self.stopped:
                child.interrupt()
            for step, value in child.new_values(self.search.metric):
                trial.report(value, step)
                if trial.should_prune():
                    raise optuna.TrialPruned(f"{self.search.metric} is {value} at step {step}")
        if value is not None and math.isfinite(value):
            return TrainedRun(value, child.run_id)
        trial.set_user_attr("mlflow_run_id", child.run_id)  # of one that has a value whoever asked for it does
        if value is None:
            raise ValueError(f"run {config.run_name} never logged {self.search.metric}")
        raise ValueError(f"run {config.run_name}: {self.search.metric} is {value} at its end, which is no result")

    def _once(self, name: str, train: Callable[[], TrainedRun]) -> TrainedRun:
        """The run of this name, which is trained unless another trial has or does: that is waited for, and its end,
        an error too, is this one's. What has failed is trained again."""
        with self._one_begins:
            first = name not in self._runs
            run = self._runs.setdefault(name, Future())
        if first:
            try:
                run.set_result(train())
            except BaseException as error:
                del self._runs[name]
                run.set_exception(error)
        return run.result()

    def stop(self) -> None:
        """End the runs of all calls, which fail then: begun again, each goes on from its own last checkpoint."""
        self.stopped = True
        for child in self.children:
            child.interrupt()


def run_trials(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], float],
    count: int,
    parallel: int,
    stop: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """`count` trials, `parallel` at a time. One whose run dies has failed, which `tell` is told; any other error ends
    the sweep.

    Whatever ends it, Ctrl-C too, calls `stop`, which has to end the trials that are running: they are waited for.

    Optuna's own loop does this too, but its threads can be given one queued trial twice where the storage is sqlite.
    """
    one_asks, ends = Lock(), Event()

    def run_one() -> None:
        with one_asks:
            trial = study.ask()
        try:
            study.tell(trial, objective(trial))
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        except (ChildDied, ValueError) as error:
            trial.set_user_attr("error", str(error))
            study.tell(trial, state=TrialState.FAIL)
            if not ends.is_set():  # else it was stopped
                tell(f"trial {trial.number} failed, of {trial.params}: {_reason(error)}")

    with ThreadPoolExecutor(parallel) as threads:
        running = [threads.submit(run_one) for _ in range(count)]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            ends.set()
            stop()
            raise


def _reason(error: Exception) -> str:
    """In a line; of a run that died how it ended, where its log is, and what it said of an error itself."""
    if not isinstance(error, ChildDied):
        return " ".join(str(error).split())
    how, _, log = str(error).partition(": ")
    said = [line for line in log.splitlines() if line.startswith("error: ")]
    return ": ".join([how, *(line.removeprefix("error: ") for line in said[-1:])])


def _of_one_type(column: pd.Series) -> pd.Series:
    """As a file of columns needs it: choices of several types, such as auto and 24, and lists as JSON."""
    kinds = {type(value) for value in column.dropna()}
    if len(kinds) < 2 and not kinds & {list, dict}:
        return column
    return column if kinds <= {int, float} else column.map(json.dumps, na_action="ignore")


def _conclude(study: optuna.Study, tracker: Tracker) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = [
        {"trial": t.number, "state": t.state.name, "value": t.value, **t.params, **t.user_attrs} for t in study.trials
    ]
    tracker.log_table(pd.DataFrame(rows).apply(_of_one_type), "trials.parquet")
    create_table_artifact([dict(row) for row in rows], key="sweep", description=study.study_name)
    complete = study.get_trials(states=[TrialState.COMPLETE])
    if not complete:
        raise ChildDied(f"none of the sweep's {len(rows)} runs ended well: see its logs")
    best = study.best_trial
    tracker.log_metrics(0, {"best/value": study.best_value})
    tracker.client.set_tag(tracker.run_id, "doubleflow.best", json.dumps(best.params))
    # Only the id is there of a trial of an older sweep.
    named = {name: value for name, value in best.user_attrs.items() if name in ("run", "mlflow_run_id")}
    return {"best": best.params, "value": study.best_value, **named, **numbers(study)}
