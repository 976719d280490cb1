# SPDX-License-Identifier: Apache-2.0
"""The words model's stages under a real DVC and its recipes as real runs, with the smallest model, on the CPU."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.support.patience import PATIENCE
from tests.support.platform_helpers import RayHead, Workspace
from tests.support.smallest_words import ACTOR, ON_THE_CPU, ROLLOUT, SMALL, STAGES, fill

pytest.importorskip("dvc", reason="the data stages need the extra doubleflow[data]")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "words.md"


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str], forked_python: Path
) -> tuple[Workspace, str]:
    """A repository after `dvc repro data/words/dvc.yaml`, and what that printed."""
    folder = tmp_path_factory.mktemp("words")
    fill(folder)
    path = f"{forked_python.parent}{os.pathsep}{os.environ['PATH']}"  # the stages call `python`
    workspace = Workspace(folder, prefect_server | {"PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"})
    workspace.run("-m", "dvc", "init", "--no-scm", "--quiet")
    return workspace, workspace.run("-m", "dvc", "repro", STAGES)


def base_model(workspace: Workspace, **environment: str) -> str:
    """What the stage prints that must fail."""
    there = replace(workspace, environment=workspace.environment | environment)
    process = there.start("-m", "flows.prepare_words", "base-model")
    assert process.wait(PATIENCE) != 0, process.output()
    return process.output()


def test_its_stages_make_what_a_run_reads(made: tuple[Workspace, str]) -> None:
    workspace, printed = made
    for stage in ("words_prompts", "words_base_model", "words_embeddings"):
        assert re.search(f"Running stage '.*{stage}'", printed)
    data = workspace.folder / "data" / "words"
    metrics = yaml.safe_load((data / "base_model_metrics.json").read_text())
    assert metrics["held_out_images"] == 2 * SMALL.n_test
    assert set(metrics) >= {"held_out_reward", "held_out_exact", "watched_reward", "vae_loss", "transformer_loss"}
    assert "Data and pipelines are up to date" in workspace.run("-m", "dvc", "repro", STAGES)


def test_repro_in_the_root_knows_nothing_of_it(made: tuple[Workspace, str]) -> None:
    assert "words" not in made[0].run("-m", "dvc", "stage", "list")


def test_a_gate_that_it_does_not_pass_leaves_the_old_model(made: tuple[Workspace, str]) -> None:
    folder = made[0].folder
    params = (folder / "params.yaml").read_text()
    model = folder / "data" / "words" / "base_model"
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    one_reader = params.replace("processes: 2", "processes: 1")
    (folder / "params.yaml").write_text(one_reader.replace("min_reward: 0.0", "min_reward: 0.99"))
    printed = base_model(made[0])
    (folder / "params.yaml").write_text(params)
    assert "is not within words.gate [0.99, 1.0]; set a higher words.model.target_reward in params.yaml" in printed
    assert "Traceback" not in printed
    assert before == {path: path.stat().st_mtime_ns for path in model.rglob("*")}


def test_without_a_gpu_its_stage_says_so(made: tuple[Workspace, str]) -> None:
    folder = made[0].folder
    params = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(params.replace("device: cpu", "device: cuda"))
    printed = base_model(made[0], CUDA_VISIBLE_DEVICES="")
    (folder / "params.yaml").write_text(params)
    assert "error: words.device in params.yaml is cuda, but torch finds no GPU here" in printed


def test_its_recipe_trains(made: tuple[Workspace, str], ray_head: RayHead) -> None:
    changes = [word for setting in ON_THE_CPU for word in ("--set", setting)]
    printed = made[0].on(ray_head).run("-m", "flows.train", "words-flow-grpo", *changes)
    assert re.search(r"run\s+words-flow-grpo-\w+\n\s+trained\s+2 iterations", printed)
    assert "weights        runs/" in printed, "no optimiser step was made"
    (run,) = made[0].mlflow_runs()
    read = {item.dataset.name for item in run.inputs.dataset_inputs}
    assert read == {f"data/words/{name}" for name in ("prompts.parquet", "base_model", "embeddings")}


HACKED = """
import numpy as np


def dark(images, prompts):
    return 1 - images.mean(axis=(1, 2, 3), dtype=np.float64) / 255
"""
AT_ONCE = [  # what this model, which draws no word, can learn in an iteration, and guards that ask for little
    "trainer.test_freq=1",
    "trainer.total_training_steps=8",
    "actor_rollout_ref.model.lora_rank=0",
    f"{ACTOR}.optim.lr=3.0e-2",
    f"{ACTOR}.diffusion_loss.nft_beta=0.1",
    f"{ROLLOUT}.n=8",
    "algorithm.best_worst_k=2",
    f"{ACTOR}.ema={{enable: false}}",
    "reward.guards.p_value=0.5",
    "reward.guards.reward_margin=0",
    "reward.guards.statistics=false",
    "reward.guards.validations=1",
]


def test_the_pages_hacked_run_is_stopped_by_a_guard(made: tuple[Workspace, str], ray_head: RayHead) -> None:
    """Its command as it stands there, with all of its readers; but the reward is brightness, which these pictures can
    rise in, and one guard more sees that they do."""
    (made[0].folder / "hacked_reward.py").write_text(HACKED)
    (block,) = re.findall(r"```\n(python -m flows.train words --set.*?)```", PAGE.read_text(), re.DOTALL)
    hackable = "brightness: {}, dark: {reward: 'hacked_reward:dark', guard: true}"
    _, *command = shlex.split(block.replace("\\\n", "").replace("jpeg_compressibility: {}", hackable))
    smallest = [setting for setting in ON_THE_CPU if not setting.startswith("reward.")]
    printed = (
        made[0].on(ray_head).run(*command, *[word for s in [*smallest, *AT_ONCE] for word in ("--set", s)], check=False)
    )
    printed = " ".join(printed.split())
    assert "by reward.guards.action stop: the held-out reward rises while dark falls" in printed
    assert "Traceback" not in printed
    (run,) = (run for run in made[0].mlflow_runs() if run.info.run_name.startswith("words-hacked"))
    assert run.info.status == "FAILED"
    assert {f"guard/{name}/flag" for name in ("tesseract", "ink_and_paper", "ocr")} < set(run.data.metrics)
    assert run.data.metrics["guard/dark/flag"] == 1.0
