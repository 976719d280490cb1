# SPDX-License-Identifier: Apache-2.0
"""MLflow: what a run was, what it measured, what it drew."""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from PIL import Image
from prefect.exceptions import TerminationSignal

from models.config.section import Section
from models.errors import DoubleflowError, no_room_for
from tasks.config.tracking import PASSWORD_OF_MLFLOW, TrackingConfig
from tasks.records.flow_run_end import heed_no_signal
from tasks.records.headline import HEADLINE, experiment_tags, headline
from tasks.records.lineage import FIRST, Lineage, Start
from tasks.records.moved_records import DATABASE, FILES, require_own_files
from tasks.records.owner import OWNER, close_dead_runs, owner_tags
from tasks.records.patience import FULL, LocalClient, PatientClient, few_retries, why_away
from tasks.records.pictures import still
from tasks.records.second_trackers import SecondTrackers
from tasks.records.tracking_address import TrackingAway, is_server
from tasks.system.credentials import refuse_password_in_url
from tasks.system.late_mlflow import MlflowClient, artifact_repository_registry, mlflow, mlflow_tags

STEP_MARK = "trainer/global_step"
"""Logged last of a step's records, so its history says which steps are complete."""
PARAM_LIMIT = 6000
HALF_MADE = re.compile(r"table \w+ already exists|duplicate column name")
"""What a database says to MLflow, which makes its tables in steps, of a step that was half done before."""
EXISTS, MISSING = "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"
GONE = (
    "which is to go on: restore it (`mlflow runs restore --run-id`), set MLFLOW_TRACKING_URI to the MLflow that has "
    "it, or go on in a new one"
)
LAST_WORDS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": 2, "MLFLOW_HTTP_REQUEST_TIMEOUT": 10}
"""Of MLflow's settings, while a run that fails says so; nobody waits for more than half a minute."""
NO_TIME = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": 0, "MLFLOW_HTTP_REQUEST_TIMEOUT": 3}
"""The same where SIGTERM ends the run, which is to be heeded in seconds, or where MLflow is known to be away."""


class HalfMade(DoubleflowError, ValueError):
    """MLflow's database lacks tables, and MLflow cannot make them."""


class RunGone(DoubleflowError, ValueError):
    """MLflow has no longer the run that is to be continued."""


def mlflow_client(config: TrackingConfig) -> MlflowClient:
    """MLflow as configured, or as MLFLOW_TRACKING_URI says; runs and registry are in the same place.

    Raises:
        CredentialError: the address holds a password, which summaries, records and errors would repeat.
        OSError: the disk is full on which MLflow makes its database.
        HalfMade: it was when MLflow did.
    """
    uri = config.address
    for field, value in (("tracking.uri", config.uri), ("MLFLOW_TRACKING_URI", uri)):
        refuse_password_in_url(value, field, PASSWORD_OF_MLFLOW)
    try:
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:
        if FULL in str(error):
            raise no_room_for(uri) from error
        if HALF_MADE.search(str(error)):
            raise HalfMade(
                f"MLflow's database {uri} has some of its tables only, as where the disk was full when it made them: "
                "remove its file if it is new, else put a copy of before in its place"
            ) from error
        raise


def logged_steps(client: MlflowClient, run_id: str) -> set[int]:
    """Steps of a run whose records are complete."""
    return {point.step for point in client.get_metric_history(run_id, STEP_MARK)}


