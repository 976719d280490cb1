# SPDX-License-Identifier: Apache-2.0
"""Lineage, the record of `make up`, sweeps, and names that MLflow gets."""

import json
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.cases import Case, damaged, draws
from benchmarks.bad_inputs.configs import VALUES
from benchmarks.bad_inputs.local_mlflow import tracking
from flows.deploy.service_record import recorded_processes
from tasks.config.sweep import SweepConfig, check_fields
from tasks.config.tree import TrainConfig
from tasks.records.lineage import Lineage, lineage
from tasks.records.tracking import Tracker
from tasks.system.processes import identity

LINEAGE = "lineage: repositories and `dvc.lock`"
PIDS = "`pids.json`"
SWEEPS = "sweeps: names and dimensions"
NAMES = "names that MLflow gets"


def _git(folder: Path, *arguments: str) -> str:
    command = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "protocol.file.allow=always",
        "-C",
        str(folder),
        *arguments,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def _repository(folder: Path) -> None:
    _git(folder, "init", "--quiet")
    (folder / "code.py").write_text("a = 1\n")
    (folder / "kept.bin").write_bytes(bytes(range(256)))
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "first")
    (folder / "code.py").write_text("a = 2\n")


def _nested(folder: Path, commits: bool) -> None:
    (folder / "inner").mkdir()
    _git(folder / "inner", "init", "--quiet")
    if commits:
        (folder / "inner/x.py").write_text("x")
        _git(folder / "inner", "add", ".")
        _git(folder / "inner", "commit", "--quiet", "-m", "x")


def _many(folder: Path) -> None:
    (folder / "many").mkdir()
    for number in range(3000):
        (folder / "many" / f"{number:04d}-{'n' * 200}").touch()


def _damage_index(folder: Path) -> None:
    (folder / ".git/index").write_bytes(b"DIRC" + bytes(40))


def _lose_objects(folder: Path) -> None:
    for file in (folder / ".git/objects").glob("??/*"):
        file.chmod(0o644)
        file.write_bytes(b"x")


def _to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _to_link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _sparse(file: Path, size: int) -> None:
    file.touch()
    os.truncate(file, size)


def _required_filter(folder: Path) -> None:
    _filter(folder, "filter.bad.clean", "false")
    _git(folder, "config", "filter.bad.required", "true")


def _other_differences(folder: Path) -> None:
    _git(folder, "config", "diff.external", "false")
    _filter(folder, "diff.bad.textconv", "false")


def _other_output(folder: Path) -> None:
    _git(folder, "config", "color.ui", "always")
    _git(folder, "config", "diff.noprefix", "true")


def _filter(folder: Path, name: str, value: str) -> None:
    _git(folder, "config", name, value)
    (folder / ".gitattributes").write_text("*.py filter=bad diff=bad\n*.bin text eol=crlf\n")


def _text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


