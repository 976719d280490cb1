# SPDX-License-Identifier: Apache-2.0
"""The data stages under a real DVC in real git repositories, with a base model that is hardly trained at all."""

import copy
import functools
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from models.families.qwen_image import QwenImage
from tasks.config.data import DataConfig
from tasks.data.embeddings import PromptEmbeddings
from tasks.data.pairs import PairDataset, common_size, read_pictures
from tasks.data.prompts import load_prompts
from tests.support.helpers import model_config

pytest.importorskip("dvc", reason="the data stages need the extra doubleflow[data]")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = (".gitignore", "flows", "tasks", "models", "data/raw", "data/.gitignore", "dvc.yaml", "params.yaml")
OUTPUTS = (
    "data/prompts.parquet",
    "data/base_model",
    "data/base_model_metrics.json",
    "data/embeddings",
    "data/preferences.parquet",
    "data/pairs",
)
STAGES = ("prompts@digits", "base_model", "embeddings@digits", "preferences", "pairs")


@pytest.fixture(scope="module", autouse=True)
def path_of_stages(forked_python: Path):
    """The stages call `python`, as do these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{forked_python.parent}{os.pathsep}{os.environ['PATH']}")
        yield


def run(folder: Path, *command: str, fails: bool = False, **environment: str) -> str:
    """What `command` prints when it is run in `folder`; it must fail or succeed as said."""
    env = os.environ | {
        "PYTHONPATH": str(folder),  # the stages import the code of `folder`
        "DVC_NO_ANALYTICS": "1",
        "OMP_NUM_THREADS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **environment,
    }
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def dvc(folder: Path, *arguments: str, **how: Any) -> str:
    return run(folder, "python", "-m", "dvc", *arguments, **how)


def change_params(folder: Path, *section: str, **values) -> None:
    path = folder / "params.yaml"
    params = yaml.safe_load(path.read_text())
    functools.reduce(dict.__getitem__, section, params).update(values)
    path.write_text(yaml.safe_dump(params))


def make_repository(folder: Path) -> Path:
    """A git and DVC repository with this project's data stages, cut down to seconds."""
    for name in SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    change_params(folder, "data_sets", "digits", "prompts", n_train=24, n_test=8)
    change_params(folder, "base_model", "model", steps=4, vae_steps=4, pictures=64, threads=1)
    change_params(folder, "base_model", "gate", min_reward=0.0, max_reward=1.0, prompts=4, images_per_prompt=1)
    # The pictures of a model like this hold no text to prefer; their size in bytes always differs.
    small = {"images_per_prompt": 2, "height": 16, "width": 32, "steps": 1, "batch_size": 50}
    change_params(folder, "preferences", reward="jpeg_incompressibility", **small)
    run(folder, "git", "init", "--quiet")
    dvc(folder, "init", "--quiet")
    run(folder, "git", "add", ".")
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    run(folder, "git", *who, "commit", "--quiet", "-m", "start")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file under data/, hidden leftovers included, but for the raw ones."""
    files = (path for path in (folder / "data").rglob("*") if path.is_file() and "raw" not in path.parts)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository after its first `dvc repro`: of one stage in new processes, of the others in forks."""
    folder = make_repository(tmp_path_factory.mktemp("made"))
    new = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = dvc(folder, "repro", STAGES[0], PATH=new) + dvc(folder, "repro")
    assert all(f"Running stage '{stage}'" in printed for stage in STAGES)
    return folder


@pytest.fixture
def unchanged(made: Path):
    """`made`, of which a test may change inputs: they are restored, and no output may have been touched."""
    inputs = {path: path.read_bytes() for path in (made / "params.yaml", made / "data" / "raw" / "numbers.txt")}
    before = snapshot(made)
    yield made
    assert snapshot(made) == before
    for path, content in inputs.items():
        path.write_bytes(content)


