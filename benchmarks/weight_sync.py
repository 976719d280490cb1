# SPDX-License-Identifier: Apache-2.0
"""What a weight sync of a colocated run takes, through Ray and with its proof: seconds, and what they consist of.

    python -m benchmarks.weight_sync --model sd3.5-medium flux.1-dev               # on one GPU
    python -m benchmarks.weight_sync --model sd3.5-medium flux.1-dev --beside PATH # and another checkout, in turn
    python -m benchmarks.weight_sync --model tiny --lora-rank 20000 --device cpu   # many weights, hardly a forward

One trainer rank and one rollout worker share a GPU, with random weights of published shapes and the recipes' LoRA,
batch and guidance. Between two syncs every trained weight changes. Each checkout has a process of its own, one after
the other, twice over; a row has the smallest and the median seconds of all syncs but a process's first of each way,
which may compile. The parts are those of the smallest: the trainer's `gather` and `trainer_canary` are beside the
worker's, which follow each other. A checkout that does not tell them has none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from models.config.actor import DiffusionActorConfig, ForwardProcessConfig, FSDPConfig
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelConfig
from models.families.latents import component_config
from models.samples.trajectories import PromptTable
from models.weights.canary import Canary, CanaryLimits
from models.weights.trainable import trainable
from tasks.actors.cluster import ray_cluster
from tasks.actors.rank_places import RankPlaces
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import TrainerGroup
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.trainer import RayConfig, TrainerConfig

WAYS = ("object_store", "ipc")
RANDOM_WEIGHTS = """import torch
from benchmarks.real_size import use_random_weights
from models.families.flux import Flux
from models.families.qwen_image import QwenImage
from models.families.stable_diffusion_3 import StableDiffusion3
for family in (Flux, QwenImage, StableDiffusion3):
    use_random_weights(family, "cuda" if torch.cuda.is_available() else "cpu")
"""
"""A module that the actors import before they load a model."""


@dataclass(frozen=True)
class Work:
    """A recipe's part in a sync.

    Attributes:
        lora: rank.
        batch: samples of the rollout's forward pass, which the canary has.
        pipeline: how a picture is sampled.
        tokens: of a prompt.
    """

    lora: int
    batch: int
    pipeline: dict[str, Any]
    tokens: int


LARGE = {"height": 512, "width": 512, "num_inference_steps": 10}
WORK = {
    "tiny": Work(4, 4, {"height": 16, "width": 24, "num_inference_steps": 4, "true_cfg_scale": 3.0}, 6),
    "sd3.5-medium": Work(32, 24, LARGE | {"guidance_scale": 1.0}, 205),
    "flux.1-dev": Work(64, 8, LARGE | {"guidance_scale": 3.5}, 512),
    "qwen-image": Work(64, 8, LARGE | {"true_cfg_scale": 4.0}, 256),
}


def save_model(model: str, work: Path) -> None:
    """The model's folder, and the module with which its weights are drawn."""
    from benchmarks.real_size import write_model  # here: a turn has the package of a checkout that may be older

    (work / "random_weights.py").write_text(RANDOM_WEIGHTS)
    write_model(model, work / model)


def prompts_of(folder: Path, tokens: int) -> PromptTable:
    """Two prompts and a negative one with random embeddings of the model's width."""
    text, generator = component_config(str(folder), "transformer"), torch.Generator().manual_seed(0)

    def embedded(rows: int, prefix: str = "") -> dict[str, torch.Tensor]:
        found = {"prompt_embeds": torch.randn(rows, tokens, text["joint_attention_dim"], generator=generator)}
        found["prompt_embeds_mask"] = torch.ones(rows, tokens, dtype=torch.bool)
        if "pooled_projection_dim" in text:
            found["pooled_prompt_embeds"] = torch.randn(rows, text["pooled_projection_dim"], generator=generator)
        return {prefix + name: tensor for name, tensor in found.items()}

    return PromptTable.of(embedded(2) | embedded(1, "negative_"))


def change(rank: Any) -> None:
    """Move every trained weight a little."""
    with torch.no_grad():
        for parameter in trainable(rank.engine.module).values():
            parameter.add_(1e-4)


def model_settings(arguments: argparse.Namespace, model: str) -> DiffusionModelConfig:
    """Of the model's folder, with the recipe's LoRA."""
    work, on_gpu = WORK[model], arguments.device == "cuda"
    return DiffusionModelConfig.load(
        ModelConfig(
            path=str(arguments.work / model),
            dtype="bfloat16" if on_gpu else "float32",
            compile=on_gpu and not arguments.eager,
            lora_rank=arguments.lora_rank or work.lora,
            lora_alpha=64,
            external_lib=None if model == "tiny" else "random_weights",
        ),
        DiffusionPipelineConfig(**work.pipeline),
        DiffusionRolloutAlgoConfig(noise_level=0.0),
    )


