# SPDX-License-Identifier: Apache-2.0
"""Where a run came from: code, data, packages and hardware, exactly enough to do it again."""

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
import yaml

from models.errors import DoubleflowError
from tasks.records.code_difference import CodeDifference, GitError, code_difference, git
from tasks.system.late_mlflow import DatasetInput, mlflow, mlflow_tags

CODE = Path(__file__).resolve().parents[2]
DIGEST = re.compile(r"[\w.-]+")
TAG = "doubleflow.lineage."
LOCK = "dvc.lock"
MOST_TOLD = 8
"""Packages of another version that are named."""
REMEDY = "make it anew with `dvc commit`, or take the repository's with `git checkout`"


class LineageError(DoubleflowError, RuntimeError):
    """Where the data came from cannot be told."""


class Start(NamedTuple):
    """One start of a run. Starts sort in the order in which they were.

    A step is recorded once: step i by the last start with an `iteration` below i, step 0 by the first one. Older
    versions named a start by its checkpoint, after which an earlier start may have recorded more.

    Attributes:
        iteration: the last that was recorded when it began.
        number: from 1 on, of those that began there: only the last of them has recorded what comes next.
    """

    iteration: int
    number: int = 1

    def __str__(self) -> str:
        """Its folder in `lineage`: 000010, or 000010-2."""
        return f"{self.iteration:06d}" + (f"-{self.number}" if self.number > 1 else "")

    @classmethod
    def parsed(cls, text: str) -> "Start | None":
        """From what `str` gave; None where it is something else."""
        found = re.fullmatch(r"(\d{6,})(?:-(\d+))?", text)
        return cls(int(found[1]), int(found[2] or 1)) if found else None

    @property
    def tag(self) -> str:
        """Name of its tag."""
        return f"{TAG}{self}"


FIRST = Start(0)


@dataclass(frozen=True)
class Lineage:
    """One start of a run.

    Attributes:
        tags: the commit, its branch, and whether files differed from it.
        patch: what differed, for `git apply` on the commit; new files included.
        environment: python, package versions, hardware, and files that the patch leaves out, with the reason.
        datasets: the DVC outputs that the run reads, with their hashes.
    """

    tags: dict[str, str]
    patch: bytes
    environment: dict[str, Any]
    datasets: list[DatasetInput]

    def start_tag(self, start: Start) -> dict[str, str]:
        """Tag of that start: its commit and the digest of its patch; nothing without a commit."""
        commit = self.tags.get(mlflow_tags.MLFLOW_GIT_COMMIT)
        return {start.tag: f"{commit} sha256:{hashlib.sha256(self.patch).hexdigest()}"} if commit else {}


def lineage(data: Sequence[Path], code: Path = CODE) -> Lineage:
    """The lineage of a run that starts now; needs a running Ray for the cluster's hardware.

    Args:
        data: files and folders that the run reads, relative to the working directory.
        code: the repository's root.
    """
    commit = _commit(code)
    difference = code_difference(code) if commit else CodeDifference()
    dirty = bool(difference.patch or difference.untracked_left_out or difference.tracked_left_out)
    tags = {mlflow_tags.MLFLOW_GIT_COMMIT: commit, "doubleflow.git_dirty": str(dirty).lower()} if commit else {}
    if branch := _branch(code):
        tags[mlflow_tags.MLFLOW_GIT_BRANCH] = branch
    environment = {
        "python": platform.python_version(),
        "packages": packages(),
        "hardware": hardware(),
        "untracked_left_out": difference.untracked_left_out,
        "tracked_left_out": difference.tracked_left_out,
    }
    hashes = dvc_hashes(Path("."))
    used = [path for path in hashes if any(Path(path) == d or Path(path) in d.parents for d in data)]
    return Lineage(tags, difference.patch, environment, [_dataset(path, hashes[path]) for path in used])


@functools.cache
def packages() -> dict[str, str]:
    """Name -> version of what is installed, read once a process."""
    files = [found.metadata for found in metadata.distributions()]  # each asked once: it is read anew every time
    return {file["Name"]: file["Version"] for file in sorted(files, key=lambda file: file["Name"].lower())}


