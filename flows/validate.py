# SPDX-License-Identifier: Apache-2.0
"""Validation of one set of weights, as a run of its own."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("validate")

from contextlib import nullcontext
from pathlib import Path

from prefect import flow

from tasks.config.overrides import NoChange
from tasks.config.tree import NO_OVERRIDES, Recipe, TrainOverrides
from tasks.run.flow_run_names import name_validation
from tasks.run.iteration_prompts import have_encoded
from tasks.run.opening import apply_overrides, open_measurement
from tasks.run.preflight import check_inputs, check_weights
from tasks.stages.validation import draw_and_score
from tasks.system.files import unreplaced
from tasks.system.stopwatch import Stopwatch


@flow(name="validate", flow_run_name=name_validation, persist_result=False)
def validate(
    config: Recipe, weights: Path | None = None, overrides: TrainOverrides | NoChange = NO_OVERRIDES
) -> dict[str, float]:
    """Measure one set of weights on the held-out prompts, and log it as an MLflow run of its own.

    The noise is the same as in training's validation and for every set of weights, so two results of the same
    config can be compared prompt by prompt.

    Args:
        config: as for training; model, rollout, reward and data are read.
        weights: folder that a run exported; left out, the base model is measured. Where a training replaces it
            meanwhile, the measurement ends with an error.
        overrides: changes to the config.
    """
    config = apply_overrides(config, overrides)
    inputs = check_inputs(config, trains=False)
    config = inputs.config
    if weights is not None:
        check_weights(inputs.model_config, weights)
    settings = config.actor_rollout_ref.rollout
    name = f"validate-{config.run_name}-{weights.parent.name if weights else 'base'}"
    with open_measurement(config, inputs, name, {"doubleflow.weights": str(weights or "base")}) as run:
        pipeline = settings.validation_pipeline()
        clock = Stopwatch(weights or "base")
        have_encoded(clock, run.rollout, inputs.test, pipeline)
        # Each worker reads the weights, and one that Ray starts again does so later.
        with nullcontext() if weights is None else unreplaced(weights):
            if weights is not None:
                run.rollout.load_exported(weights.resolve())
            result = draw_and_score(clock, run.rollout, run.reward, inputs.test, settings.val_kwargs.n, pipeline)
        run.tracker.log_step(0, result.metrics(), {"validation": result.sheet}, {"validation": result.samples})
    return result.metrics()
