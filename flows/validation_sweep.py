# SPDX-License-Identifier: Apache-2.0
"""The validation sweep: measure the registered weights that are not measured yet, and judge them."""

if __name__ == "__main__":
    from tasks.cli.deployed import refuse

    refuse("validation-sweep")

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
from prefect import flow, get_run_logger
from prefect.events import emit_event
from prefect.states import Completed, State

from tasks.actors.rollout_group import RolloutGroup
from tasks.config.errors import ConfigError
from tasks.config.measurement import Measurement
from tasks.config.overrides import NoChange
from tasks.config.tree import NO_OVERRIDES, Recipe, TrainOverrides
from tasks.records.comparison import ComparisonError, paired_gain
from tasks.records.model_registry import (
    ITERATION,
    REGRESSION,
    TABLE,
    Measurements,
    measurable_versions,
    promote,
    tag_regression,
)
from tasks.records.tracking import Tracker, mlflow_client
from tasks.run.flow_run_names import name_model
from tasks.run.iteration_prompts import have_encoded
from tasks.run.measuring import Cell, Verdict, cells, for_measuring, labelled, measurement_digest, metrics
from tasks.run.opening import MeasuringRun, apply_overrides, open_measurement
from tasks.run.preflight import Inputs, check_inputs, check_weights
from tasks.stages.validation import Validation, draw_and_score
from tasks.system.late_mlflow import ModelVersion
from tasks.system.stopwatch import Stopwatch

BASE = "base"
FOUND_WORSE = "Regression"
"""Name of the state of a sweep that found one. Its type is Completed: a finding is no failure of the sweep, and the
event `prefect.flow-run.Regression` tells an automation the two apart."""


@flow(name="validation-sweep", flow_run_name=name_model, persist_result=True, result_serializer="json")
def validation_sweep(
    config: Recipe, measurement: Measurement | None = None, overrides: TrainOverrides | NoChange = NO_OVERRIDES
) -> State:
    """Measure the registered weights of a recipe that are not measured yet, and judge each against base and best.

    All weights are drawn with the same prompts and noise, so every comparison is paired. The registry's alias
    `champion` moves to a version that is significantly better than the champion so far (the base model, where there
    is none), unless the guards of the run that trained it flagged it. A version that is significantly worse than
    either, or has rewards for too few prompts to say so, is tagged and sends the event `doubleflow.regression`; this
    flow run then ends as Regression, with a sentence for each. One whose files are no weights of the recipe's model, as
    of a LoRA of another rank or scale, is left out with a sentence. A sweep that was killed goes on with what is left.

    Args:
        config: the recipe; its experiment_name is the registered model.
        measurement: what is drawn and which rewards decide.
        overrides: changes to the config.
    """
    measurement = measurement or Measurement()
    config = for_measuring(apply_overrides(config, overrides), measurement)
    inputs = check_inputs(config, trains=False)
    config = inputs.config
    measured = Measurements(
        mlflow_client(config.tracking), config.tracking.experiment, measurement_digest(config, inputs, measurement)
    )
    name = config.trainer.experiment_name
    pending = [
        version
        for version in measurable_versions(measured.client, name)
        if not measured.leaves_out(version) and measured.of(version) is None
    ]
    if not pending:
        return Completed(message=f"every version of {name} is measured")
    drawn = list(cells(config, inputs, measurement))
    with open_measurement(config, inputs, f"validation-sweep-{name}") as run:
        measured = measured.scored_by(run.reward_versions, run.tracker.client)  # which waits for a server that is away
        sweep = Sweep(inputs, drawn, measurement, measured, run)
        if measured.run(BASE) is None:
            sweep.measure(None)
        versions = [*sweep.stale_champion(pending), *pending]
        regressions, unfit = sweep.measure_all(versions)
    if regressions:
        return Completed(name=FOUND_WORSE, message="; ".join([*regressions, *unfit]))
    return Completed(message="; ".join([f"measured {len(versions) - len(unfit)} versions of {name}", *unfit]))


class Unfit(ConfigError):
    """A version's files are no weights of the recipe's model."""