def start(arguments: argparse.Namespace, model: str) -> tuple[TrainerGroup, RolloutGroup]:
    """One trainer rank and one rollout worker at its place, with their models loaded."""
    config, batch = model_settings(arguments, model), WORK[model].batch
    actor = DiffusionActorConfig(ppo_micro_batch_size_per_gpu=batch, fsdp_config=FSDPConfig())
    settings = DiffusionRolloutConfig(
        n=batch, micro_batch_size=batch, placement="colocated", pipeline=config.pipeline, algo=config.algo
    )
    places = RankPlaces(1, 1, arguments.device, 2)
    nothing: Any = None  # no prompt is sampled
    rollout = RolloutGroup(config, nothing, settings, device=arguments.device, seed=0, places=places)
    trainer = TrainerGroup(
        config,
        actor,
        ForwardProcessConfig(),
        TrainerConfig(n_gpus_per_node=1, device=arguments.device),
        mini_batch_samples=batch,
        places=places,
    )
    ray.get(trainer.start())
    rollout.group.call_all("ready")
    return trainer, rollout


def measure(arguments: argparse.Namespace, model: str) -> None:
    """Print a line of JSON for each sync but each way's first."""
    work, version = WORK[model], 0
    canary = Canary(prompts_of(arguments.work / model, work.tokens), rows=work.batch, timesteps=3)
    limits = CanaryLimits(0.01 if arguments.device == "cuda" else 0.0)
    with ray_cluster(RayConfig(num_cpus=4)):
        trainer, rollout = start(arguments, model)
        for way in WAYS:
            rollout.settings = rollout.settings.model_copy(update={"weight_transport": way})
            for number in range(arguments.syncs + 1):
                version += 1
                ray.get([rank.__ray_call__.remote(change) for rank in trainer.group.actors])
                begun = time.perf_counter()
                synced = trainer.broadcast(rollout, canary, version, limits, "policy")
                line = {"model": model, "way": way, "seconds": time.perf_counter() - begun, "gib": synced.gib}
                line["parts"] = dict(getattr(synced, "seconds", {}))
                if number:
                    print(json.dumps(line), flush=True)
                ray.get([rank.__ray_ready__.remote() for rank in trainer.group.actors])  # a copy may be under way


def lines_of(checkout: Path, arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """What a process of this file over the code of a checkout prints. Raises CalledProcessError where it fails."""
    command = [sys.executable, __file__, "--turn", "--model", model, *("--work", str(arguments.work))]
    command += ["--device", arguments.device, "--syncs", str(arguments.syncs)]
    command += ["--lora-rank", str(arguments.lora_rank)] if arguments.lora_rank else []
    command += ["--eager"] if arguments.eager else []
    environment = os.environ | {"PYTHONPATH": f"{checkout}:{arguments.work}"}
    done = subprocess.run(command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, a row a model, way and checkout."""
    parts = list(dict.fromkeys(part for line in lines for part in line["parts"]))
    columns = ["model", "weight_transport", "checkout", "GiB", "least s", "median s", *parts]
    rows = [columns, ["---"] * len(columns)]
    for key in sorted({(line["model"], line["way"], line["checkout"]) for line in lines}):
        own = [line for line in lines if (line["model"], line["way"], line["checkout"]) == key]
        least = min(own, key=lambda line: line["seconds"])
        median = statistics.median(line["seconds"] for line in own)
        cells = [f"{least['gib']:.2f}", f"{least['seconds']:.3f}", f"{median:.3f}"]
        rows.append(
            [*key, *cells, *(f"{least['parts'][part]:.3f}" if part in least["parts"] else "" for part in parts)]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORK, nargs="+", default=["tiny"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_weight_sync"))
    parser.add_argument("--beside", type=Path, help="a checkout to compare this one with")
    parser.add_argument("--syncs", type=int, default=5, help="of each way, after a first one")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each checkout")
    parser.add_argument("--lora-rank", type=int, help="if not the recipe's")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    if arguments.turn:
        measure(arguments, arguments.model[0])
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    own = Path(__file__).resolve().parents[1]
    checkouts = {"now": own} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    lines: list[dict[str, Any]] = []
    for model in arguments.model:
        save_model(model, arguments.work)
        for _ in range(arguments.rounds):
            for name, checkout in checkouts.items():
                lines += [line | {"checkout": name} for line in lines_of(checkout, arguments, model)]
                print(
                    f"{model}, {name}: {[round(line['seconds'], 3) for line in lines if line['model'] == model][-10:]}"
                )
    print(table(lines))


if __name__ == "__main__":
    main()