class Tracker:
    """One MLflow run, which survives the process: a resumed run continues it, and no step is logged twice.

    Args:
        config: where MLflow is.
        run_name: of a new run.
        run_id: the run to continue; None starts a new one.
        parent: run that a new one is nested under.
    """

    def __init__(self, config: TrackingConfig, run_name: str, run_id: str | None = None, parent: str | None = None):
        """Start the run in MLflow, or go on with it.

        Raises:
            RunGone: MLflow has none of that id.
            RecordsMoved: MLflow's database is this folder's, and leads to the files of another one.
        """
        client = mlflow_client(config)
        self.uri = uri = client.tracking_uri
        if config.artifacts is None and uri == f"sqlite:///{DATABASE}":
            require_own_files(Path())
        self._plain = client if is_server(uri) else cast(MlflowClient, LocalClient(client))
        self.patience = PatientClient(self._plain, uri, config.max_outage_s)
        self.client = cast(MlflowClient, self.patience)
        experiment = self._experiment(config, uri)
        close_dead_runs(self.client, [experiment])
        self.run_id = self._create(experiment, run_name, parent) if run_id is None else self._there(run_id)
        self.client.log_batch(
            self.run_id, tags=[mlflow.entities.RunTag(name, value) for name, value in owner_tags().items()]
        )
        self.client.update_run(self.run_id, status="RUNNING")
        self.also = SecondTrackers()
        self._pictures: dict[str, set[int]] = {}
        self.logged_steps = logged_steps(self.client, self.run_id)

    @cached_property
    def experiment_id(self) -> str:
        """The run's experiment: of one that goes on the first start's, whatever the config says now."""
        return str(self.client.get_run(self.run_id).info.experiment_id)

    def log_start(self, config: Section, tags: Mapping[str, str]) -> None:
        """The configuration as config.json, the part of it that somebody chose as parameters, and tags.

        A field is a parameter if a recipe or an override sets it, or if its value is not its default: MLflow's pages
        show every parameter beside every picture, and a whole config has more than a hundred fields.

        MLflow's parameters are final. A resumed run may differ in settings that do not shape it, such as how long it
        goes on: the parameters stay those of the first start, and a tag resumed.<name> holds the present value.
        """
        whole = config.model_dump(mode="json")
        present = {name: str(value)[:PARAM_LIMIT] for name, value in as_parameters(whole).items()}
        chosen = [
            *as_parameters(config.model_dump(mode="json", exclude_unset=True)),
            *as_parameters(config.model_dump(mode="json", exclude_defaults=True)),
        ]
        recorded = self.client.get_run(self.run_id).data
        first = recorded.params
        chosen = [name for name in dict.fromkeys(chosen) if name in present]  # no sections in which nothing is set
        params = [] if first else [mlflow.entities.Param(name, present[name]) for name in chosen]
        again = [name for name in dict.fromkeys([*first, *chosen]) if first and name in present]
        changed = {
            f"resumed.{name}": present[name]
            for name in again
            if first.get(name) != present[name] or f"resumed.{name}" in recorded.tags
        }
        labels = [mlflow.entities.RunTag(name, value) for name, value in {**tags, **changed}.items()]
        self.client.log_batch(self.run_id, params=params, tags=labels)
        self.client.log_dict(self.run_id, whole, "config.json")

    def log_lineage(self, lineage: Lineage, iteration: int, config: Section | None = None) -> None:
        """Where this start of the run came from, and its config, under the iteration that its records begin after."""
        start = self._start_after(iteration)
        tags = lineage.tags | lineage.start_tag(start)
        self.client.log_batch(self.run_id, tags=[mlflow.entities.RunTag(name, value) for name, value in tags.items()])
        self.client.log_inputs(self.run_id, lineage.datasets)
        self.client.log_dict(self.run_id, lineage.environment, f"lineage/{start}/environment.json")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "code.patch").write_bytes(lineage.patch)
            if config is not None:
                (Path(folder) / "config.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2))
            self.client.log_artifacts(self.run_id, folder, f"lineage/{start}")

    def _start_after(self, iteration: int) -> Start:
        """Which start this is. It replaces none before it but a first one that has recorded nothing: `FIRST`, which
        `flows.reproduce` does again, is the one that made the first records."""
        if iteration == 0 and not self.logged_steps:
            return FIRST
        there = {Path(path).name for path in self.listed("lineage")}
        return next(start for start in map(Start, repeat(iteration), count(1)) if str(start) not in there)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        pictures: Mapping[str, Image.Image] | None = None,
        tables: Mapping[str, pd.DataFrame] | None = None,
        albums: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> bool:
        """Everything of one step, once: a step that is logged already is left as it is, and the answer is False.

        Args:
            step: iteration; 0 is before training.
            metrics: all of them go in one request, after the artifacts; `headline` copies the foremost.
            pictures: image key -> picture, for MLflow's step slider.
            tables: name -> rows, as <name>/000010.parquet.
            albums: name -> pictures uint8 [H, W, 3], as <name>/000010/0000.png and so on.
        """
        if step in self.logged_steps:
            return False
        self.log_files(step, pictures, tables, albums)
        self.also.log(step, {**headline(metrics), **metrics})
        self.log_metrics(step, {**headline(metrics), **metrics, **self.also.metrics(), STEP_MARK: float(step)})
        self.logged_steps.add(step)
        return True

    def log_files(
        self,
        step: int,
        pictures: Mapping[str, Image.Image] | None = None,
        tables: Mapping[str, pd.DataFrame] | None = None,
        albums: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> None:
        """What a step has beside its metrics, also albums of pictures [H, W, 3], see `log_step`; what is there is
        written again."""
        for key, picture in (pictures or {}).items():
            self._log_picture(key, picture, step)
        for name, table in (tables or {}).items():
            self.log_table(table, f"{name}/{step:06d}.parquet")
        for name, pictures_of_step in (albums or {}).items():
            self._log_album(pictures_of_step, f"{name}/{step:06d}")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step in one request."""
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.run_id, metrics=[mlflow.entities.Metric(name, v, now, step) for name, v in metrics.items()]
        )

    def tag(self, name: str, value: str) -> None:
        """Set a tag of the run."""
        self.client.set_tag(self.run_id, name, value)

    def log_table(self, table: pd.DataFrame, path: str) -> None:
        """A table as a parquet artifact at `path`."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / Path(path).name
            table.to_parquet(local, index=False)
            folder_there = Path(path).parent.as_posix()
            self.client.log_artifact(self.run_id, str(local), None if folder_there == "." else folder_there)

    def tables(self, name: str) -> dict[int, pd.DataFrame]:
        """Step -> the table of that name, see `log_files`."""
        paths = [path for path in self.listed(name) if path.endswith(".parquet")]
        with tempfile.TemporaryDirectory() as folder:
            return {
                int(Path(path).stem): pd.read_parquet(self.client.download_artifacts(self.run_id, path, folder))
                for path in paths
            }

    def log_bytes(self, content: bytes, path: str) -> None:
        """A file as an artifact at `path`, which names a folder, too."""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / Path(path).name
            local.write_bytes(content)
            self.client.log_artifact(self.run_id, str(local), Path(path).parent.as_posix())

    def _log_album(self, pictures: Sequence[np.ndarray], path: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for number, picture in enumerate(pictures):
                Image.fromarray(still(picture)).save(f"{folder}/{number:04d}.png", compress_level=1)
            self.log_folder(Path(folder), path)

    def log_folder(self, folder: Path, path: str | None = None) -> None:
        """A folder's content as artifacts, at `path` or at the top."""
        self.client.log_artifacts(self.run_id, str(folder), path)

    def log_picture_file(self, picture: Image.Image, path: str) -> None:
        """One picture as an artifact at `path`."""
        self.client.log_image(self.run_id, picture, artifact_file=path)

    def log_last(self, file: Path) -> None:
        """A file as an artifact at the top, of a run that fails: see `LAST_WORDS`."""
        with few_retries(LAST_WORDS):
            self._plain.log_artifact(self.run_id, str(file))

    def latest(self) -> dict[str, float]:
        """Every metric's newest value."""
        return dict(self.client.get_run(self.run_id).data.metrics)

    def history(self, name: str) -> dict[int, float]:
        """Step -> value of one metric."""
        return {metric.step: metric.value for metric in self.client.get_metric_history(self.run_id, name)}

    @contextmanager
    def concluded(self, ends_flow_run: bool = False) -> Iterator[None]:
        """Afterwards the run is FINISHED, FAILED (an error) or KILLED (an interrupt or SIGTERM), never RUNNING: also
        where that comes while MLflow is waited for, to be told that all went well.

        Args:
            ends_flow_run: nothing of the flow run is left to do but its end. Once the run is FINISHED no signal is
                heeded until Prefect has that, too: it would say of a run that is whole that it crashed.
        """
        try:
            yield
            self.client.set_terminated(self.run_id, "FINISHED")
            if ends_flow_run:
                heed_no_signal()
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt | TerminationSignal) else "FAILED"
            try:
                with few_retries(NO_TIME if isinstance(error, TerminationSignal | TrackingAway) else LAST_WORDS):
                    self._plain.set_terminated(self.run_id, status)
            except (Exception, KeyboardInterrupt) as of_mlflow:  # what ended the run is the error that is raised
                reason = why_away(of_mlflow) or " ".join(str(of_mlflow).split()) or type(of_mlflow).__name__
                error.add_note(f"MLflow at {self.uri} was not told that run {self.run_id} is {status}: {reason}")
            raise

    def _log_picture(self, key: str, picture: Image.Image, step: int) -> None:
        """Once a step, also when a run killed in the middle of its records comes back to it."""
        if key not in self._pictures:
            self._pictures[key] = self.picture_steps(key)
        if step not in self._pictures[key]:
            name = f"{HEADLINE}/{key}"
            self.also.picture(step, name, picture)
            self.client.log_image(self.run_id, picture, key=name, step=step)
            self._pictures[key].add(step)

    def picture_steps(self, key: str) -> set[int]:
        """Steps that have a picture of that key; MLflow keeps them in the files' names."""
        return set(self.picture_files(key))

    def picture_files(self, key: str) -> dict[int, list[str]]:
        """Step -> artifact paths of its picture of that key, the picture and MLflow's small copy of it."""
        found: dict[int, list[str]] = {}
        for path in self.listed("images"):
            match = re.match(rf"(?:{HEADLINE}~)?{re.escape(key)}([+%])step\1(\d+)\1", Path(path).name)
            if match:
                found.setdefault(int(match[2]), []).append(path)
        return found

    def _experiment(self, config: TrackingConfig, uri: str) -> str:
        found = self.client.get_experiment_by_name(config.experiment)
        if found is None:
            try:
                return self._create_experiment(config, uri)
            except mlflow.exceptions.MlflowException as error:
                exists = error.error_code == EXISTS
                found = self.client.get_experiment_by_name(config.experiment) if exists else None
                if found is None:
                    raise
        for name, value in experiment_tags().items():
            if name not in found.tags:  # made before there were such tags, or by hand
                self.client.set_experiment_tag(found.experiment_id, name, value)
        return found.experiment_id

    def _create_experiment(self, config: TrackingConfig, uri: str) -> str:
        """Raises MlflowException, `EXISTS`, where another run's first start has made it meanwhile."""
        root = FILES if config.artifacts is None and uri.startswith("sqlite:") else config.artifacts
        if root is not None and ":" not in root and not is_server(uri):
            root = Path(root).resolve().as_uri()  # MLflow would take %41 in a folder's name for an A
        return self.client.create_experiment(config.experiment, artifact_location=root, tags=experiment_tags())

    def _there(self, run_id: str) -> str:
        """The id of a run that is to go on."""
        try:
            deleted = self.client.get_run(run_id).info.lifecycle_stage == mlflow.entities.LifecycleStage.DELETED
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != MISSING:
                raise
            raise RunGone(f"MLflow at {self.uri} has no run {run_id}, {GONE}") from error
        if deleted:
            raise RunGone(f"MLflow at {self.uri} has deleted the run {run_id}, {GONE}")
        return run_id

    def _create(self, experiment: str, run_name: str, parent: str | None) -> str:
        """A run that has its owner from the first moment on: one that is killed in the next is seen to be dead.

        It is known again by when this process began it: a second one would be RUNNING for as long as the process is.
        """
        tags = ({mlflow_tags.MLFLOW_PARENT_RUN_ID: parent} if parent else {}) | owner_tags()
        begun = int(time.time() * 1000)
        this = f"attributes.start_time = {begun} AND tags.`{OWNER}` = '{tags[OWNER]}'"
        run = self.patience.once(
            lambda client: client.search_runs([experiment], this),
            lambda client: client.create_run(experiment, begun, tags, run_name),
        )
        return str(run.info.run_id)

    def remove(self, paths: Sequence[str]) -> None:
        """Delete artifacts, files or folders.

        Raises:
            MlflowException: the artifact store cannot delete.
            TrackingAway: it did not answer for too long.
        """
        root = self.client.get_run(self.run_id).info.artifact_uri
        store = artifact_repository_registry.get_artifact_repository(root, tracking_uri=self.uri)
        for path in paths:
            self.patience.asked(partial(store.delete_artifacts, path))

    def listed(self, folder: str | None = None) -> list[str]:
        """Paths of what is in an artifact folder, or beside them all; none where there is no such folder."""
        return [item.path for item in self.client.list_artifacts(self.run_id, folder)]


def as_parameters(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, as MLflow has parameters: lists whole, as JSON, and no colon in a name."""
    fields: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}".replace(":", "/")
        if isinstance(value, Mapping) and value:
            fields |= as_parameters(value, f"{path}.")
        else:
            fields[path] = json.dumps(value) if isinstance(value, list | dict) else value
    return fields
