# SPDX-License-Identifier: Apache-2.0
"""Settings that the driver refuses before Prefect, Ray or MLflow are touched: a recipe, overrides, and the checks."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from flows.recipes import load_recipe, parse_changes
from tasks.data.embeddings import write_embeddings
from tasks.data.prompts import build_prompt_table, load_prompts
from tasks.run.preflight import check_inputs
from tests.support.helpers import TEXT_DIM
from tests.support.platform_helpers import RECIPE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A user's folder: the recipe `tiny`, a model without its weights, eight train prompts and their embeddings."""
    folder = tmp_path_factory.mktemp("refused")
    data = folder / "data"
    shutil.copytree(tiny_model, data / "base_model", ignore=shutil.ignore_patterns("*.safetensors"))
    (data / "numbers.txt").write_text("".join(f"the number {number}\n" for number in range(472, 484)))
    table = build_prompt_table([str(data / "numbers.txt")], n_test=4, n_train=8, seed=0, target_pattern=None)
    table.to_parquet(data / "prompts.parquet")

    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        mask = torch.ones(len(texts), 3, dtype=torch.bool)
        return {"prompt_embeds": torch.ones(len(texts), 3, TEXT_DIM), "prompt_embeds_mask": mask}

    write_embeddings(
        load_prompts(data / "prompts.parquet"),
        encode,
        data / "embeddings",
        16,
        batch_size=4,
        negative_prompt="",
        max_sequence_length=24,
        model="",
        model_digest="",
    )
    deployment = {"name": "tiny", "entrypoint": "flows/train.py:train", "parameters": {"config": RECIPE}}
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"name": "doubleflow", "deployments": [deployment]}))
    return folder


def test_the_recipe_itself_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(check_inputs(load_recipe("tiny")).train) == 8


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.rollout.n=1", "rollout.n is 1"),
        ("actor_rollout_ref.rollout.algo.noise_level=0", "noise_level is 0"),
        ("actor_rollout_ref.rollout.algo.sde_window_range=[0, 4]", "sde_window_range"),
        ("actor_rollout_ref.rollout.algo.sde_window_range=[2, 9]", "must lie within the 4 denoising steps"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "must be a multiple of actor.ppo_mini_batch_size"),
        ("trainer.n_gpus_per_node=5", "5 trainer ranks"),
        ("data.train_batch_size=100", "has only 8 train prompts"),
        ("algorithm.adv_estimator=grop", "known: dance_grpo, flow_grpo"),
        ("actor_rollout_ref.actor.diffusion_loss.loss_mode=grop", "known: awm, dance_grpo, diffusion_nft"),
        ("algorithm.name=grop", "known: flow_grpo, dance_grpo"),
        ("reward.functions={ocrr: {}}", "no reward 'ocrr'"),
        ("actor_rollout_ref.model.path=nowhere", "nowhere/model_index.json does not exist"),
        ("actor_rollout_ref.model.initial_weights=nowhere", "which holds neither pytorch_lora_weights.safetensors nor"),
        ("actor_rollout_ref.rollout.pipeline.height=18", "must be multiples of 4"),
        ("trainer.total_training_stepz=3", "total_training_stepz"),
    ],
)
def test_a_bad_setting_is_refused_on_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    """Through the same functions as the flow, before Ray or MLflow are touched."""
    monkeypatch.chdir(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message.replace("[", r"\[")):
        check_inputs(load_recipe("tiny").with_changes(parse_changes([setting])))
    assert {path.name for path in folder.iterdir()} == {"data", "prefect.yaml"}
