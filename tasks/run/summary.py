# SPDX-License-Identifier: Apache-2.0
"""What a finished run leaves and tells its owner."""

import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.utilities.urls import url_for

from tasks.actors.trainer_group import TrainerGroup
from tasks.records.flow_page import page_logger
from tasks.records.guards import HACKING_TAG
from tasks.records.headline import RUN_NAME_TAG, UNMOVED_TAG, run_address
from tasks.records.model_registry import HELD_OUT_TAG, address
from tasks.records.pictures import titled
from tasks.run.held_out_grids import kept_grids
from tasks.run.note import exported, write_note
from tasks.run.training import NO_STEP, TrainingRun
from tasks.run.watching import last_good_folder
from tasks.stages.log import register_weights
from tasks.system.files import put_in_place, remove
from tasks.system.late_mlflow import ModelVersion, RunInfo
from tasks.system.processes import beside_python
from tasks.system.stopwatch import Stopwatch


@dataclass(frozen=True)
class Summary:
    """The end of a run.

    Attributes:
        run_name, mlflow_run_id, tracking_uri: where to look.
        iterations: in the weights.
        held_out_before, held_out_after: mean held-out reward of the first and the last validation.
        validations: how many there were; NaN above where there was none.
        minutes: of this process; a resumed run counts its last part.
        weights: folder that diffusers loads; empty where what would be in it never moved.
        registered: the same weights in MLflow's model registry; empty likewise.
        base_model: folder of the weights that the run began with.
        picture: the same held-out prompts and noise before and after.
        mlflow_page, prefect_page: the run's, or the command that starts the server of its data base.
        gpu_minutes: of all recorded iterations, those of earlier processes too; 0 on the CPU.
        report: the run's page.
        why_unmoved: in a clause, where `weights` is empty.
    """

    run_name: str
    mlflow_run_id: str
    tracking_uri: str
    iterations: int
    held_out_before: float
    held_out_after: float
    validations: int
    minutes: float
    weights: str
    registered: str
    base_model: str
    picture: str
    mlflow_page: str = ""
    prefect_page: str = ""
    gpu_minutes: float = 0.0
    report: str = ""
    why_unmoved: str = NO_STEP

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for Prefect and JSON."""
        return asdict(self)

    def text(self) -> str:
        """For the terminal."""
        lines = [
            f"run            {self.run_name}",
            f"trained        {self.iterations} iterations, {self.minutes:.1f} minutes{self._spent()}",
            *self._measured(),
            *self._kept(),
            *([f"page           {self.report}"] if self.report else []),
            f"MLflow page    {self.mlflow_page}",
            f"Prefect page   {self.prefect_page}",
        ]
        return "\n".join(f"  {line}" for line in lines)

    def _spent(self) -> str:
        return f", {self.gpu_minutes:.1f} GPU-minutes" if self.gpu_minutes else ""

    def _measured(self) -> list[str]:
        """What validation found; an offline run has none."""
        if not self.validations:
            return ["held-out       not measured: python -m flows.validate --weights (the folder below)"]
        measured = f"{self.held_out_before:.3f} -> {self.held_out_after:.3f}"
        if self.validations == 1:
            measured = f"{self.held_out_after:.3f} (measured once)"
        return [f"held-out       {measured}", f"pictures       {self.picture}"]

    def _kept(self) -> list[str]:
        if not self.weights:
            return [f"weights        {unmoved(self.base_model, self.why_unmoved)}"]
        return [f"weights        {self.weights}", f"registered     {self.registered}"]


def unmoved(base_model: str, why: str) -> str:
    """What is said of a run whose weights still are those that it began with; `why` is a clause."""
    return f"neither exported nor registered: {why}, so they still are those of {base_model}"


def summarise(run: TrainingRun, minutes: float) -> Summary:
    """Export the weights, draw before and after, and put both with the MLflow run.

    Weights that have not moved, or whose average has not, are not exported: who found them would take them for trained
    ones.
    """
    base_model, weights, registered = str(run.config.actor_rollout_ref.model.path), "", ""
    why_unmoved = run.why_unmoved
    if why_unmoved is None:
        folder, version = register_export(Stopwatch(run.iteration), run)
        weights, registered = str(folder), address(version)
    else:
        run.tracker.tag(UNMOVED_TAG, unmoved(base_model, why_unmoved))
        page_logger().warning("the weights are %s", unmoved(base_model, why_unmoved))
    picture = run.config.run_dir / "before_after.png"
    drawn = kept_grids(run.config)
    if drawn:
        steps = sorted(drawn)[:: max(len(drawn) - 1, 1)]
        sheet = titled([(f"held-out prompts, iteration {step}", Image.open(drawn[step])) for step in steps])
        sheet.save(picture)
        run.tracker.log_picture_file(sheet, picture.name)
    note_weights = replace(exported(run.config, Path(weights)), registered=registered) if weights else None
    write_note(run, note_weights)
    rewards = run.tracker.history("val/reward/mean")
    return Summary(
        run_name=run.config.run_name,
        mlflow_run_id=run.tracker.run_id,
        tracking_uri=run.tracker.uri,
        iterations=run.iteration,
        held_out_before=rewards[min(rewards)] if rewards else float("nan"),
        held_out_after=rewards[max(rewards)] if rewards else float("nan"),
        validations=len(rewards),
        minutes=minutes,
        weights=weights,
        registered=registered,
        base_model=base_model,
        picture=str(picture),
        mlflow_page=mlflow_page(run.tracker.uri, run.tracker.client.get_run(run.tracker.run_id).info),
        prefect_page=prefect_page(),
        gpu_minutes=60 * run.spent.get("cost/gpu_hours", 0.0),
        report=str(run.report.path),
        why_unmoved=why_unmoved or "",
    )


def mlflow_page(uri: str, recorded: RunInfo) -> str:
    """The run's page on MLflow's server; where its records are files or a data base, the command that shows them."""
    page = run_address(uri, recorded.experiment_id, recorded.run_id)
    return page or f"{beside_python('mlflow')} ui --backend-store-uri {uri}"


def prefect_page() -> str:
    """This flow run's page on Prefect's server; of the temporary one, the command that starts one with its runs."""
    settings = get_current_settings()
    if settings.api.url is not None:
        return url_for("flow-run", flow_run.id) or settings.api.url
    home = os.environ.get("PREFECT_HOME", "").removeprefix(f"{Path.cwd()}/")
    return f"{f'PREFECT_HOME={home} ' if home else ''}{beside_python('prefect')} server start"


def register_export(clock: Stopwatch, run: TrainingRun) -> tuple[Path, ModelVersion]:
    """Export the present weights to the run's folder and to the registry, under the run's experiment name."""
    config = run.config
    with clock.stage("export"):
        folder = export(run.trainer, config.run_dir / "weights")
    name, weights = config.trainer.experiment_name, exported(config, folder)
    return folder, register_weights(clock, run.tracker, name, folder, run.iteration, version_tags(run), weights)


def version_tags(run: TrainingRun) -> dict[str, str]:
    """Tags of a version with the run's present weights; the held-out reward is among them if it is of these weights."""
    model = run.config.actor_rollout_ref.model
    tags = {
        RUN_NAME_TAG: run.config.run_name,
        "doubleflow.weights": "lora" if model.trains_lora else "full",
        "doubleflow.base_model": str(model.path),
    }
    flagged = run.guards.sentence(now=True)
    tags |= {HACKING_TAG: flagged} if flagged else {}
    if run.held_out_of == run.iteration and not math.isnan(run.held_out):  # else it is of weights before these
        tags[HELD_OUT_TAG] = f"{run.held_out:.3f}"
    return tags


def keep_good_weights(clock: Stopwatch, run: TrainingRun) -> None:
    """Export the present weights, which the guards found nothing against, in place of those kept before."""
    folder = last_good_folder(run.config, run.iteration)
    with clock.stage("export"):
        export(run.trainer, folder)
        remove(*(other for other in folder.parent.iterdir() if other != folder))


def export(trainer: TrainerGroup, folder: Path) -> Path:
    """The trained weights at `folder`, as diffusers loads them; an older export stays until they are whole."""
    with put_in_place(folder) as aside:
        trainer.export(aside)
    return folder
