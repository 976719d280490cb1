"""Validation of one set of weights, as a run of its own."""

from pathlib import Path

from prefect import flow

from flows.checks import ConfigError, check_inputs
from flows.config import TrainConfig, TrainOverrides
from flows.run import check_resources, run_tags, start_rollout
from tasks.clock import Stopwatch
from tasks.cluster import ray_cluster
from tasks.lineage import lineage
from tasks.reward import RewardGroup
from tasks.tracking import Tracker
from tasks.validate import validate as measure


@flow(name="validate", persist_result=False)
def validate(
    config: TrainConfig, weights: Path | None = None, overrides: TrainOverrides | None = None
) -> dict[str, float]:
    """Measure one set of weights on the held-out prompts, and log it as an MLflow run of its own.

    The noise is the same as in training's validation and for every set of weights, so two results of the same
    config can be compared prompt by prompt.

    Args:
        config: as for training; model, rollout, reward and data are read.
        weights: folder that a run exported; left out, the base model is measured.
        overrides: changes to the config.
    """
    config = config.with_changes(overrides)
    inputs = check_inputs(config, trains=False)
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"weights is {weights}, which is not a folder: give one that a run exported")
    settings = config.actor_rollout_ref.rollout
    name = f"validate-{config.run_name}-{weights.parent.name if weights else 'base'}"
    tracker, clock = Tracker(config.tracking, name), Stopwatch()
    with tracker.concluded(), ray_cluster(config.ray_init, config.trainer.full_determinism):
        check_resources(config, trains=False)
        rollout, reward = start_rollout(config, inputs), RewardGroup(config.reward)
        if weights is not None:
            rollout.load_exported(weights.resolve())
        tags = run_tags(config, inputs, reward) | {"doubleflow.weights": str(weights or "base")}
        tracker.log_start(config, tags)
        tracker.log_lineage(lineage(config.data_read()), 0)
        pipeline = settings.validation_pipeline()
        result = measure(clock, rollout, reward, inputs.test, settings.val_kwargs.n, pipeline)
        tracker.log_step(0, result.metrics(), {"validation": result.sheet}, {"validation": result.samples})
    return result.metrics()


if __name__ == "__main__":
    from flows.recipes import validate_command

    validate_command(validate)
