"""Where a run came from: code, data, packages and hardware, exactly enough to do it again."""

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT

CODE = Path(__file__).resolve().parents[1]
LARGEST_UNTRACKED = 1 << 20
"""Bytes; a larger file that git does not know is named in the record but not copied into the patch."""


@dataclass(frozen=True)
class Lineage:
    """One start of a run.

    Attributes:
        tags: the commit, and whether files differed from it.
        patch: what differed, for `git apply` on the commit; new files included.
        environment: python, package versions, hardware, and files that the patch leaves out.
        datasets: the DVC outputs that the run reads, with their hashes.
    """

    tags: dict[str, str]
    patch: bytes
    environment: dict[str, Any]
    datasets: list[DatasetInput]


def lineage(data: Sequence[Path], code: Path = CODE) -> Lineage:
    """The lineage of a run that starts now; needs a running Ray for the cluster's hardware.

    Args:
        data: files and folders that the run reads, relative to the working directory.
        code: the repository's root.
    """
    commit = _commit(code)
    patch, left_out = _patch(code) if commit else (b"", [])
    tags = {MLFLOW_GIT_COMMIT: commit, "doubleflow.git_dirty": str(bool(patch or left_out)).lower()} if commit else {}
    environment = {
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in sorted(metadata.distributions(), key=lambda d: d.name.lower())},
        "hardware": hardware(),
        "untracked_left_out": left_out,
    }
    hashes = dvc_hashes(Path("."))
    used = [path for path in hashes if any(Path(path) == d or Path(path) in d.parents for d in data)]
    return Lineage(tags, patch, environment, [_dataset(path, hashes[path]) for path in used])


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
    """Path -> hash of every DVC output under `root`: the stages' of dvc.lock, and those that were `dvc add`ed."""
    return dict(_dvc_outputs(root))


def _dvc_outputs(root: Path) -> Iterator[tuple[str, str]]:
    lock = root / "dvc.lock"
    stages = yaml.safe_load(lock.read_text()).get("stages", {}) if lock.is_file() else {}
    for stage in stages.values():
        for out in stage.get("outs", []):
            yield out["path"], str(out.get("md5") or out.get("hash"))
    for file in sorted(root.glob("data/**/*.dvc")):
        for out in yaml.safe_load(file.read_text()).get("outs", []):
            path = (file.parent / out["path"]).relative_to(root)
            yield path.as_posix(), str(out.get("md5") or out.get("hash"))


def _dataset(path: str, digest: str) -> DatasetInput:
    """As `mlflow.log_input` records it; MLflow allows 36 characters of digest, which is an md5 with DVC's `.dir`."""
    source = json.dumps({"uri": path})
    dataset = Dataset(name=path, digest=digest[:36], source_type="local", source=source)
    return DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "dvc")])


def _commit(code: Path) -> str | None:
    """The commit that `code` is at; None outside a repository or without git."""
    try:
        return _git(code, "rev-parse", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _patch(code: Path) -> tuple[bytes, list[str]]:
    """(the difference between the commit and the files that git does not ignore, files too large for it).

    Made in an index and an object store of its own, so the repository stays as it is.
    """
    untracked = [
        name for name in _git(code, "ls-files", "--others", "--exclude-standard", "-z").decode().split("\0") if name
    ]
    left_out = [name for name in untracked if (code / name).lstat().st_size > LARGEST_UNTRACKED]
    taken = [name for name in untracked if name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        objects = _git(code, "rev-parse", "--path-format=absolute", "--git-path", "objects").decode().strip()
        environment = {
            "GIT_INDEX_FILE": f"{folder}/index",
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        _git(code, "read-tree", "HEAD", **environment)
        _git(code, "add", "--update", **environment)
        if taken:
            _git(code, "add", "--", *taken, **environment)
        return _git(code, "diff", "--cached", "--binary", "HEAD", **environment), left_out


def _git(folder: Path, *arguments: str, **environment: str) -> bytes:
    """Output of a git command."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, check=True).stdout
