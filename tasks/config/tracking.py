# SPDX-License-Identifier: Apache-2.0
"""`tracking`: where a run's record goes."""

import os
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from models.config.bounds import LONGEST_WAIT_S, MOST_BATCH, MOST_ITERATIONS, ExperimentName
from models.config.section import Section
from tasks.system.credentials import refuse_password_in_url

TrackerName = Literal["tensorboard", "wandb"]
PASSWORD_OF_MLFLOW = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or use the database's own password file (as ~/.pgpass)"
)


class TrackingConfig(Section):
    """MLflow, and what gets a copy of what it gets."""

    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI; MLFLOW_TRACKING_URI overrides it.")
    artifacts: str | None = Field(None, description="Artifact root of a new experiment; null is ./mlruns.")
    experiment: ExperimentName = Field("doubleflow", description="MLflow experiment.")
    max_outage_s: float = Field(
        600.0,
        ge=0,
        le=LONGEST_WAIT_S,
        description="Seconds that an MLflow server may be away, or another program may hold MLflow's database: the run "
        "waits for it, which its log says, with rollout workers that share GPUs asleep. Then it ends, and the same "
        "command continues it.",
    )
    pictures: int = Field(
        32,
        ge=0,
        le=MOST_BATCH,
        description="Pictures of each iteration that are kept, one by one and as a grid; 0 keeps none.",
    )
    keep_pictures: int | None = Field(
        None,
        ge=1,
        le=MOST_ITERATIONS,
        description="Newest iterations whose pictures stay, one by one and as a grid; older ones are removed from "
        "MLflow, which the run's log and tag say. Tables and metrics stay. Null keeps all.",
    )
    keep_validation_grids: int | None = Field(
        None,
        ge=1,
        le=MOST_ITERATIONS,
        description="Newest validation grids that stay beside the first, in MLflow and in the run's folder. Null "
        "keeps all.",
    )
    also: tuple[TrackerName, ...] = Field(
        (),
        description="Trackers that get a training run's metrics and grids beside MLflow, which stays the record: "
        "tensorboard, wandb (docs/platform.md).",
    )

    @property
    def address(self) -> str:
        """Where MLflow is: MLFLOW_TRACKING_URI, or `uri`. An empty variable says nothing: MLflow would take it for a
        database of its own choice."""
        return os.environ.get("MLFLOW_TRACKING_URI") or self.uri

    @field_validator("uri", "artifacts")
    @classmethod
    def _no_password(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is not None:
            refuse_password_in_url(address, f"tracking.{info.field_name}", PASSWORD_OF_MLFLOW)
        return address

    @field_validator("also")
    @classmethod
    def _each_once(cls, names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len({*names}) < len(names):
            raise ValueError(f"also names a tracker twice: {', '.join(names)}")
        return names