CHANGES: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    ("nothing", lambda folder: None),
    ("a name that is no UTF-8", lambda folder: Path(f"{folder}/bad\udcff.py").write_text("x")),
    ("a line's end in a name", _text("a\nb.py", "x")),
    ("a name that is an option", _text("--help", "x")),
    ("a name of git's patterns", _text(":(glob)*", "x")),
    ("a name of quotes", _text('"a\tb"', "x")),
    ("a long name", _text("a" * 255, "x")),
    ("many names", _many),
    ("an empty repository inside", lambda folder: _nested(folder, False)),
    ("a repository inside", lambda folder: _nested(folder, True)),
    ("a link to nothing", lambda folder: (folder / "link").symlink_to("/nowhere")),
    ("a link to itself", lambda folder: (folder / "link").symlink_to("link")),
    ("a tracked file that is a folder now", lambda folder: _to_folder(folder / "code.py")),
    ("a tracked file that is a link now", lambda folder: _to_link(folder / "code.py", "kept.bin")),
    ("a tracked file that is gone", lambda folder: (folder / "code.py").unlink()),
    ("a named pipe", lambda folder: os.mkfifo(folder / "pipe")),
    ("a large file", lambda folder: _sparse(folder / "large", 2**26)),
    ("NUL in a text", _text("nul.py", "a\0b")),
    ("carriage returns", lambda folder: (folder / "code.py").write_bytes(b"a\r\nb\r\n")),
    ("no end of line", _text("code.py", "a = 3")),
    ("an empty new file", _text("empty.py", "")),
    ("a damaged index", _damage_index),
    ("lost objects", _lose_objects),
    ("a HEAD that leads nowhere", _text(".git/HEAD", "ref: refs/heads/none\n")),
    ("a HEAD that is no reference", _text(".git/HEAD", "x\n")),
    ("a configuration that is none", _text(".git/config", "[core\n")),
    ("a filter that fails", lambda folder: _filter(folder, "filter.bad.clean", "false")),
    ("a filter that must not fail", _required_filter),
    ("another program for differences", _other_differences),
    ("coloured output", _other_output),
    ("a locked index", _text(".git/index.lock", "")),
    ("a sparse checkout", lambda folder: _git(folder, "sparse-checkout", "set", "--no-cone", "kept.bin")),
    ("a merge that is not finished", _text(".git/MERGE_HEAD", "0" * 40)),
)  # fmt: skip
LOCKS = (
    *(
        "",
        "null",
        "[]",
        "5",
        "x: [",
        "stages: 5",
        "stages: []",
        "stages: {a: 5}",
        "stages: {a: {outs: 5}}",
        "stages: {a: null}",
    ),
    *(
        "stages: {a: {outs: [5]}}",
        "stages: {a: {outs: [{path: 5}]}}",
        "stages: {a: {outs: [{md5: x}]}}",
        "\0",
        "!!python/object:os.system x",
    ),
    *(
        "stages: {a: {outs: [{path: data/x, md5: [1]}]}}",
        "stages: {a: {outs: [{path: data/x}]}}",
        "stages: null",
        "{a: " * 500,
        "x: 2001-13-01",
    ),
    *(
        "stages: {a: {outs: null}}",
        "stages: {a: {outs: [{path: data/x, md5: ''}]}}",
        "x: *y",
        "<<<<<<< HEAD\nstages: {}\n=======\n>>>>>>> x\n",
    ),
)


def repositories(seed: int) -> list[Case]:
    """What a user's folder may hold, and what DVC's files may say."""
    cases = [_lineage_case(name, change) for name, change in CHANGES]
    for name in ("dvc.lock", "data/x.dvc"):
        for content in LOCKS:
            cases.append(_lock_case(f"{name} {content[:40]!r}", name, content.encode()))
    whole = b"schema: '2.0'\nstages:\n  one:\n    outs:\n    - path: data/x\n      md5: aabbccdd\n"
    for number in range(20):
        what, changed = damaged(whole, draws(LINEAGE, number, seed))
        cases.append(_lock_case(f"#{number} dvc.lock {what}", "dvc.lock", changed))
    return cases


def _lineage_case(name: str, change: Callable[[Path], Any]) -> Case:
    def prepare(folder: Path) -> None:
        repository = folder / "repository"
        repository.mkdir()
        _repository(repository)
        change(repository)

    def act(folder: Path) -> tuple[Path, Lineage]:
        with chdir(folder):
            return folder, lineage([], folder / "repository")

    return Case(LINEAGE, name, prepare, act, _fault_of_lineage)


