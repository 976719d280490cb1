# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and the record of a run's MLflow id."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.cases import Case, damaged, draws
from benchmarks.bad_inputs.local_mlflow import known_run, tracking
from tasks.config.tree import TrainConfig
from tasks.records.run_store import CheckpointStore, RunState
from tasks.records.tracking import Tracker
from tasks.run.opening import _remembered_run_id

CHECKPOINTS = "checkpoints and their records"
RUN_JSON = "`run.json`"
DIGESTS = ("c0ffee00", "da7a0000")
FILES = {"a.distcp": bytes(range(256)) * 4, "b.distcp": b"weights" * 50, ".metadata": b"where they are"}
RECORD_EDITS: tuple[tuple[str, Any], ...] = (
    *(("iteration", value) for value in (999, "2", 2.5, None, -1, True, 10**30, [2])),
    *(("metrics", value) for value in (None, [], {"a": "x"}, {"a": None}, "x", {"a": [1]})),
    *((name, value) for name in ("config_digest", "data_digest") for value in (None, 5, "", "other", ["x"])),
    *(("mlflow_run_id", value) for value in (None, 5, [], {})),
    *(("format", value) for value in (0, 2, "1", None, 1.5, True, [])),
    *(("files", value) for value in (None, [], {}, {"a.distcp": "0"}, {"../../x": "0"}, "x", {"a.distcp": None}, 5)),
    *(("extra", 1), ("", 0), ("record_sha256", None), ("record_sha256", "0" * 64), ("record_sha256", 5)),
)
LEFT_OUT = ("iteration", "metrics", "config_digest", "data_digest", "mlflow_run_id", "format", "files", "record_sha256")


def state_of(iteration: int) -> RunState:
    """What was written."""
    return RunState(iteration, *DIGESTS, "f" * 32, {"actor/loss": 0.1 * iteration})


def write_checkpoints(folder: Path) -> None:
    """Two of them, by the code itself."""
    store = CheckpointStore(folder / "checkpoints")
    for iteration in (1, 2):
        store.save(state_of(iteration), lambda into: [(into / name).write_bytes(data) for name, data in FILES.items()])


def checkpoints(seed: int) -> list[Case]:
    """Damaged files and records, records of another content, and entries that are no checkpoints."""
    cases = [_damaged_checkpoint(number, seed) for number in range(80)]
    for resigned in (True, False):
        for key, value in RECORD_EDITS:
            cases.append(
                _edited(f"{key} is {value!r:.30}, digest {'right' if resigned else 'old'}", key, value, resigned)
            )
    cases += [_edited(f"without {key}", key, ..., False) for key in LEFT_OUT]
    cases += [_entry_case(name, change, left) for name, change, left in ENTRIES]
    return cases


def _checkpoint_case(name: str, change: Callable[[Path], Any], iteration: int = 2) -> Case:
    def prepare(folder: Path) -> None:
        write_checkpoints(folder)
        change(folder / "checkpoints")

    def act(folder: Path) -> tuple[RunState, dict[str, bytes]] | None:
        found = CheckpointStore(folder / "checkpoints").latest(*DIGESTS)
        if found is None:
            return None
        return found[0], {path.name: path.read_bytes() for path in found[1].iterdir()}

    def fault(taken: tuple[RunState, dict[str, bytes]] | None) -> str | None:
        if taken is None:
            return "no checkpoint was seen, and the run would begin again"
        if taken[0] != state_of(iteration):
            return f"{taken[0]} is not what was written"
        return None if taken[1] == FILES else "other files than were written"

    return Case(CHECKPOINTS, name, prepare, act, fault, may_change=(".writing-000003",))


def _damaged_checkpoint(number: int, seed: int) -> Case:
    rng = draws(CHECKPOINTS, number, seed)
    name = rng.choice(["state.json", "state.json", *(f"trainer/{file}" for file in FILES)])

    def change(folder: Path) -> None:
        file = folder / "iter_000002" / name
        file.write_bytes(damaged(file.read_bytes(), rng)[1])

    return _checkpoint_case(f"#{number} {name} damaged", change)


def _edited(name: str, key: str, value: Any, resigned: bool) -> Case:
    def change(folder: Path) -> None:
        file = folder / "iter_000002/state.json"
        record = json.loads(file.read_text())
        if value is ...:
            del record[key]
        else:
            record[key] = value
        if resigned and key != "record_sha256":
            record.pop("record_sha256")
            digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
            record["record_sha256"] = digest
        file.write_text(json.dumps(record))

    return _checkpoint_case(name, change)


def _entry_case(name: str, change: Callable[[Path], Any], iteration: int) -> Case:
    return _checkpoint_case(name, change, iteration)


