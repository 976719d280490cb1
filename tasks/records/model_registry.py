# SPDX-License-Identifier: Apache-2.0
"""MLflow's model registry: exported weights as versions that diffusers loads as they are."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pandas as pd

from tasks.records.guards import HACKING_TAG
from tasks.records.history import RunHistory
from tasks.records.notes import Weights, version_note
from tasks.records.tracking import Tracker
from tasks.system.late_mlflow import LoggedModel, MlflowClient, ModelVersion, mlflow
from tasks.system.processes import COPY, named_after_this_process

CHAMPION = "champion"
ITERATION = "doubleflow.iteration"
HELD_OUT_TAG = "doubleflow.held_out_reward"
LAYOUT = "diffusers"
TABLE = "measurement.parquet"
LEFT_OUT = "doubleflow.left_out"
"""Of a version that a measurement of some settings, whose digest it names first, cannot be made of; and why not."""
REGRESSION = "doubleflow.regression"
"""Name of the event that automations react to, and of the tag on the run and the version."""


def register(
    tracker: Tracker, name: str, folder: Path, iteration: int, tags: Mapping[str, str], weights: Weights | None = None
) -> ModelVersion:
    """Put exported weights into the registry, once for each iteration of a run.

    The version's files are `folder` itself: `load_lora_weights` or `from_pretrained` takes what
    `mlflow.artifacts.download_artifacts("models:/<name>/<version>")` gives. A run that was killed in between finishes
    what it began.

    Args:
        tracker: the run that made them.
        name: of the registered model; made if there is none.
        folder: what `export_weights` wrote.
        iteration: the last one in the weights.
        tags: of the version; its description tells `HELD_OUT_TAG`, where that is among them.
        weights: what they are, for the description; None leaves that empty.
    """
    client = tracker.client
    try:
        client.create_registered_model(name)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise

    there = partial(_registered, run_id=tracker.run_id, name=name, iteration=iteration)
    if registered := there(client):
        return _described(client, registered[0], weights)
    # A registered model's name may have a point, a logged model's may not.
    model = _logged_model(tracker, f"{name.replace('.', '-')}-{iteration:06d}", folder, iteration)
    version = tracker.patience.once(
        there,
        lambda asked: asked.create_model_version(
            name,
            source=model.artifact_location,  # "models:/<id>" would be looked up at MLflow's default address
            run_id=tracker.run_id,
            model_id=model.model_id,
            tags={ITERATION: str(iteration), **tags},
        ),
    )
    return _described(client, version, weights)


def _registered(client: MlflowClient, run_id: str, name: str, iteration: int) -> list[ModelVersion]:
    """The version of an iteration of a run, if it is there."""
    found = client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
    return [version for version in found if version.tags.get(ITERATION) == str(iteration)]


def _described(client: MlflowClient, version: ModelVersion, weights: Weights | None) -> ModelVersion:
    """With a description, which tells the version's own address and so comes after it."""
    if weights is None or version.description:
        return version
    here = replace(weights, registered=address(version))
    note = version_note(here, int(version.tags[ITERATION]), version.tags.get(HELD_OUT_TAG))
    return client.update_model_version(version.name, version.version, note)


def address(version: ModelVersion) -> str:
    """models:/<name>/<version>."""
    return f"models:/{version.name}/{version.version}"


def _logged_model(tracker: Tracker, name: str, folder: Path, iteration: int) -> LoggedModel:
    """The run's output model of that name, with its files; one that was begun is completed."""
    client = tracker.client
    experiment = client.get_run(tracker.run_id).info.experiment_id
    this = f"name = '{name}' AND source_run_id = '{tracker.run_id}'"
    model = tracker.patience.once(
        lambda asked: asked.search_logged_models([experiment], this),
        lambda asked: asked.create_logged_model(experiment, name, tracker.run_id, model_type=LAYOUT),
    )
    if model.status != "READY":
        client.log_model_artifacts(model.model_id, str(folder))
        _log_output(tracker, model, iteration)
        client.finalize_logged_model(model.model_id, "READY")
    return model


def _log_output(tracker: Tracker, model: LoggedModel, iteration: int) -> None:
    """The run's page leads to the model. Once: MLflow refuses the output that a run has already, and would refuse it
    each time that a run which was killed behind this goes on."""
    output, run_id = mlflow.entities.LoggedModelOutput(model.model_id, iteration), tracker.run_id

    def logged(asked: MlflowClient) -> list[None]:
        known = asked.get_run(run_id).outputs
        return [None for there in known.model_outputs if there == output] if known else []

    tracker.patience.once(logged, lambda asked: asked.log_outputs(run_id, [output]))


def doubt_versions(tracker: Tracker, name: str, first: int, text: str) -> str | None:
    """Say of the versions that a run has registered since an iteration, that one included, that its guards flagged it.

    Returns:
        the one among them that was the champion, and is so no more; None where none was.
    """
    flagged = list[str]()
    for version in tracker.client.search_model_versions(f"name = '{name}' AND run_id = '{tracker.run_id}'"):
        if int(version.tags.get(ITERATION, -1)) >= first:
            tracker.client.set_model_version_tag(name, version.version, HACKING_TAG, text)
            flagged.append(str(version.version))
    best = champion(tracker.client, name)
    if best is None or str(best.version) not in flagged:
        return None
    tracker.client.delete_registered_model_alias(name, CHAMPION)
    return str(best.version)


