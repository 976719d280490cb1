"""MLflow's model registry: exported weights as versions that diffusers loads as they are."""

from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.clock import Stopwatch
from tasks.tracking import Tracker

CHAMPION = "champion"
ITERATION = "doubleflow.iteration"
LAYOUT = "diffusers"


def register(tracker: Tracker, name: str, folder: Path, iteration: int, tags: Mapping[str, str]) -> ModelVersion:
    """Put exported weights into the registry, once for each iteration of a run.

    The version's files are `folder` itself: `load_lora_weights` or `from_pretrained` takes what
    `mlflow.artifacts.download_artifacts("models:/<name>/<version>")` gives. A run that was killed in between finishes
    what it began.

    Args:
        tracker: the run that made them.
        name: of the registered model; made if there is none.
        folder: what `export_weights` wrote.
        iteration: the last one in the weights.
        tags: of the version.
    """
    client = tracker.client
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
    for version in client.search_model_versions(f"name = '{name}' AND run_id = '{tracker.run_id}'"):
        if version.tags.get(ITERATION) == str(iteration):
            return version
    model = _logged_model(tracker, f"{name}-{iteration:06d}", folder, iteration)
    return client.create_model_version(
        name,
        source=f"models:/{model.model_id}",
        run_id=tracker.run_id,
        model_id=model.model_id,
        tags={ITERATION: str(iteration), **tags},
    )


def _logged_model(tracker: Tracker, name: str, folder: Path, iteration: int) -> LoggedModel:
    """The run's output model of that name, with its files; one that was begun is completed."""
    client = tracker.client
    experiment = client.get_run(tracker.run_id).info.experiment_id
    begun = client.search_logged_models([experiment], f"name = '{name}' AND source_run_id = '{tracker.run_id}'")
    model = begun[0] if begun else client.create_logged_model(experiment, name, tracker.run_id, model_type=LAYOUT)
    if model.status != "READY":
        client.log_model_artifacts(model.model_id, str(folder))
        client.log_outputs(tracker.run_id, [LoggedModelOutput(model.model_id, iteration)])
        client.finalize_logged_model(model.model_id, "READY")
    return model


@task(name="register", cache_policy=NO_CACHE, persist_result=False)
def register_weights(
    clock: Stopwatch, tracker: Tracker, name: str, folder: Path, iteration: int, tags: Mapping[str, str]
) -> ModelVersion:
    """See `register`."""
    with clock.stage("register"):
        return register(tracker, name, folder, iteration, tags)