def _to_link(folder: Path) -> None:
    (folder / "iter_000002").rename(folder.parent / "moved")
    (folder / "iter_000002").symlink_to(folder.parent / "moved")


ENTRIES: tuple[tuple[str, Callable[[Path], Any], int], ...] = (
    ("a file of a later iteration's name", lambda folder: (folder / "iter_000009").touch(), 2),
    ("a link to nothing", lambda folder: (folder / "iter_000003").symlink_to("/nowhere"), 2),
    ("a link to itself", lambda folder: (folder / "iter_000003").symlink_to(folder / "iter_000003"), 2),
    ("an empty folder", lambda folder: (folder / "iter_000003").mkdir(), 2),
    ("a copy with another name", lambda folder: shutil.copytree(folder / "iter_000002", folder / "iter_000002.bak"), 2),
    ("a copy of another number", lambda folder: shutil.copytree(folder / "iter_000002", folder / "iter_000007"), 2),
    ("a folder with a word", lambda folder: (folder / "iter_x").mkdir(), 2),
    ("a folder with a sign", lambda folder: (folder / "iter_-00003").mkdir(), 2),
    ("digits that are not ASCII", lambda folder: (folder / "iter_٠٠٠٠٠٩").mkdir(), 2),
    ("a short number", lambda folder: (folder / "iter_3").mkdir(), 2),
    ("a file being written", lambda folder: (folder / ".writing-x").touch(), 2),
    ("a folder that was being written", lambda folder: (folder / ".writing-000003").mkdir(), 2),
    ("the newest removed", lambda folder: shutil.rmtree(folder / "iter_000002"), 1),
    ("the newest moved and linked", _to_link, 2),
    (
        "the record is a folder",
        lambda folder: [(folder / "iter_000002/state.json").unlink(), (folder / "iter_000002/state.json").mkdir()],
        2,
    ),
    ("the files' folder missing", lambda folder: shutil.rmtree(folder / "iter_000002/trainer"), 2),
    ("a file more", lambda folder: (folder / "iter_000002/trainer/more").touch(), 2),
    ("a file less", lambda folder: (folder / "iter_000002/trainer/a.distcp").unlink(), 2),
    ("a name in no encoding", lambda folder: Path(f"{folder}/iter_\udcff").mkdir(), 2),
    ("all of it is a file", lambda folder: [shutil.rmtree(folder), folder.write_text("x")], 2),
    ("all of it is a link to nothing", lambda folder: [shutil.rmtree(folder), folder.symlink_to("/nowhere")], 2),
)
RUN_RECORDS = (
    *(
        "",
        "{",
        "[]",
        "null",
        "5",
        '"x"',
        "{}",
        '{"mlflow_run_id": null}',
        '{"mlflow_run_id": 5}',
        '{"mlflow_run_id": ""}',
    ),
    *(
        '{"mlflow_run_id": "\\ud800"}',
        '{"mlflow_run_id": "../../x"}',
        '{"mlflow_run_id": ["a"]}',
        "[" * 100_000,
        "\0" * 300,
    ),
    *('{"mlflow_run_id": "' + "0" * 32 + '"}', '{"mlflow_run_id": " "}', "9" * 5000, '{"mlflow_run_id": "\' OR 1=1"}'),
)


def run_records(seed: int) -> list[Case]:
    """Contents of `run.json`, up to the run in MLflow that it leads to."""
    cases = [_run_record(f"{content[:50]!r}", content.encode()) for content in RUN_RECORDS]
    for number in range(16):
        content = json.dumps({"mlflow_run_id": known_run(), "run_name": "x", "config": {}}, indent=1).encode()
        what, changed = damaged(content, draws(RUN_JSON, number, seed))
        cases.append(_run_record(f"#{number} {what}", changed))
    cases.append(_run_record("a folder", None))
    return cases


def _run_record(name: str, content: bytes | None) -> Case:
    def config_of(folder: Path) -> TrainConfig:
        return TrainConfig.model_validate({"trainer": {"default_local_dir": folder}})

    def prepare(folder: Path) -> None:
        file = config_of(folder).run_dir / "run.json"
        file.parent.mkdir()
        if content is None:
            file.mkdir()
        else:
            file.write_bytes(content)

    def act(folder: Path) -> str | None:
        run_id = _remembered_run_id(config_of(folder))
        return run_id and Tracker(tracking(), "x", run_id).run_id

    def fault(run_id: str | None) -> str | None:
        return None if run_id == known_run() else f"the run would go on as {run_id!r}"

    return Case(RUN_JSON, name, prepare, act, fault)


def whole() -> list[Case]:
    """Checkpoints and a record as they were written."""
    record = json.dumps({"mlflow_run_id": known_run()}).encode()
    return [_checkpoint_case("whole", lambda folder: None), _run_record("whole", record)]
