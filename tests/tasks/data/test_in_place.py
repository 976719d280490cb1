# SPDX-License-Identifier: Apache-2.0
"""What is written aside is on the disk before it gets its name, and a record that is damaged all the same is named."""

import json
import os
import re
from pathlib import Path

import pytest

from tasks.config.tree import TrainConfig
from tasks.data.embeddings import write_embeddings
from tasks.data.prompts import Prompt
from tasks.records.run_store import CheckpointError, CheckpointStore, RunState
from tasks.run.opening import _remember_run_id, _remembered_run_id
from tasks.run.summary import export


class Exporter:
    """A trainer whose weights are two files."""

    def export(self, folder: Path) -> None:
        (folder / "transformer").mkdir(parents=True)
        (folder / "model_index.json").write_text("{}")
        (folder / "transformer" / "weights").write_bytes(b"1")


def config(folder: Path) -> TrainConfig:
    result = TrainConfig(trainer={"default_local_dir": folder, "experiment_name": "x"})
    result.run_dir.mkdir(parents=True)
    return result


def write_run_record(folder: Path) -> Path:
    settings = config(folder)
    _remember_run_id(settings, "abc")
    assert _remembered_run_id(settings) == "abc"
    return settings.run_dir / "run.json"


def write_some_embeddings(folder: Path) -> Path:
    import torch

    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": torch.ones(len(texts), 2, 4), "prompt_embeds_mask": torch.ones(len(texts), 2)}

    settings = {"batch_size": 2, "negative_prompt": "", "max_sequence_length": 9, "model": "m", "model_digest": "d"}
    write_embeddings([Prompt("a", "a", None, {}, "f:1")], encode, folder / "embeddings", 1, **settings)
    return folder / "embeddings"


def write_checkpoint(folder: Path) -> Path:
    store = CheckpointStore(folder)
    return store.save(RunState(1, "c", "d", "r"), lambda inside: (inside / "w").write_bytes(b"1") and None)


def write_export(folder: Path) -> Path:
    return export(Exporter(), folder / "weights")


@pytest.mark.parametrize("write", [write_run_record, write_export, write_some_embeddings, write_checkpoint])
def test_all_is_on_the_disk_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write
) -> None:
    """Else a power cut may leave the new name before an empty file."""
    steps: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(handle: int) -> None:
        steps.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        real["fsync"](handle)

    def renaming(name: str):
        def call(source, target, **keywords) -> None:
            steps.append(("rename", str(target)))
            real[name](source, target, **keywords)

        return call

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.rename", renaming("rename"))
    monkeypatch.setattr("os.replace", renaming("replace"))
    made = write(tmp_path)
    renamed = steps.index(("rename", str(made)))
    before = {path for kind, path in steps[:renamed] if kind == "sync"}
    written = [made, *made.rglob("*")]
    (aside,) = (path for path in map(Path, before) if path.parent == made.parent)
    assert {str(aside / path.relative_to(made)) for path in written} <= before
    assert ("sync", str(made.parent)) in steps[renamed:]


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    class Failing(Exporter):
        def export(self, folder: Path) -> None:
            super().export(folder)
            raise OSError("No space left")

    folder = export(Exporter(), tmp_path / "weights")
    with pytest.raises(OSError, match="No space left"):
        export(Failing(), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    export(Exporter(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model_index.json", "transformer"]


@pytest.mark.parametrize(
    "content", [b"", b'{"mlflow_run_', b"[]", b"{}", b'{"mlflow_run_id": 7}', b"\xff\x00", b"null"]
)
def test_a_damaged_run_record_is_named_with_its_remedy(tmp_path: Path, content: bytes) -> None:
    settings = config(tmp_path)
    file = settings.run_dir / "run.json"
    assert _remembered_run_id(settings) is None
    file.write_bytes(content)
    sentence = rf"{re.escape(str(file))} does not say which MLflow run to continue .* write .* or null in its place"
    with pytest.raises(CheckpointError, match=sentence):
        _remembered_run_id(settings)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=sentence):
        _remembered_run_id(settings)
    file.unlink()
    for run_id in ("abc", None):
        file.write_text(json.dumps({"mlflow_run_id": run_id}))
        assert _remembered_run_id(settings) == run_id