class Sweep:
    """The actors and records of one sweep."""

    def __init__(
        self,
        inputs: Inputs,
        drawn: Sequence[Cell],
        measurement: Measurement,
        measured: Measurements,
        run: MeasuringRun,
    ):
        self.config, self.inputs, self.cells = inputs.config, inputs, drawn
        self.measurement, self.measured, self.run = measurement, measured, run

    def stale_champion(self, pending: Sequence[ModelVersion]) -> list[ModelVersion]:
        """The champion, where other versions of the rewards have scored it than score today: the others' scores could
        not be compared with its own. One that `register` did not make is never measured."""
        found = self.measured.champion(self.config.trainer.experiment_name)
        if found is None or ITERATION not in found.tags:
            return []
        if self.measured.of(found) or self.measured.leaves_out(found):
            return []
        return [found] if found.version not in {version.version for version in pending} else []

    def measure_all(self, versions: Sequence[ModelVersion]) -> tuple[list[str], list[str]]:
        """What is wrong with those that got worse, and why others do not fit the recipe: these are left out from now
        on, so that one that was trained with other settings does not keep those behind it from being measured."""
        regressions, unfit = list[str](), list[str]()
        for version in versions:
            try:
                text = self.measure(version)
            except Unfit as error:
                said = f"{version.name} version {version.version} is not measured: {error}"
                get_run_logger().warning(said)
                self.measured.leave_out(version, str(error))
                unfit.append(said)
            else:
                regressions += [text] if text else []
        return regressions, unfit

    def measure(self, version: ModelVersion | None) -> str | None:
        """Draw, log and judge one version (None: the base model); says what is wrong with a version that got worse.

        The measurement's run ends only when the verdict is in the registry, so one that was killed is done again.
        """
        subject = BASE if version is None else f"{version.name}/{version.version}"
        tracker, clock = Tracker(self.config.tracking, subject, parent=self.run.tracker.run_id), Stopwatch(subject)
        with tracker.concluded():
            tracker.log_start(self.config, self.measured.tags(subject))
            with self._holding(version, tracker) as rollout:
                results = [(cell, self._draw(clock, rollout, cell)) for cell in self.cells]
            table = pd.concat([labelled(cell, result) for cell, result in results], ignore_index=True)
            step = 0 if version is None else int(version.tags[ITERATION])
            best = None if version is None else self._best_but(version)
            verdict = Verdict(None, None) if version is None else self._compare(table, best)
            pictures = {f"{cell.label}/seed_{cell.seed}".replace("/", "-"): result.sheet for cell, result in results}
            tracker.log_step(step, metrics(table, verdict, self.cells[0].guided_by), pictures)
            tracker.log_table(table, TABLE)
            return None if version is None else self._judge(version, verdict, best, tracker)

    @contextmanager
    def _holding(self, version: ModelVersion | None, tracker: Tracker) -> Iterator[RolloutGroup]:
        """The workers with these weights. Until the block's end a worker that died can read them anew."""
        if version is None:
            yield self.run.rollout
            return
        with self.measured.exported(tracker, version, self.config.trainer.default_local_dir) as folder:
            try:
                check_weights(self.inputs.model_config, folder)
            except ConfigError as error:
                raise Unfit(str(error)) from error
            self.run.rollout.load_exported(folder)
            yield self.run.rollout

    def _draw(self, clock: Stopwatch, rollout: RolloutGroup, cell: Cell) -> Validation:
        pipeline = cell.drawn_by(self.config.actor_rollout_ref.rollout.validation_pipeline())
        rollout = rollout.on(cell.embeddings)
        have_encoded(clock, rollout, cell.prompts, pipeline)
        return draw_and_score(clock, rollout, self.run.reward, cell.prompts, self.measurement.n, pipeline, cell.seed)

    def _best_but(self, version: ModelVersion) -> ModelVersion | None:
        champion = self.measured.champion(version.name)
        return None if champion is None or champion.version == version.version else champion

    def _compare(self, table: pd.DataFrame, best: ModelVersion | None) -> Verdict:
        tables = {"base": self.measured.table(BASE), "best": None}
        if best is not None:
            tables["best"] = self.measured.table(f"{best.name}/{best.version}")
        try:
            gains = {
                name: None if other is None else paired_gain(table, other, "reward", self.measurement.confidence)
                for name, other in tables.items()
            }
        except ComparisonError as error:
            return Verdict(None, None, str(error))
        return Verdict(gains["base"], gains["best"])

    def _judge(
        self, version: ModelVersion, verdict: Verdict, best: ModelVersion | None, tracker: Tracker
    ) -> str | None:
        if verdict.better:
            if best is not None and ITERATION in best.tags and verdict.best is None:
                doubt: str | None = f"version {best.version}, the champion, could not be measured as it was"
            else:
                doubt = promote(self.measured.client, version)
            told = "is the new champion" if doubt is None else f"is better and not made the champion: {doubt}"
            get_run_logger().info("%s version %s %s", version.name, version.version, told)
        if verdict.wrong is None:
            return None
        text = f"{version.name} version {version.version} {verdict.wrong}"
        get_run_logger().warning(text)
        is_below_best = best is not None and verdict.best is not None and verdict.best.high < 0
        subject = f"{best.name}/{best.version}" if best is not None and is_below_best else BASE
        tag_regression(self.measured.client, REGRESSION, text, version, tracker.run_id)
        emit_event(
            REGRESSION,
            resource={"prefect.resource.id": f"doubleflow.model.{version.name}.{version.version}"},
            payload={"message": text, "run": tracker.run_id, "against": self.measured.run(subject)},
        )
        return text
