# SPDX-License-Identifier: Apache-2.0
"""What a run would have said at its start, beside what was measured: `python -m benchmarks.expectations`.

The measured seconds are those of docs/recipes.md, docs/placement.md and docs/words.md, on H200s. Nothing is trained:
the recipes' own configs, the published shapes without weights, and `tasks.run.expectation`. It prints a table.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from benchmarks.real_size import write_configs
from models.cost.device_peaks import BFLOAT16, peak_tflops
from models.cost.flops import Batch, PolicyFlops
from models.cost.measured_shares import MEASURED_ON
from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.words_stable_diffusion_3.build import build_transformer, build_vae
from models.words_stable_diffusion_3.settings import WordsSettings
from tasks.config.recipes import load_recipe
from tasks.config.tree import TrainConfig
from tasks.run.expectation import Expectation, expect
from tests.support.tiny_models import embeddings_of

ROOT = Path(__file__).parent.parent
ONE_GPU = "one_h200.json"


@dataclass(frozen=True)
class Row:
    """A run whose seconds are known.

    Attributes:
        name: of it in the table.
        recipe: a train deployment.
        model: of `tests.support.published_models`.
        text: tokens of the longest prompt.
        rollout, update: measured seconds of an iteration, old log-probs not among them.
        changes: to the recipe, beside those of one machine with one GPU.
        note: what else the machine did.
    """

    name: str
    recipe: str
    model: str
    text: int
    rollout: float
    update: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def prompts(count: int, mini: int = 1, **sections: Any) -> dict[str, Any]:
    """Changes: so many prompts an iteration and an optimiser step."""
    policy = {"actor": {"ppo_mini_batch_size": mini}} | sections.pop("policy", {})
    return {"data": {"train_batch_size": count}, "actor_rollout_ref": policy} | sections


AHEAD = prompts(
    4,
    4,
    policy={
        "rollout": {
            "placement": "separate",
            "num_actors": 1,
            "enable_sleep_mode": True,
            "weight_transport": "object_store",
        },
        "actor": {"ppo_mini_batch_size": 4, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "gaussian"},
    },
    algorithm={"rollout_correction": {"bypass_mode": False, "rollout_is": "step"}},
    trainer={"n_gpus_per_node": 1, "one_step_off_policy": True},
)
WORDS = {"data": {"train_batch_size": 64}, "actor_rollout_ref": {"rollout": {"n": 64}}}
BESIDE = "beside other runs"
ROWS = (
    Row("`sd35-ocr-flow-grpo`", "sd35-ocr-flow-grpo", "sd3.5-medium", 205, 5.5, 11.3, prompts(2)),
    Row("the same, its rollout awake", "sd35-ocr-flow-grpo", "sd3.5-medium", 205, 5.9, 11.9, prompts(2)),
    Row("`z-image-ocr-flow-grpo-lora`", "z-image-ocr-flow-grpo-lora", "z-image", 64, 15.8, 5.1, prompts(2)),
    Row(
        "Stable Diffusion 3.5, one GPU samples a step ahead of the other, no KL",
        "sd35-ocr-flow-grpo",
        "sd3.5-medium",
        205,
        10.5,
        16.6,
        AHEAD,
    ),
    Row("`words`, 64 pictures a prompt", "words", "words", 25, 1.4, 2.3, WORDS),
    Row(
        "`diffusion-nft`",
        "diffusion-nft",
        "sd3.5-medium",
        205,
        3.0,
        22.3,
        prompts(2, policy={"rollout": {"pipeline": {"solver": "euler"}}}),
        BESIDE,
    ),
    Row("`flux-ocr-flow-grpo-lora`", "flux-ocr-flow-grpo-lora", "flux.1-dev", 512, 14.1, 4.9, prompts(2), BESIDE),
    Row(
        "`qwen-image-ocr-flow-grpo-lora`",
        "qwen-image-ocr-flow-grpo-lora",
        "qwen-image",
        64,
        27.0,
        29.0,
        prompts(2),
        BESIDE,
    ),
)


def config_of(row: Row) -> TrainConfig:
    """The recipe as it was run."""
    config = load_recipe(row.recipe, ROOT / "prefect.yaml")
    if config.actor_rollout_ref.rollout.placement != "colocated":
        config = config.with_changes(json.loads((ROOT / "machines" / ONE_GPU).read_text()))
    return config.with_changes(dict(row.changes))


def expected(row: Row, folder: Path) -> Expectation:
    """By what the row's run would have said at its start."""
    config = config_of(row)
    write_words(folder) if row.model == "words" else write_configs(row.model, folder)
    settings = config.actor_rollout_ref
    trained = settings.model.model_copy(update={"path": str(folder)})
    model = DiffusionModelConfig.load(trained, settings.rollout.pipeline, settings.rollout.algo)
    guided = DiffusionModelBase.get_class(model).is_guided(model.pipeline)
    texts = embeddings_of(model, (row.text,), row.text if guided else None)
    actor = settings.actor
    constant = actor.guidance_gradient == "conditional"
    cost = pass_cost(model, texts, 1, actor.fsdp_config.gradient_checkpointing, constant)
    flops = PolicyFlops(model, cost, Batch(1, row.text, row.text if guided else 0))
    peak = peak_tflops(MEASURED_ON, BFLOAT16)
    if (
        peak is None
        or (found := expect(config, flops, dict.fromkeys(("rollout", "update"), peak), measured=True)) is None
    ):
        raise ValueError(f"{row.name} is not what was measured: its peak is not known")
    return found


def write_words(folder: Path) -> None:
    """The configs of the words model, in the place of its weights."""
    with torch.device("meta"):
        parts = {"transformer": build_transformer(WordsSettings()), "vae": build_vae(WordsSettings())}
    for name, part in parts.items():
        part.save_config(folder / name)
    FlowMatchEulerDiscreteScheduler().save_config(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))


def table() -> str:
    """A line for each row."""
    lines = ["| Run | rollout s: expected | measured | update s: expected | measured | |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            found = expected(row, Path(folder))
        rollout, update = found.placed.rollout, found.update / found.trainer_gpus
        lines.append(
            f"| {row.name} | {rollout:.1f} | {row.rollout} ({row.rollout / rollout - 1:+.0%}) | {update:.1f} | "
            f"{row.update} ({row.update / update - 1:+.0%}) | {row.note} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
