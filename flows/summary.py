"""What a finished run leaves and tells its owner."""

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from PIL import Image

from flows.run import TrainingRun
from tasks.clock import Stopwatch
from tasks.pictures import titled
from tasks.registry import register_weights
from tasks.update import TrainerGroup


@dataclass(frozen=True)
class Summary:
    """The end of a run.

    Attributes:
        run_name, mlflow_run_id, tracking_uri: where to look.
        iterations: in the weights.
        held_out_before, held_out_after: mean held-out reward of the first and the last validation.
        minutes: of this process; a resumed run counts its last part.
        weights: folder that diffusers loads.
        registered: the same weights in MLflow's model registry.
        picture: the same held-out prompts and noise before and after.
    """

    run_name: str
    mlflow_run_id: str
    tracking_uri: str
    iterations: int
    held_out_before: float
    held_out_after: float
    minutes: float
    weights: str
    registered: str
    picture: str

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for Prefect and JSON."""
        return asdict(self)

    def text(self) -> str:
        """For the terminal."""
        lines = [
            f"run            {self.run_name}",
            f"trained        {self.iterations} iterations, {self.minutes:.1f} minutes",
            *self._measured(),
            f"weights        {self.weights}",
            f"registered     {self.registered}",
            f"MLflow page    .venv/bin/mlflow ui --backend-store-uri {self.tracking_uri}",
            "Prefect page   PREFECT_HOME=.prefect .venv/bin/prefect server start",
        ]
        return "\n".join(f"  {line}" for line in lines)

    def _measured(self) -> list[str]:
        """What validation found; an offline run has none."""
        if math.isnan(self.held_out_after):
            return ["held-out       not measured: python -m flows.validate --weights (the folder below)"]
        return [
            f"held-out       {self.held_out_before:.3f} -> {self.held_out_after:.3f}",
            f"pictures       {self.picture}",
        ]


def summarise(run: TrainingRun, minutes: float) -> Summary:
    """Export the weights, draw before and after, and put both with the MLflow run."""
    weights, version = register_export(Stopwatch(), run)
    picture = run.config.run_dir / "before_after.png"
    drawn = run.validation_pictures()
    if drawn:
        steps = sorted(drawn)[:: max(len(drawn) - 1, 1)]
        sheet = titled([(f"held-out prompts, iteration {step}", Image.open(drawn[step])) for step in steps])
        sheet.save(picture)
        run.tracker.log_picture_file(sheet, picture.name)
    rewards = run.tracker.history("val/reward/mean")
    return Summary(
        run_name=run.config.run_name,
        mlflow_run_id=run.tracker.run_id,
        tracking_uri=run.tracker.uri,
        iterations=run.iteration,
        held_out_before=rewards[min(rewards)] if rewards else float("nan"),
        held_out_after=rewards[max(rewards)] if rewards else float("nan"),
        minutes=minutes,
        weights=str(weights),
        registered=f"models:/{version.name}/{version.version}",
        picture=str(picture),
    )


def register_export(clock: Stopwatch, run: TrainingRun) -> tuple[Path, ModelVersion]:
    """Export the present weights to the run's folder and to the registry, under the run's experiment name."""
    config = run.config
    with clock.stage("export"):
        folder = export(run.trainer, config.run_dir / "weights")
    lora = config.actor_rollout_ref.model.lora_rank > 0
    tags = {
        "doubleflow.run_name": config.run_name,
        "doubleflow.weights": "lora" if lora else "full",
        "doubleflow.base_model": str(config.actor_rollout_ref.model.path),
    }
    name = config.trainer.experiment_name
    return folder, register_weights(clock, run.tracker, name, folder, run.iteration, tags)


def export(trainer: TrainerGroup, folder: Path) -> Path:
    """The trained weights at `folder`, as diffusers loads them; written aside, then put in place of an older export."""
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    trainer.export(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return folder
