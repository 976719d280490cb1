# SPDX-License-Identifier: Apache-2.0
"""A recipe, trained in a process of its own, and what MLflow has of it."""

import subprocess
import sys
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.config.recipes import changed_recipe
from tasks.config.tree import TrainConfig


def train(recipe: str, changes: Sequence[str]) -> tuple[TrainConfig, MlflowClient, Run]:
    """Train with these changes, `field=value` each, unless that is done; where to look, and the finished run."""
    command = [sys.executable, "-m", "flows.train", recipe]
    subprocess.run([*command, *(part for change in changes for part in ("--set", change))], check=True)
    config = changed_recipe(recipe, changes)
    client = MlflowClient(config.tracking.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    (run,) = client.search_runs(
        [experiment.experiment_id],
        f"tags.`doubleflow.run_name` = '{config.run_name}' AND attributes.status = 'FINISHED'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    return config, client, run
