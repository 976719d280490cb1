# SPDX-License-Identifier: Apache-2.0
"""Do the first iterations of a recorded run again, from its commit and its data, and say what came out the same."""

if __name__ == "__main__":  # before the imports that take seconds, so that a wrong command is answered at once
    from tasks.cli.stopping import end_now, handle

    handle(end_now)
    from tasks.cli.commands import main

    main("reproduce")

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed, State

from models.config.actor import OptimConfig
from models.errors import DoubleflowError
from models.import_paths import check_allowed, check_allowed_program
from tasks.actors.interpreter import FIELD as INTERPRETER
from tasks.actors.reward_model import check_allowed_server
from tasks.config.data import LIVE
from tasks.config.errors import ConfigError
from tasks.config.identity import paced_by_length
from tasks.config.reward import RewardModelConfig
from tasks.config.tracking import TrackingConfig
from tasks.records.history import HistoryError, RunHistory, comparable
from tasks.records.lineage import FIRST, dvc_hashes, other_packages
from tasks.records.tracking import mlflow_client
from tasks.system.access import dvc_environment, shared_server
from tasks.system.late_mlflow import mlflow_tags

EQUAL, CLOSE, DIFFERENT = "equal", "within tolerance", "different"
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
WORKTREE = "doubleflow-"
END_SECONDS = 60
"""For a command to end in order when this one is ended."""


class ReproduceError(DoubleflowError, RuntimeError):
    """What has to be done again cannot be: a command of git, DVC or the training failed."""


@dataclass(frozen=True)
class Outcome:
    """How one metric came out: `difference` is the largest abs(new - old) / max(1, abs(old)), inf if one is missing."""

    metric: str
    steps: int
    difference: float
    outcome: str


@flow(name="reproduce", flow_run_name="reproduce {run}", persist_result=True, result_serializer="json")
def reproduce(run: str, iterations: int = 3, tolerance: float = 1e-5, tracking: TrackingConfig | None = None) -> State:
    """Check out a run's commit and data beside this repository, do its first iterations again, and compare.

    The commit's differing files come from the run's record too. The new run is in the same MLflow experiment and has
    the table of outcomes as `reproduction.json`. On CPU everything should be equal; on a GPU, within tolerance. A
    metric that is different fails the flow run.

    This runs code that the MLflow server names: do it only for runs whose server and author you trust. The patch must
    have the digest that the run's tag holds; whose code it is and which files it changes is logged before it runs.

    Args:
        run: MLflow run id of a training run.
        iterations: how many of its first iterations.
        tolerance: largest difference of a metric, relative where its value is above 1.
        tracking: where MLflow is.
    """
    tracking = tracking or TrackingConfig()
    client = mlflow_client(tracking)
    history = RunHistory(client, run)
    config = shortened(history.first_config(), iterations, f"reproduce-{run[:8]}")
    check_recorded(history, iterations)
    if other := other_packages(json.loads(history.content("lineage/000000/environment.json"))):
        get_run_logger().warning("the environment is not the run's: %s", other)
    if named := check_named_code(config):
        get_run_logger().warning("the recorded config of run %s has this code run as well: %s", run, ", ".join(named))
    with worktree(history) as folder:
        check_out_data(history, folder)
        new = RunHistory(client, _train(folder, config, _absolute(client.tracking_uri)))
    outcomes = compare_metrics(history.metrics(), new.metrics(), iterations, tolerance)
    rows = as_rows(outcomes)
    client.set_tag(new.run_id, "doubleflow.reproduces", run)
    client.log_dict(new.run_id, {"of": run, "iterations": iterations, "metrics": rows}, "reproduction.json")
    create_table_artifact(rows, key="reproduction", description=f"{history.name}, {iterations} iterations")
    counts = {kind: sum(o.outcome == kind for o in outcomes) for kind in (EQUAL, CLOSE, DIFFERENT)}
    message = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    if counts[DIFFERENT]:
        worst = max(outcomes, key=lambda outcome: outcome.difference)
        return Failed(message=f"{message}; the largest difference is {worst.metric}'s, {worst.difference:.3g}")
    return Completed(message=message)


def shortened(config: dict[str, Any], iterations: int, name: str) -> dict[str, Any]:
    """The run's config for its first iterations alone, under another name.

    Raises:
        ConfigError: the run is shorter, or paces itself by its length.
    """
    trainer, total = config["trainer"], config["trainer"]["total_training_steps"]
    if not 1 <= iterations <= total:
        raise ConfigError(f"iterations is {iterations}, but the run has {total}: give 1 to {total}")
    policy = config["actor_rollout_ref"]  # as another version may have written it: not validated by this one
    optim = OptimConfig.model_construct(**policy["actor"]["optim"])
    paced = paced_by_length(policy["rollout"]["algo"]["sde_window_mode"], optim)
    if paced is not None and iterations < total:
        raise ConfigError(f"{paced} paces itself by the run's length: iterations must be all {total}")
    changes = {"total_training_steps": iterations, "experiment_name": name, "default_local_dir": "runs"}
    return config | {"trainer": trainer | changes}