def other_packages(environment: dict[str, Any]) -> str:
    """What is installed here in another version than a lineage's environment has, Python among it; empty if nothing."""
    before = {"python": environment.get("python"), **environment.get("packages", {})}
    now = {"python": platform.python_version(), **packages()}
    other = [
        f"{name} was {version} and is {now.get(name, 'not there')}"
        for name, version in before.items()
        if version is not None and now.get(name) != version
    ]
    rest = f" and {len(other) - MOST_TOLD} more" if len(other) > MOST_TOLD else ""
    return ", ".join(other[:MOST_TOLD]) + rest


def hardware() -> dict[str, Any]:
    """This machine and the Ray cluster's machines."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    return {
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "nodes": [{name: value for name, value in node.items() if not name.startswith("node:")} for node in nodes],
    }


def dvc_hashes(root: Path) -> dict[str, str]:
    """Path -> hash of every DVC output under `root`: the stages' of its dvc.lock and of those below data/, and those
    that were `dvc add`ed.

    Raises:
        LineageError: one of DVC's files is none of DVC's.
    """
    return dict(_dvc_outputs(root))


def _dvc_outputs(root: Path) -> Iterator[tuple[str, str]]:
    below = sorted(Path(folder, name) for folder, _, names in os.walk(root / "data") for name in names)
    for file in (root / LOCK, *below):
        if file.name == LOCK:
            yield from _outputs_of_stages(root, file)
        elif file.suffix == ".dvc":
            for path, digest in _outs(_read(file), file):
                yield _from(root, file.parent, path), digest


def _outputs_of_stages(root: Path, lock: Path) -> Iterator[tuple[str, str]]:
    """What a dvc.lock has recorded; its paths are those of dvc.yaml beside it, of each stage's `wdir`."""
    stages = _section(_read(lock), "stages", lock) if lock.is_file() else {}
    pipeline = lock.with_name("dvc.yaml")
    written = _section(_read(pipeline), "stages", pipeline) if stages and pipeline.is_file() else {}
    for name, stage in stages.items():
        folder = lock.parent / _working_folder(written.get(str(name).partition("@")[0]))
        for path, digest in _outs(stage, lock):
            yield _from(root, folder, path), digest


def _working_folder(stage: Any) -> str:
    """A stage's `wdir`, relative to its dvc.yaml; one of a `foreach` or a `matrix` may have it under `do`."""
    fields = stage.get("do", stage) if isinstance(stage, dict) else None
    folder = fields.get("wdir", ".") if isinstance(fields, dict) else "."
    return str(folder)


def _from(root: Path, folder: Path, path: str) -> str:
    """An output's path in a folder, as it is from the root."""
    return Path(os.path.relpath(folder / path, root)).as_posix()


def _outs(stage: Any, file: Path) -> Iterator[tuple[str, str]]:
    """(path, hash) of a stage's outputs."""
    outs = stage.get("outs", []) if isinstance(stage, dict) else None
    if not isinstance(outs, list):
        raise LineageError(f"{file} has a stage without a list of outputs: {REMEDY}")
    for out in outs:
        path, digest = (out.get("path"), out.get("md5")) if isinstance(out, dict) else (None, None)
        if not isinstance(path, str) or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise LineageError(f"{file} has an output without path and md5, {str(out)[:100]!r}: {REMEDY}")
        yield path, digest


def _section(content: Any, name: str, file: Path) -> dict[str, Any]:
    found = content.get(name, {}) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise LineageError(f"{file} has no section {name!r}: {REMEDY}")
    return found


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LineageError(f"{file} cannot be read ({' '.join(str(error).split())[:200]}): {REMEDY}") from error


def _dataset(path: str, digest: str) -> DatasetInput:
    """As `mlflow.log_input` records it; MLflow allows 36 characters of digest, which is an md5 with DVC's `.dir`."""
    source = json.dumps({"uri": path})
    dataset = mlflow.entities.Dataset(name=path, digest=digest[:36], source_type="local", source=source)
    return mlflow.entities.DatasetInput(dataset, tags=[mlflow.entities.InputTag("mlflow.data.context", "dvc")])


def _commit(code: Path) -> str | None:
    """The commit that `code` is at; None outside a repository or without git."""
    try:
        return git(code, "rev-parse", "HEAD").decode().strip()
    except (OSError, GitError):
        return None


def _branch(code: Path) -> str | None:
    """The branch that `code` is on; None where it is on none, as in a working copy of one commit."""
    try:
        return git(code, "symbolic-ref", "--short", "HEAD").decode().strip()
    except (OSError, GitError):
        return None
