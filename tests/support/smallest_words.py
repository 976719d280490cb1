# SPDX-License-Identifier: Apache-2.0
"""The words model so small that a CPU makes and trains it in seconds: a folder for it, and what a recipe changes."""

import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from models.words_stable_diffusion_3.settings import smallest

ROOT = Path(__file__).parents[2]
SMALL = smallest()
STAGES = "data/words/dvc.yaml"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
ON_THE_CPU = [
    "trainer.device=cpu",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.model.dtype=float32",
    "actor_rollout_ref.model.compile=false",
    "actor_rollout_ref.model.lora_rank=4",
    f"{ACTOR}.fsdp_config.param_dtype=float32",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.optim.lr_warmup_steps=1",  # of four optimiser steps
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
    f"{ROLLOUT}.pipeline.height={SMALL.height}",
    f"{ROLLOUT}.pipeline.width={SMALL.width}",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.micro_batch_size=8",
    f"{ROLLOUT}.cuda_graphs=false",
    "data.train_batch_size=4",
    # Its pictures hold no text: their size in bytes is a reward that always differs.
    "reward.functions={jpeg_incompressibility: {}}",
]


def fill(folder: Path) -> None:
    """The code, the recipes and the stages, whose model is the smallest; `dvc init` comes next."""
    for name in ("flows", "tasks", "models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("prefect.yaml", "dvc.yaml", "data/.gitignore", STAGES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["words"] |= {"device": "cpu", "processes": 2, "model": asdict(SMALL)}
    params["words"]["gate"] |= {"prompts": SMALL.n_test, "steps": 2, "min_reward": 0.0, "max_reward": 1.0}
    # Tuples are lists there.
    (folder / "params.yaml").write_text(yaml.dump(params, Dumper=Listing))


class Listing(yaml.SafeDumper):
    """YAML without tuples."""


Listing.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