def _fault_of_lineage(taken: tuple[Path, Lineage]) -> str | None:
    """The oracle: commit and patch give back every file that is not named as left out."""
    folder, found = taken
    repository, copy = folder / "repository", folder / "copy"
    commit = found.tags.get("mlflow.source.git.commit")
    if commit is None:
        broken = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True).returncode
        return None if broken else "no commit was recorded"
    _git(folder, "clone", "--quiet", str(repository), str(copy))
    _git(copy, "checkout", "--quiet", commit)
    (folder / "code.patch").write_bytes(found.patch)
    if found.patch:
        _git(copy, "apply", str(folder / "code.patch"))
    left_out = {**found.environment["untracked_left_out"], **found.environment["tracked_left_out"]}
    for path in sorted(repository.rglob("*")):
        name = path.relative_to(repository)
        told = os.fsencode(str(name)).decode(errors="backslashreplace")
        if ".git" in name.parts or any(told == out or told.startswith(out) for out in left_out):
            continue
        if path.is_symlink():
            if not (copy / name).is_symlink() or path.readlink() != (copy / name).readlink():
                return f"the link {told!r} is lost"
        elif path.is_file() and (not (copy / name).is_file() or path.read_bytes() != (copy / name).read_bytes()):
            return f"{told!r} is lost"
    return None


def _lock_case(name: str, file: str, content: bytes) -> Case:
    def prepare(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / file).write_bytes(content)

    def act(folder: Path) -> list[tuple[str, str]]:
        with chdir(folder):
            found = lineage([Path("data")], folder).datasets + lineage([Path("data/x")], folder).datasets
            tracker = Tracker(tracking(), "lineage")
            tracker.client.log_inputs(tracker.run_id, found)
            return [(item.dataset.name, item.dataset.digest) for item in found]

    def fault(taken: list[tuple[str, str]]) -> str | None:
        wrong = [
            pair
            for pair in taken
            if pair[1] == "None" or not pair[0].isprintable() or not re.fullmatch(r"[\w.-]{1,36}", pair[1])
        ]
        return f"an input {wrong[0]}" if wrong else None

    return Case(LINEAGE, name, prepare, act, fault)


HOST = socket.gethostname()
RECORDS = (
    *(
        "",
        "{",
        "[]",
        "null",
        "5",
        '"x"',
        "[" * 100_000,
        "9" * 5000,
        '{"a": 1}',
        '{"a": []}',
        '{"a": [1, 2]}',
        '{"a": {"pid": 1}}',
        "\0" * 50,
    ),
    *(
        '{"a": ["x", "y", "z"]}',
        '{"a": [1, 2, 3]}',
        '{"a": [-1, "b/1", "h"]}',
        '{"a": [0, "b/1", "h"]}',
        '{"a": [1.5, "b/1", "h"]}',
    ),
    *(
        '{"a": [true, "b/1", "h"]}',
        '{"a": [1, null, "h"]}',
        '{"a": [1, "b/1", null]}',
        '{"a": [1, "b/1", "h", 4]}',
        '{"a": [1e400, "b/1", "h"]}',
    ),
    *('{"a": [' + "9" * 40 + ', "b/1", "h"]}', '{"a": null}', '{"a": [1, "b/1", "h"], "a": [2, "b/1", "h"]}'),
)


def pid_records(seed: int) -> list[Case]:
    """Contents of the record of what `make up` started: this process must be found, and no other one."""
    whole = json.dumps({"mlflow": [os.getpid(), identity(os.getpid()), HOST]}).encode()
    cases = [_pid_case(repr(content[:50]), content.encode()) for content in RECORDS]
    for number in range(24):
        what, changed = damaged(whole, draws(PIDS, number, seed))
        cases.append(_pid_case(f"#{number} {what}", changed))
    return cases


def _pid_case(name: str, content: bytes) -> Case:
    def prepare(folder: Path) -> None:
        (folder / ".services").mkdir(mode=0o700)
        (folder / ".services/pids.json").write_bytes(content)

    def act(folder: Path) -> dict[str, Any]:
        with chdir(folder):
            return {name: asdict(entry) | {"alive": entry.alive} for name, entry in recorded_processes().items()}

    def fault(taken: dict[str, Any]) -> str | None:
        for entry in taken.values():
            if isinstance(entry["pid"], bool) or not isinstance(entry["pid"], int) or not 0 < entry["pid"] < 2**31:
                return f"the pid {entry['pid']!r}"
            if entry["alive"] and (entry["pid"], entry["identity"]) != (os.getpid(), identity(os.getpid())):
                return "another process is taken for a service"
        said = json.loads(content, object_pairs_hook=lambda pairs: pairs)
        return None if len(said) == len(taken) else "a name twice"

    return Case(PIDS, name, prepare, act, fault)


