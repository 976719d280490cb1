# SPDX-License-Identifier: Apache-2.0
"""What a training run tells on its page in MLflow: its name, where it came from, and its description."""

from collections.abc import Iterator
from pathlib import Path

from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from models.config.view import read_architecture
from tasks.config.identity import shaping
from tasks.config.tree import TrainConfig
from tasks.records.headline import FLOW_RUN_TAG, REPORT, run_page
from tasks.records.notes import LEARNT, RunNote, Weights
from tasks.records.tracking import as_parameters
from tasks.run.training import TrainingRun
from tasks.system.late_mlflow import mlflow_tags

FILES = {REPORT: "report", "before_after.png": "before and after"}
"""Artifacts that the description leads to -> in words."""
MOST_CHANGES, MOST_LETTERS = 4, 30
"""That a run's name tells, and of each value."""


def run_label(config: TrainConfig, recipe: TrainConfig) -> str:
    """The run's name in MLflow: its recipe, what shapes the weights otherwise than there, and the config's digest."""
    values = as_parameters(shaping(config))
    before = as_parameters(shaping(recipe))
    changed = {path: str(value)[:MOST_LETTERS] for path, value in values.items() if before.get(path) != value}
    changes = [f"{path.rpartition('.')[2]}={value}" for path, value in changed.items()]
    if len(changes) > MOST_CHANGES:
        changes[MOST_CHANGES:] = [f"and {len(changes) - MOST_CHANGES} more"]
    return " ".join([config.trainer.experiment_name, *changes, f"({config.digest()})"])


def source_tags() -> dict[str, str]:
    """The flow's file, as MLflow's pages show it, and the address of the flow run that works on the run.

    A temporary server of Prefect has no address: it ends with the flow run.
    """
    if not flow_run.flow_name:
        return {}
    file = f"flows/{flow_run.flow_name.replace('-', '_')}.py"
    page = url_for("flow-run", obj_id=flow_run.id)
    return {mlflow_tags.MLFLOW_SOURCE_NAME: file, mlflow_tags.MLFLOW_SOURCE_TYPE: "LOCAL"} | (
        {FLOW_RUN_TAG: page} if page else {}
    )


def exported(config: TrainConfig, folder: Path) -> Weights:
    """What the run's exported weights are."""
    model = config.actor_rollout_ref.model
    return Weights(str(folder.resolve()), read_architecture(model.path), str(model.path), model.trains_lora)


def write_note(run: TrainingRun, weights: Weights | None = None) -> None:
    """Describe the run as it stands in MLflow; what somebody has written there instead stays.

    Args:
        weights: the exported ones, where there are any.
    """
    tracker = run.tracker
    recorded = tracker.client.get_run(tracker.run_id)
    tags = recorded.data.tags
    if not tags.get(mlflow_tags.MLFLOW_RUN_NOTE, LEARNT).startswith(LEARNT):
        return
    note = RunNote(
        held_out=tracker.history("val/reward/mean"),
        reward=tracker.history("critic/rewards/mean"),
        spent=recorded.data.metrics,
        on_gpu=run.config.gpus > 0,
        commit=tags.get(mlflow_tags.MLFLOW_GIT_COMMIT, ""),
        changed=tags.get("doubleflow.git_dirty") == "true",
        weights=weights,
        links=dict(_links(run, recorded.info.experiment_id, tags.get(FLOW_RUN_TAG), weights)),
    )
    tracker.tag(mlflow_tags.MLFLOW_RUN_NOTE, note.text())


def _links(
    run: TrainingRun, experiment: str, flow_run_page: str | None, weights: Weights | None
) -> Iterator[tuple[str, str]]:
    there = run.tracker.listed("")
    for name, words in FILES.items():
        if name in there:
            yield words, run_page(experiment, run.tracker.run_id, f"artifacts/{name}").removeprefix("/")
    if weights is not None and weights.registered:
        name, _, version = weights.registered.removeprefix("models:/").partition("/")
        yield "registered version", f"#/models/{name}/versions/{version}"
    if flow_run_page:
        yield "Prefect's flow run", flow_run_page