def measurable_versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """The versions of a registered model that `register` made: the champion, then the others from the oldest on."""
    found = [v for v in client.search_model_versions(f"name = '{name}'") if ITERATION in v.tags]
    best = champion(client, name)
    return sorted(found, key=lambda v: (best is None or v.version != best.version, int(v.version)))


def champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """The version with the alias `champion`; None if there is none."""
    try:
        return client.get_model_version_by_alias(name, CHAMPION)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def promote(client: MlflowClient, version: ModelVersion) -> str | None:
    """Make a version the champion, unless the guards of the run that trained it flagged it, or the champion is one that
    `register` did not make: with that nothing was compared.

    Returns:
        Why it was not made the champion; None where it was.
    """
    best = champion(client, version.name)
    if best is not None and ITERATION not in best.tags:
        return (
            f"version {best.version}, the champion, was registered by other means and is never measured: move or "
            "remove its alias by hand"
        )
    doubt = client.get_model_version(version.name, version.version).tags.get(HACKING_TAG)
    if doubt is None:
        client.set_registered_model_alias(version.name, CHAMPION, version.version)
    return doubt


def tag_regression(client: MlflowClient, tag: str, text: str, version: ModelVersion, measurement: str) -> None:
    """Say on the version, on the run that trained it and on the run that measured it that it got worse."""
    client.set_model_version_tag(version.name, version.version, tag, text)
    for run_id in (version.run_id, measurement):
        if run_id:  # a version that was not made by `register` may be of no run
            client.set_tag(run_id, tag, text)


class Measurements:
    """Finished measurements, found in MLflow by what was measured and by how.

    Args:
        client: MLflow.
        experiment: where the measurements' runs are.
        digest: of everything that two measurements must share to be compared, and that is known before rewards load.
        reward_versions: tags of the rewards' versions, which they must share, too; None finds those of any.
    """

    def __init__(
        self, client: MlflowClient, experiment: str, digest: str, reward_versions: Mapping[str, str] | None = None
    ):
        """Nothing is asked of MLflow yet."""
        self.client, self.experiment, self.digest, self.reward_versions = client, experiment, digest, reward_versions

    def scored_by(self, reward_versions: Mapping[str, str], client: MlflowClient) -> "Measurements":
        """Only those by these versions of the rewards, found by another client."""
        return Measurements(client, self.experiment, self.digest, reward_versions)

    def tags(self, subject: str) -> dict[str, str]:
        """The tags of the run that measures `subject`."""
        return self._found_by(subject) | dict(self.reward_versions or {})

    def _found_by(self, subject: str) -> dict[str, str]:
        found = {"doubleflow.measurement": self.digest, "doubleflow.subject": subject}
        if self.reward_versions is None:
            return found
        versions = json.dumps(dict(self.reward_versions), sort_keys=True)  # too long to be searched for
        return found | {"doubleflow.reward_versions": hashlib.sha256(versions.encode()).hexdigest()[:12]}

    def run(self, subject: str) -> str | None:
        """Id of the finished run that measured `subject`: "base", or "<model>/<version>"."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return None
        tags = [f"tags.`{name}` = '{value}'" for name, value in self._found_by(subject).items()]
        query = " AND ".join([*tags, "attributes.status = 'FINISHED'"])
        runs = self.client.search_runs([experiment.experiment_id], query, max_results=1)
        return runs[0].info.run_id if runs else None

    def of(self, version: ModelVersion) -> str | None:
        """Id of the finished run that measured this version."""
        return self.run(f"{version.name}/{version.version}")

    def leave_out(self, version: ModelVersion, why: str) -> None:
        """Note on a version that it cannot be measured so."""
        self.client.set_model_version_tag(version.name, version.version, LEFT_OUT, f"{self.digest}: {why}")

    def leaves_out(self, version: ModelVersion) -> bool:
        """Was it found that the version cannot be measured so?"""
        return str(version.tags.get(LEFT_OUT, "")).startswith(f"{self.digest}: ")

    def champion(self, name: str) -> ModelVersion | None:
        """See `champion`."""
        return champion(self.client, name)

    def table(self, subject: str) -> pd.DataFrame | None:
        """The pictures' rewards of a finished measurement."""
        run_id = self.run(subject)
        return None if run_id is None else RunHistory(self.client, run_id).parquet(TABLE)

    @contextmanager
    def exported(self, tracker: Tracker, version: ModelVersion, beside: Path) -> Iterator[Path]:
        """A version's files: where MLflow keeps them, or as a copy in the folder `beside` until the block's end.

        Of a process that was killed, `make prune` finds the copy.

        Args:
            tracker: of the run that reads them, which waits for a server that is away.
        """
        if urlsplit(version.source).scheme in ("", "file"):
            yield Path(tracker.patience.download_version(version)).resolve()
            return
        beside.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=named_after_this_process(COPY), dir=beside) as folder:
            yield Path(tracker.patience.download_version(version, folder)).resolve()
