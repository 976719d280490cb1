# SPDX-License-Identifier: Apache-2.0
"""The page of a first real run: its download by the hub's own command line, its other commands by what they name."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import CliRunner
from huggingface_hub.cli import download, hf
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner as TyperRunner

from benchmarks import drawn_checkpoint
from benchmarks.expectations import ROWS, expected
from flows.deploy.service_record import ENVIRONMENT
from models.weights.canary import Agreement
from tasks.config.params import DataSetParams
from tasks.config.recipes import load_recipe
from tests.support.published_layout import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "first-real-run.md"
ROOT = PAGE.parents[1]
TEXT = PAGE.read_text()
COMMANDS = [
    line for block in re.findall(r"^```\w*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
MACHINE, REHEARSAL = "machines/one_h200.json", "benchmarks/rehearsal.json"


def test_the_download_takes_the_components_and_nothing_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub is asked for it, where a pattern that is no option's would be the one file to take."""
    asked: list[dict[str, Any]] = []
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(download, name, lambda **given: asked.append(given) or "there")
    (line,) = re.findall(r"^hf (download .+)$", PAGE.read_text(), re.MULTILINE)
    done = CliRunner().invoke(hf.app, shlex.split(line))
    assert done.exit_code == 0, done.output
    (request,) = asked
    assert request["repo_id"] == "stabilityai/stable-diffusion-3.5-medium"
    LAYOUTS["sd3.5-medium"].save(tmp_path)
    components = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    LAYOUTS["sd3.5-medium"].publish(tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    taken = {*filter_repo_objects(files, ignore_patterns=request["ignore_patterns"])}
    wanted = {name for name in files if name.partition("/")[0] in components and "fp16" not in name}
    assert "text_encoder_3/model-00002-of-00002.safetensors" in wanted
    assert wanted | {"model_index.json"} <= taken
    assert {name for name in taken - wanted if name.endswith(".safetensors") or "fp16" in name} == set()


def data_set() -> DataSetParams:
    """As docs/data.md has it, which the page says to write into params.yaml."""
    (block,) = re.findall(
        r"^```yaml\n(data_sets:\n  sd35-ocr:.*?)^```", (ROOT / "docs/data.md").read_text(), re.M | re.S
    )
    return DataSetParams.model_validate(yaml.safe_load(block)["data_sets"]["sd35-ocr"])


def test_every_command_of_the_page_is_one_that_is_tested_here() -> None:
    """The download above; those with a network, a server or a GPU are looked at by their parts."""
    known = (
        "hf download ",
        "dvc repro ",
        "python -m benchmarks.drawn_checkpoint ",
        "prefect deployment run ",
        "git clone ",
    )
    others = {". .venv/bin/activate", "make up", ". .services/environment"}
    assert [line for line in COMMANDS if not line.startswith(known) and line not in others] == []
    assert others <= {*COMMANDS}
    assert ENVIRONMENT.as_posix() == ".services/environment"
    assert re.search(r"^up: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_stages_are_those_of_the_data_set() -> None:
    """What they write is where the recipe looks, and their files are where the page copies them to."""
    stages = {line.removeprefix("dvc repro ") for line in COMMANDS if line.startswith("dvc repro ")}
    assert stages == {"prompts@sd35-ocr", "embeddings@sd35-ocr"}
    there = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert all(there[stage.partition("@")[0]]["foreach"] == "${data_sets}" for stage in stages)
    entry, config = data_set(), load_recipe("sd35-ocr-flow-grpo", ROOT / "prefect.yaml")
    assert (entry.table, entry.embedded) == (config.data.prompts, config.data.embeddings)
    assert entry.embeddings.model == config.actor_rollout_ref.model.path == "data/stable_diffusion_3_5"
    files = {file.file if hasattr(file, "file") else file for file in entry.prompts.files}
    assert files == {"data/raw/ocr/train.txt", "data/raw/ocr/test.txt"}
    (clone,) = [line for line in COMMANDS if line.startswith("git clone ")]
    assert clone.endswith("mkdir -p data/raw/ocr && cp /tmp/flow_grpo/dataset/ocr/{train,test}.txt data/raw/ocr/")


def test_the_drawn_checkpoints_go_where_the_recipe_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(drawn_checkpoint, "write", lambda *given: drawn.append(given) or {})
    monkeypatch.setattr(drawn_checkpoint, "write_tiny", lambda *given: drawn.append(given))
    monkeypatch.setattr(drawn_checkpoint, "load_prompts", lambda file: [])
    app = typer.Typer()
    app.command()(drawn_checkpoint.main)
    for line in COMMANDS:
        if line.startswith("python -m benchmarks.drawn_checkpoint "):
            done = TyperRunner().invoke(app, shlex.split(line)[3:])
            assert done.exit_code == 0, done.output
    folder = Path(data_set().embeddings.model)
    assert drawn == [("sd3.5-medium", folder, [], "cuda", ("text", "image")), ("sd3.5-medium", folder)]


@pytest.mark.parametrize("file", [MACHINE, REHEARSAL])
def test_the_run_is_a_deployment_that_takes_the_files_overrides(file: str) -> None:
    """And what the page says of either."""
    assert f'prefect deployment run train/sd35-ocr-flow-grpo --param overrides="$(cat {file})" --watch' in COMMANDS
    recipe = load_recipe("sd35-ocr-flow-grpo", ROOT / "prefect.yaml")
    config = recipe.with_changes(json.loads((ROOT / file).read_text()))
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if file == MACHINE:
        assert (config.gpus, recipe.gpus, recipe.rollout_devices, recipe.trainer.world_size) == (1, 8, 4, 4)
        assert trainer.save_freq == int(re.findall(r"`save_freq` is (\d+) iterations", TEXT)[0])
        assert config.data.train_batch_size * rollout.n == int(re.findall(r"(\d+) pictures at [\d.]+ a s", TEXT)[0])
        assert rollout.micro_batch_size == int(re.findall(r"the recipe's micro-batch of (\d+)", TEXT)[0])
        return
    assert trainer.device == "cpu"
    assert (rollout.pipeline.height, rollout.pipeline.width) == (32, 64)
    assert "pictures of 32 by 64 pixels, two iterations of two prompts, and a second reward" in " ".join(TEXT.split())
    assert (trainer.total_training_steps, config.data.train_batch_size, len(config.reward.functions)) == (2, 2, 2)


def test_what_the_page_expects_is_what_the_run_does(tmp_path: Path) -> None:
    """Of the recipe as it is, on one GPU; on eight that share, an eighth, and on four and four the same twice over."""
    found = expected(replace(ROWS[0], changes={}), tmp_path)
    (one,) = re.findall(r"\| (\d+) s, ([\d.]+) pictures a second: rollout (\d+), update (\d+) \|", TEXT)
    seconds = found.placed.seconds
    assert one == (f"{seconds:.0f}", f"{found.samples / seconds:.2f}", f"{found.rollout:.0f}", f"{found.update:.0f}")
    (eight,) = re.findall(r"\| (\d+) s with `machines/eight_h200.json`, (\d+) s without", TEXT)
    recipe = load_recipe("sd35-ocr-flow-grpo", ROOT / "prefect.yaml")
    shared = recipe.with_changes(json.loads((ROOT / "machines/eight_h200.json").read_text()))
    assert eight == tuple(
        f"{found.on(config.rollout_devices, config.trainer.world_size, False).seconds:.0f}"
        for config in (shared, recipe)
    )


def test_what_was_measured_is_what_the_recipes_page_has() -> None:
    row = re.findall(r"^\| `sd35-ocr-flow-grpo` \| (.*?) \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)[0]
    cells = [cell.strip() for cell in row.split("|")]
    trainer, rollout = re.findall(r"trainer ([\d.]+) GiB at most, rollout ([\d.]+)", TEXT)[0]
    (first,), (continued,) = (
        re.findall(text, TEXT) for text in (r"\| (\d+) s with two prompts", r"same command: (\d+) s")
    )
    (embeddings,) = re.findall(r"\| embeddings \| (\d+) s", TEXT)
    assert cells[9] == f"{trainer} and {rollout}"
    assert cells[11:14] == [embeddings, first, continued]


def test_the_metrics_to_look_at_are_logged() -> None:
    """Of the last table; each by where it is made."""
    table = TEXT.split("## When it does not look so")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `(\S+)`", table, re.MULTILINE))
    sources = "".join(file.read_text() for floor in ("tasks", "models") for file in (ROOT / floor).rglob("*.py"))
    made = {f"sync/canary_{name}" for name in Agreement._fields} | {"critic/rewards/mean"}
    assert "sync/canary_difference" in named
    lacking = [name for name in named - made if f'"{name.partition("/")[2]}"' not in sources]
    assert lacking == []