def check_recorded(history: RunHistory, iterations: int) -> None:
    """The run has recorded that many iterations, or there would be nothing to compare. Raises ConfigError."""
    trained = history.trained
    if trained == 0:
        raise ConfigError(
            f"run {history.run_id}, {history.name}, has recorded no iteration of a training: give one that has"
        )
    if iterations > trained:
        raise ConfigError(f"iterations is {iterations}, but the run has recorded {trained}: give 1 to {trained}")


@contextmanager
def worktree(history: RunHistory) -> Iterator[Path]:
    """The repository at the run's commit with its differing files, in a folder that goes afterwards."""
    commit, patch = recorded_code(history)
    private = Path(mkdtemp(prefix=f"{WORKTREE}{os.getpid()}-"))  # only this user's; the number is for `make prune`
    folder = private / "code"
    try:
        _call("git", "worktree", "add", "--detach", str(folder), commit)
        files = patched_files(patch, folder)
        get_run_logger().warning(
            "reproduce runs other code: commit %s by %s, and what %s recorded of run %s in %s: %s",
            *(commit[:12], _author(commit), history.run.info.user_id or "an unknown user", history.run_id),
            *(history.client.tracking_uri, f"changes in {', '.join(files)}" if files else "no changes"),
        )
        if files:
            (private / "code.patch").write_bytes(patch)
            _call("git", "-C", str(folder), "apply", str(private / "code.patch"))
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], capture_output=True)
        shutil.rmtree(private, ignore_errors=True)


def recorded_code(history: RunHistory) -> tuple[str, bytes]:
    """(commit, patch) of the run's first start.

    Raises:
        HistoryError: it did not run from a repository, or the patch is not the one that was recorded.
    """
    tags = history.run.data.tags
    if tags.get(mlflow_tags.MLFLOW_GIT_COMMIT) is None:
        raise HistoryError(f"run {history.run_id} has no git commit: it did not run from a repository")
    patch = history.content("lineage/000000/code.patch")
    found = f"sha256:{hashlib.sha256(patch).hexdigest()}"
    commit, _, digest = tags.get(FIRST.tag, "").partition(" ")
    if not digest:
        raise HistoryError(
            f"run {history.run_id} has no tag {FIRST.tag}, which holds its patch's digest: it is older than these "
            f"tags, or somebody removed it. Read lineage/000000/code.patch; if you trust it, set the tag to "
            f"'{tags[mlflow_tags.MLFLOW_GIT_COMMIT]} {found}'"
        )
    if digest != found:
        raise HistoryError(
            f"lineage/000000/code.patch of run {history.run_id} has {found}, but its tag {FIRST.tag} says {digest}: "
            "somebody changed it after the run, so its code is not run"
        )
    return commit, patch


def patched_files(patch: bytes, folder: Path) -> list[str]:
    """The files that it adds, changes or removes."""
    if not patch:
        return []
    command = ("git", "-C", str(folder), "apply", "--numstat", "-z", "-")
    listed = subprocess.run(command, input=patch, capture_output=True)
    if listed.returncode:
        raise HistoryError(f"its code.patch is no patch: {listed.stderr.decode(errors='replace').strip()}")
    return [row.rpartition(b"\t")[2].decode(errors="backslashreplace") for row in listed.stdout.split(b"\0") if row]


def check_named_code(config: Any) -> list[str]:
    """What a recorded config, which another version may have written, names to be imported or run.

    Raises:
        ModuleNotAllowed: this machine does not allow one of them.
    """
    policy = _section(config, "actor_rollout_ref")
    libraries = str(_section(policy, "model").get("external_lib") or "").split(",")
    modules = [*import_paths(config), *(name.strip() for name in libraries if name.strip())]
    for path in modules:
        check_allowed(path)
    programs = [str(python)] if (python := _section(policy, "actor").get("python")) else []
    for program in programs:
        check_allowed_program(INTERPRETER, program)
    if served := _section(_section(config, "reward"), "reward_model"):
        model = RewardModelConfig.model_construct(**served)
        check_allowed_server(model)
        programs += [*model.command] or [str(model.python)] if model.command or model.python else []
        programs += model.arguments
    return [*modules, *programs]


def _section(tree: Any, name: str) -> Mapping[str, Any]:
    """A part of a config; empty where there is none."""
    found = tree.get(name) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def import_paths(tree: Any) -> list[str]:
    """The texts and names of a config that are import paths, "package.module:object"."""
    if isinstance(tree, str):
        return [tree] if IMPORT_PATH.fullmatch(tree) else []
    if isinstance(tree, Mapping):
        tree = [*tree, *tree.values()]
    return [path for item in tree for path in import_paths(item)] if isinstance(tree, Sequence) else []