SEED = {"trainer.seed": {"choices": [1, 2]}}
DIMENSIONS: tuple[Any, ...] = (
    *(
        {},
        {"choices": []},
        {"choices": [math.nan]},
        {"choices": [1], "low": 0, "high": 1},
        {"low": 1},
        {"low": 2, "high": 1},
    ),
    *(
        {"low": math.nan, "high": 1},
        {"low": 0, "high": math.inf},
        {"low": 0, "high": 10**50},
        {"low": 1, "high": 2, "step": math.nan},
    ),
    *(
        {"low": 0, "high": 3, "step": 0},
        {"low": 0, "high": 3, "step": -1},
        {"low": 0, "high": 3, "log": True},
        {"choices": ["x"]},
    ),
    *(
        {"low": 0.0, "high": 1e300, "step": 1e-300},
        {"choices": [[1]]},
        {"choices": [2**70]},
        {"choices": [True]},
        {"choices": [1] * 20_000},
    ),
    *(
        {"low": 1, "high": 5, "step": math.inf},
        {"low": "1", "high": "x"},
        {"choices": None},
        [1, 2],
        5,
        None,
        {"low": True, "high": 5},
    ),
)
SWEEP_NAMES = (
    "",
    ".",
    "..",
    "-rf",
    "a/b",
    "/abs",
    "a\0b",
    "a\n",
    "é",
    " ",
    "a" * 101,
    "a" * 300,
    "CON",
    "a b",
    ".hidden",
    5,
    None,
    True,
    ["a"],
)


def sweeps(seed: int) -> list[Case]:
    """Names, dimensions, fields and numbers of a sweep."""
    searches: list[dict[str, Any]] = [{"name": name, "space": SEED} for name in SWEEP_NAMES]
    for dimension in DIMENSIONS:
        searches += [{"space": {"trainer.seed": dimension}, "sampler": sampler} for sampler in ("grid", "tpe")]
    searches += [
        {"space": {field: {"choices": [1]}}}
        for field in ("", ".", "no.such", "trainer", "trainer.", "a..b", "\0", "trainer.seed.x")
    ]
    searches += [{"space": space} for space in ({}, None, [], 5, {5: {"choices": [1]}})]
    for field in ("trials", "parallel", "startup_trials", "warmup_steps", "seed"):
        searches += [{"space": SEED, field: value} for value in (-1, 10**30, math.inf, math.nan, "x", True)]
    searches += [{"space": SEED, "metric": metric} for metric in ("", "a\0b", "x" * 1000, "a,b", None, 5)]
    searches.append(
        {
            "space": {f"trainer.f{number}": {"low": 0, "high": 10**9, "step": 1} for number in range(3)},
            "sampler": "grid",
        }
    )
    return [_sweep_case(search) for search in searches]