def test_repro_makes_data_that_the_project_reads(made):
    assert all((made / name).exists() for name in OUTPUTS)
    train, test = (load_prompts(made / "data" / "prompts.parquet", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (24, 8)
    embeddings = PromptEmbeddings.open(made / "data" / "embeddings")
    batch = embeddings.get([prompt.uid for prompt in train + test])
    assert batch["prompt_embeds"].shape[0] == 32
    assert batch["prompt_embeds"].shape[2] == embeddings.dim == 64
    assert embeddings.negative()["prompt_embeds"].shape[0] == 1
    metrics = yaml.safe_load((made / "data" / "base_model_metrics.json").read_text())
    assert metrics["held_out_images"] == 4
    assert set(metrics) == {
        "held_out_reward",
        "held_out_exact",
        "held_out_images",
        "vae_loss",
        "transformer_loss",
    }


def test_repro_makes_pairs_that_training_reads(made):
    """Of the train prompts only; the latents are those of the pictures that the table holds."""
    train = load_prompts(made / "data" / "prompts.parquet", "train")
    pictures = read_pictures(made / "data" / "preferences.parquet")
    data = PairDataset.open(made / "data" / "pairs")
    assert [pair.uid for pair in data.pairs] == [pair.uid for pair, _ in pictures]
    assert 16 < len(data.pairs) <= 24
    assert {pair.prompt_uid for pair in data.pairs} <= {prompt.uid for prompt in train}
    assert data.latent_shape == (32, 16)
    assert common_size(pictures, "table") == (16, 32)
    store = PromptEmbeddings.open(made / "data" / "embeddings")
    (batch,) = data.batches(data.pairs[:3], store, 3, seed=0, iteration=1)
    folder = made / "data" / "base_model"
    config = model_config(folder, height=16, width=32)
    rejected = np.asarray(Image.open(io.BytesIO(pictures[1][1]["rejected"]["image"])))
    encoded = QwenImage.encode(QwenImage.load_vae(config), config, torch.from_numpy(rejected)[None])
    assert torch.allclose(batch.trajectories.latents[3], encoded[0], rtol=0, atol=1e-5)


def test_git_sees_the_lock_and_the_metrics_only(made):
    seen = run(made, "git", "status", "--short", "--untracked-files=all")
    assert set(seen.split("\n")) == {"?? data/base_model_metrics.json", "?? dvc.lock", ""}


def test_a_second_repro_does_nothing(unchanged):
    printed = dvc(unchanged, "repro")
    assert "Running stage" not in printed
    assert "Data and pipelines are up to date" in printed


def test_bad_input_leaves_the_old_outputs(unchanged):
    with (unchanged / "data" / "raw" / "numbers.txt").open("a") as raw:
        raw.write("\nthe number 1000\n")
    printed = dvc(unchanged, "repro", fails=True)
    assert "data/raw/numbers.txt:1001: the prompt must be a text that is not blank" in printed
    assert "Traceback" not in printed


def test_a_wrong_field_is_named(unchanged):
    change_params(unchanged, "base_model", "model", stepz=3)
    change_params(unchanged, "data_sets", "digits", "prompts", target_pattern="number")
    printed = dvc(unchanged, "repro", fails=True)
    assert "params.yaml: data_sets.digits.prompts.target_pattern: " in printed
    assert "'number' has 0 groups" in printed
    assert "base_model.model has no field 'stepz'; did you mean steps?" in printed
    assert "Traceback" not in printed


def test_a_base_model_outside_the_gate_is_not_put_in_place(unchanged):
    change_params(unchanged, "base_model", "gate", min_reward=0.9)
    printed = dvc(unchanged, "repro", "base_model", fails=True)
    assert "is not within base_model.gate [0.9, 1.0]; set more base_model.model.steps in params.yaml" in printed
    assert "Traceback" not in printed


def test_odd_pairs_are_refused_and_another_table_is_watched(unchanged):
    """A table of one's own takes the place of the sampled one, by its parameter alone."""
    own = unchanged / "own.parquet"
    table = pd.read_parquet(unchanged / "data" / "preferences.parquet")
    table.assign(chosen=~table["chosen"]).to_parquet(own)
    change_params(unchanged, "pairs", table="own.parquet")
    printed = dvc(unchanged, "repro", "pairs", fails=True)
    assert re.search(
        r"own.parquet: the chosen picture of pair '\w+' scores .*; swap them or leave the pair out", printed
    )
    assert "Running stage 'preferences'" not in printed
    assert "Traceback" not in printed
    own.unlink()
    assert "own.parquet" in dvc(unchanged, "repro", "pairs", fails=True)


def test_in_another_place_it_is_up_to_date_until_the_raw_data_changes(made, tmp_path):
    """That the stages make the same bytes there: test_prepare.py."""
    clone = tmp_path / "clone"
    shutil.copytree(made, clone, symlinks=True)
    assert "Data and pipelines are up to date" in dvc(clone, "repro")

    with (clone / "data" / "raw" / "numbers.txt").open("a") as raw:
        raw.write("the number 1000\n")
    assert "Running stage 'prompts@digits'" in dvc(clone, "repro", "prompts@digits")
    assert len(load_prompts(clone / "data" / "prompts.parquet")) == 1001
    would_run = dvc(clone, "repro", "--dry")
    assert "Running stage 'base_model'" in would_run
    assert "Running stage 'embeddings@digits'" in would_run
    assert "Running stage 'prompts@digits'" not in would_run


def test_another_data_set_has_stages_of_its_own(made):
    """From a table of chats and a list, each a split; a recipe takes the set by its name."""
    raw = made / "data" / "raw" / "signs"
    raw.mkdir()
    words = [{"data_source": "signs", "prompt": [{"role": "user", "content": f'a sign "{n}"'}]} for n in range(4)]
    pd.DataFrame(words).to_parquet(raw / "train.parquet")
    (raw / "test.txt").write_text('a board "8"\na board "9"\n')
    params = yaml.safe_load((made / "params.yaml").read_text())
    signs = copy.deepcopy(params["data_sets"]["digits"]) | {"folder": "data/signs"}
    files = ["data/raw/signs/train.parquet", {"file": "data/raw/signs/test.txt", "split": "test"}]
    signs["prompts"] |= {"files": files, "n_test": 0, "n_train": None, "target_pattern": '"([^"]+)"'}
    signs["embeddings"] |= {"max_sequence_length": 1000, "negative_prompt": "dark"}
    params["data_sets"]["signs"] = signs
    kept = {name: (made / name).read_text() for name in ("params.yaml", "dvc.lock")}
    before = {name: content for name, (_, content) in snapshot(made).items()}
    (made / "params.yaml").write_text(yaml.safe_dump(params))
    printed = dvc(made, "repro", "embeddings@signs")
    assert "Running stage 'prompts@signs'" in printed
    assert "Running stage 'embeddings@signs'" in printed
    assert not re.search("Running stage '(base_model|embeddings@digits)'", printed)
    after = {name: content for name, (_, content) in snapshot(made).items()}
    assert {name: after[name] for name in before} == before
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        data = DataConfig(name="signs")
        test = load_prompts(data.prompts, "test")
        assert [prompt.target for prompt in test] == ["8", "9"]
        assert len(load_prompts(data.prompts, "train")) == 4
        stored = PromptEmbeddings.open(data.embeddings)
        assert stored.max_sequence_length == 1000
        assert test[0].uid in stored
    shutil.rmtree(raw)
    shutil.rmtree(made / "data" / "signs")
    for name, text in kept.items():
        (made / name).write_text(text)


@pytest.mark.parametrize(
    ("file", "stage", "sources"),
    [
        ("dvc.yaml", "embeddings", {"embeddings", "text_encoding", "prompts"}),
        ("dvc.yaml", "preferences", {"preferences", "pairs"}),
        ("dvc.yaml", "pairs", {"pairs", "digests"}),
        ("data/words/dvc.yaml", "words_embeddings", {"embeddings", "text_encoding", "prompts"}),
    ],
)
def test_what_writes_a_stages_files_is_a_dependency_of_it(file: str, stage: str, sources: set[str]) -> None:
    """Else `dvc repro` keeps what a mended module would write anew."""
    entry = yaml.safe_load((ROOT / file).read_text())["stages"][stage]
    assert {f"tasks/data/{source}.py" for source in sources} <= {*entry.get("do", entry)["deps"]}


def test_every_source_of_the_base_model_is_a_dependency_of_its_stage():
    """dvc.yaml names the files one by one, because a folder would bring its __pycache__ along."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    model = {path.relative_to(ROOT).as_posix() for path in (ROOT / "models" / "tiny_qwen_image").glob("*.py")}
    assert model - set(stages["base_model"]["deps"]) == {"models/tiny_qwen_image/__init__.py"}