def _author(commit: str) -> str:
    return subprocess.check_output(["git", "show", "--no-patch", "--format=%an <%ae>", commit], text=True).strip()


def check_out_data(history: RunHistory, folder: Path) -> None:
    """Have DVC put in place what the run read, and nothing else: of its other outputs many were never made here.

    Raises:
        HistoryError: what the run read is not known, or is another file at its commit.
        ReproduceError: this repository's DVC does not have it.
    """
    if history.run.inputs is None:
        raise HistoryError(f"run {history.run_id} has no inputs in MLflow, so what data it read is not known")
    read = {item.dataset.name: item.dataset.digest for item in history.run.inputs.dataset_inputs}
    hashes = dvc_hashes(folder)
    for name, digest in read.items():
        if hashes.get(name, "")[:36] != digest:
            raise HistoryError(f"the run read {name} {digest}, but its commit has {hashes.get(name)}")
    environment = os.environ | dvc_environment(folder.parent)
    cache = Path(_call(sys.executable, "-m", "dvc", "cache", "dir").strip()).resolve()
    local = ("cache", "dir", "--local", str(cache))
    _call(sys.executable, "-m", "dvc", *local, folder=folder, environment=environment)
    if read:  # without names DVC would check everything out
        _call(sys.executable, "-m", "dvc", "checkout", *read, folder=folder, environment=environment)
    config = history.config()
    embeddings = [] if config["data"]["embeddings"] == LIVE else [config["data"]["embeddings"]]
    policy = _section(config, "actor_rollout_ref")
    others = (policy["model"].get("initial_weights"), policy["actor"].get("teacher_path"))
    weights = (policy["model"]["path"], *filter(None, others))
    for path in (config["data"]["prompts"], *embeddings, *weights):
        if not (folder / path).exists():
            raise HistoryError(f"{path} is not under DVC at the run's commit, so it cannot be had again")


def compare_metrics(
    old: Mapping[str, dict[int, float]], new: Mapping[str, dict[int, float]], iterations: int, tolerance: float
) -> list[Outcome]:
    """Every metric of the old run up to that iteration, but seconds and bytes, against the new run's."""
    outcomes = []
    for name, points in comparable(old).items():
        expected = {step: value for step, value in points.items() if step <= iterations}
        if not expected:
            continue
        found = new.get(name, {})
        difference = max(_difference(value, found.get(step)) for step, value in expected.items())
        outcome = EQUAL if difference == 0 else CLOSE if difference <= tolerance else DIFFERENT
        outcomes.append(Outcome(name, len(expected), difference, outcome))
    return outcomes


def as_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For JSON, which has no infinity: a difference from what is missing is none there."""
    return [vars(one) | {"difference": one.difference if math.isfinite(one.difference) else None} for one in outcomes]


def _difference(old: float, new: float | None) -> float:
    if new is None or math.isnan(old) != math.isnan(new):
        return math.inf
    if old == new or math.isnan(old):
        return 0.0
    # Divided by what is infinite nothing is a number, which `max` would pass over.
    return abs(new - old) / max(1.0, abs(old)) if math.isfinite(old) else math.inf


def _train(folder: Path, config: dict[str, Any], tracking_uri: str) -> str:
    """Train in the worktree, with its own code; the new MLflow run's id."""
    file = folder / ".doubleflow-config.json"
    file.write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(folder), "MLFLOW_TRACKING_URI": tracking_uri}
    environment |= dvc_environment(folder.parent) | shared_server()
    _call(sys.executable, "-m", "flows.train", "--config", str(file), folder=folder, environment=environment)
    (record,) = folder.glob("runs/*/run.json")
    return str(json.loads(record.read_text())["mlflow_run_id"])


def _absolute(uri: str) -> str:
    """A relative sqlite file as seen from any folder."""
    kind, separator, path = uri.partition(":///")
    return f"{kind}{separator}{Path(path).resolve()}" if kind == "sqlite" else uri


def _call(*command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints. Raises ReproduceError with its own reason."""
    pipe = subprocess.PIPE  # a session of its own: a terminal's Ctrl-C would reach it, too, and it is told below
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        printed, errors = process.communicate()
    except BaseException:  # killed, as `subprocess.run` does it, a run could not tell MLflow that it ends
        process.terminate()
        try:
            process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()
        raise
    if process.returncode:
        shown = " ".join(command).replace(sys.executable, "python")
        raise ReproduceError(f"`{shown}` failed in {folder or Path.cwd()}: {_reason(printed + errors)}")
    return printed


def _reason(output: str) -> str:
    """The sentences of git, DVC and this project where there are some, else the end of what was printed."""
    told = re.sub(r"^continue: .*\n?", "", output, flags=re.MULTILINE)  # in a folder that will not be there
    said = re.split(r"^(?:ERROR|error|fatal): ", told, flags=re.MULTILINE)[1:]
    return " ".join("; ".join(said).split())[-1500:] if said else output.strip()[-3000:]