def _sweep_case(search: dict[str, Any]) -> Case:
    def act(folder: Path) -> SweepConfig:
        found = SweepConfig.model_validate(search)
        check_fields(TrainConfig(), found)
        return found

    def fault(taken: SweepConfig) -> str | None:
        folder = Path("/runs/sweeps") / taken.name
        if (
            taken.name.startswith(("-", "."))
            or folder.resolve().parent != Path("/runs/sweeps")
            or len(taken.name) > 200
        ):
            return f"the folder {folder}"
        numbers = [taken.trials, taken.parallel, taken.startup_trials, taken.warmup_steps, taken.seed]
        if any(number > 10**9 for number in numbers):
            return f"numbers {numbers}"
        given = [search.get(name) for name in ("trials", "parallel", "startup_trials", "warmup_steps", "seed")]
        if any(isinstance(value, bool) for value in given):
            return f"true for a number in {search}"
        if not taken.metric or not taken.metric.isprintable() or len(taken.metric) > 250 or "," in taken.metric:
            return f"the metric {taken.metric!r:.30}"
        for dimension in taken.space.values():
            values = [dimension.low, dimension.high, dimension.step, *(dimension.choices or [])]
            if any(isinstance(value, float) and not math.isfinite(value) for value in values):
                return f"{dimension!r:.80}"
            if any(isinstance(value, bool) for value in values):
                return "true for a seed"
            if any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
                return "a number of more than 64 bits"
        return None

    return Case(SWEEPS, repr(search)[:200], lambda folder: None, act, fault)


LABELS = (
    *(value for value in VALUES if isinstance(value, str)),
    *(
        "a" * 100,
        "a" * 249,
        "a-b",
        "a.b",
        "a/b",
        "A",
        "a",
        "__",
        "0",
        "a:b",
        "tasks.rewards.jpeg:JpegIncompressibility",
    ),
    *("a\\b", "a?b", "a*b", "'", '"', "`", ";--", "ö", "日本", "🐕", "reward", "mean", "a/mean", "./a", "a/.", "~"),
    *("$HOME", "{x}", "a\tb", "\u200b", "\ufeff"),
)


def names(seed: int) -> list[Case]:
    """Labels of rewards and names of experiments, as far as MLflow's record of them."""
    cases = [_label_case(label) for label in LABELS]
    return cases + [_experiment_case(label) for label in LABELS]


def _label_case(label: str) -> Case:
    def act(folder: Path) -> dict[str, float]:
        function = {"reward": "jpeg_incompressibility"}
        config = TrainConfig.model_validate({"reward": {"functions": {label: function}}})
        tracker = Tracker(tracking(), "names")
        tracker.log_start(config, {f"reward.{label.replace(':', '/')}": "1"})
        tracker.log_step(1, {f"train/reward/{label}/mean": 1.5, f"reward/{label}/missing": 0.0})
        return tracker.client.get_run(tracker.run_id).data.metrics

    def fault(taken: dict[str, float]) -> str | None:
        return None if taken.get(f"train/reward/{label}/mean") == 1.5 else f"MLflow has {sorted(taken)}"[:200]

    return Case(NAMES, f"reward {label!r:.60}", lambda folder: None, act, fault)


def _experiment_case(name: str) -> Case:
    def act(folder: Path) -> str | None:
        config = TrainConfig.model_validate({"tracking": {"experiment": name, "uri": tracking().uri}})
        artifacts = config.tracking.model_copy(update={"artifacts": tracking().artifacts})
        tracker = Tracker(artifacts, "names")
        run = tracker.client.get_run(tracker.run_id)
        return tracker.client.get_experiment(run.info.experiment_id).name

    def fault(taken: str | None) -> str | None:
        if any(ord(character) < 32 for character in name) or not name.strip():
            return f"an experiment {name!r}"
        return None if taken == name else f"the experiment {taken!r}"

    return Case(NAMES, f"experiment {name!r:.60}", lambda folder: None, act, fault)


def whole() -> list[Case]:
    """What each of these is meant to be."""
    record = json.dumps({"mlflow": [os.getpid(), identity(os.getpid()), HOST]}).encode()
    lock = b"stages:\n  one:\n    outs:\n    - path: data/x\n      md5: aabbccdd\n"
    return [
        _lineage_case("whole", lambda folder: None),
        _lock_case("whole", "dvc.lock", lock),
        _pid_case("whole", record),
        _sweep_case({"name": "my-sweep", "space": SEED, "sampler": "grid"}),
        _label_case("brightness"),
        _experiment_case("my experiment"),
    ]
