# SPDX-License-Identifier: Apache-2.0
"""What MLflow's pages show first: an experiment's kind and columns, and a run's metrics that most people want.

MLflow orders the sections of a run's metrics page by their names, and its table of runs begins with no metric at all.
So the metrics that tell how a run goes have copies in a section that sorts first, and every experiment has a saved view
of its runs with these columns.
"""

import json
from collections.abc import Mapping
from typing import Any

HEADLINE = "1_headline"
"""Section of metrics and pictures; the digit sorts it before all others."""
COPIES = {
    "reward": "critic/rewards/mean",
    "held_out": "val/reward/mean",
    "gpu_hours": "cost/gpu_hours",
    "hours": "cost/hours",
}
"""Name in the section -> the metric it repeats."""
PICTURES = {"validation": 0, "samples": 1}
"""Grids of a training run, in the section too -> the first step that has one."""
HELD_OUT = f"{HEADLINE}/held_out"
COLUMNS = {"reward": 150, "held_out": 150, "images_per_second": 215, "gpu_hours": 165, "hours": 150}
"""Of the table of runs -> width; MLflow cuts a longer name off."""
DIGITS = 4
"""Significant ones of a copy: MLflow's table and lists show all that a number has."""
REPORT = "report.html"
"""A run's own page: in its folder, and at the top of its artifacts."""
RUN_NAME_TAG = "doubleflow.run_name"
"""Of a run and of its registered versions: the name of its folder, which the digest ends."""
FLOW_RUN_TAG = "doubleflow.prefect_flow_run"
"""Of a run: the address of the flow run that worked on it last, where Prefect's server stays."""
UNMOVED_TAG = "doubleflow.weights_never_moved"
VIEW = "doubleflow"
"""Id of the saved view, as it stands in a link."""
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
MACHINE_LEARNING = "machine_learning"
"""MLflow's pages for trained models, as its links and its browser memory name them; the others are for prompts."""


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The copies of a step's metrics, rounded for reading; of what the step did not measure there are none.

    1_headline/images_per_second is of the whole step and all devices, where perf/throughput is of one device.
    """
    found = {name: metrics[source] for name, source in COPIES.items() if source in metrics}
    images, seconds = metrics.get("perf/total_num_images"), metrics.get("perf/time_per_step")
    if images is not None and seconds:
        found["images_per_second"] = images / seconds
    return {f"{HEADLINE}/{name}": float(f"{value:.{DIGITS}g}") for name, value in found.items()}


def runs_view() -> dict[str, Any]:
    """The table of runs with the headline metrics, as MLflow's pages keep the choice of columns."""
    widths = {f"metrics.`{HEADLINE}/{name}`": width for name, width in COLUMNS.items()}
    return {"selectedColumns": [*widths], "columnWidths": widths, "columnOrder": [*widths]}


def experiment_tags() -> dict[str, str]:
    """The tags of every experiment: what it is for, the metric that counts, and the saved view of its runs."""
    saved = {"name": "Reward and cost", "createdAt": 0, "updatedAt": 0, "state": json.dumps(runs_view())}
    return {KIND_TAG: KIND, "mlflow.experiment.primaryMetric.name": HELD_OUT, VIEW_TAG: json.dumps(saved)}


def runs_page(experiment_id: str) -> str:
    """The table of an experiment's runs with the headline metrics: the part of a link after the server's address."""
    return f"/#/experiments/{experiment_id}/runs?workflowType={MACHINE_LEARNING}&viewStateShareKey={VIEW}"


def run_page(experiment_id: str, run_id: str, tab: str = "") -> str:
    """A run's page, or one of its tabs such as "artifacts/report.html", likewise."""
    place = f"/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{place}{f'/{tab}' if tab else ''}?workflowType={MACHINE_LEARNING}"


def run_address(uri: str, experiment_id: str, run_id: str, tab: str = "") -> str | None:
    """The whole link to it on the server at `uri`; None where the records are files or a data base."""
    return f"{uri.rstrip('/')}{run_page(experiment_id, run_id, tab)}" if uri.startswith("http") else None
