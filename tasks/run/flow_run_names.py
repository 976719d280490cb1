# SPDX-License-Identifier: Apache-2.0
"""Names of flow runs on Prefect's pages: the recipe, and what is done with it."""

from prefect.runtime import deployment, flow_run

from tasks.config.common import combined
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig


def name_training() -> str:
    """Recipe and run: "quickstart 3fa7de75", or with an experiment_name of its own "quickstart lr-3fa7de75"."""
    config = _config()
    recipe = deployment.name or config.trainer.experiment_name
    return f"{recipe} {config.run_name.removeprefix(f'{recipe}-')}"


def name_validation() -> str:
    """Recipe and weights."""
    config, weights = _config(), flow_run.parameters.get("weights")
    return f"{config.trainer.experiment_name} {weights or 'base'}"


def name_model() -> str:
    """The registered model that a validation sweep measures."""
    return _config().trainer.experiment_name


def name_search() -> str:
    """The name of the search that a sweep makes."""
    return str(flow_run.parameters["search"].name)


def _config() -> TrainConfig:
    """The flow run's config; without its overrides where they make none, which the flow itself then tells."""
    given = flow_run.parameters
    config: TrainConfig = given["config"]
    try:
        return config.with_changes(combined(given.get("common"), given.get("overrides")))
    except ConfigError:
        return config
