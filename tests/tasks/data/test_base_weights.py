# SPDX-License-Identifier: Apache-2.0
"""The weights that a run begins with: their digest, what is remembered, and what DVC has recorded."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tasks.data import base_weights
from tasks.data.base_weights import KnownDigests, check_recorded, weights_digest
from tasks.data.prompt_files import DatasetError
from tasks.records.run_store import CheckpointError, CheckpointStore, RunState


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for part in ("transformer", "vae", "text_encoder", "notes"):
        (folder / part).mkdir(parents=True)
        (folder / part / "model.safetensors").write_bytes(part.encode() * 1_000_000)
    index = {"_class_name": "P", "transformer": [], "vae": [], "text_encoder": [], "scheduler": []}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def flip(file: Path, place: int) -> None:
    """One bit, with the times of change that the file had."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_one_bit_in_the_middle_of_the_weights_is_another_digest(model: Path, tmp_path: Path, monkeypatch) -> None:
    """Also where size and mtime are as before, and the digest was remembered."""
    monkeypatch.setattr(base_weights, "SETTLED_S", 0.0)
    known = KnownDigests(tmp_path / "memory/digests.json")
    first = weights_digest([model], known)
    assert first == weights_digest([model], known)
    for part in ("text_encoder", "notes"):  # no component, or one whose output is data
        flip(model / part / "model.safetensors", 4_000_000)
        assert weights_digest([model], known) == first
    for part in ("transformer", "vae"):
        flip(model / part / "model.safetensors", 1_500_000)
        assert weights_digest([model], known) != first
        flip(model / part / "model.safetensors", 1_500_000)
        assert weights_digest([model], known) == first
    assert weights_digest([model, model / "vae"], known) != first


def test_a_file_that_has_not_changed_is_not_read_again(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(base_weights, "SETTLED_S", 0.0)
    memory, read = tmp_path / "memory.json", []
    whole = base_weights._read
    monkeypatch.setattr(
        base_weights, "_read", lambda file, kinds: (read.append(file.parent.name), whole(file, kinds))[1]
    )
    weights_digest([model], KnownDigests(memory))
    assert sorted(read) == ["model", "transformer", "vae"]
    read.clear()
    weights_digest([model], KnownDigests(memory))
    assert read == []
    memory.write_text("{")
    weights_digest([model], KnownDigests(memory))
    assert sorted(read) == ["model", "transformer", "vae"]


def test_what_is_not_as_dvc_recorded_it_is_refused(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    known, files = KnownDigests(), sorted(file for file in model.rglob("*") if file.is_file())
    md5 = {file.relative_to(model).as_posix(): hashlib.md5(file.read_bytes()).hexdigest() for file in files}
    listing = json.dumps([{"md5": md5[name], "relpath": name} for name in sorted(md5)])
    table = tmp_path / "table"
    table.write_text("one")
    recorded = {"model": hashlib.md5(listing.encode()).hexdigest() + ".dir", "table": hashlib.md5(b"one").hexdigest()}
    check_recorded([Path("model"), table, tmp_path / "elsewhere"], recorded, known)
    flip(model / "vae" / "model.safetensors", 77)
    with pytest.raises(DatasetError, match=r"^model is not what DVC recorded when it was made .*`dvc checkout`"):
        check_recorded([Path("model")], recorded, known)
    table.write_text("two")
    with pytest.raises(DatasetError, match="table is not what DVC recorded"):
        check_recorded([table], recorded, known)


def test_a_checkpoint_of_other_base_weights_is_refused_and_an_older_one_is_taken(tmp_path: Path, caplog) -> None:
    store = CheckpointStore(tmp_path)
    store.save(RunState(1, "config", "data-weights", "run"), lambda folder: None)
    assert store.latest("config", "data-weights") is not None
    with pytest.raises(CheckpointError, match=r"was made from other weights in model.path"):
        store.latest("config", "data-others")
    with pytest.raises(CheckpointError, match="was made from other prompts, embeddings or pairs"):
        store.latest("config", "other-weights")
    assert not caplog.records
    store.save(RunState(2, "config", "data", "run"), lambda folder: None)
    assert store.latest("config", "data-weights") is not None
    assert "is of an older version" in caplog.text
