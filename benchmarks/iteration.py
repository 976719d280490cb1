# SPDX-License-Identifier: Apache-2.0
"""One whole iteration at real size on one GPU, change by change, beside the public Flow-GRPO loop.

    python -m benchmarks.iteration --model sd3.5-medium --public-loop PATH    # a clone of the public code
    python -m benchmarks.iteration --model qwen-image
    python -m benchmarks.iteration --model qwen-image --ranks 4               # on four GPUs, weak scaling
    python -m benchmarks.iteration --model tiny --device cpu                  # that it runs

An iteration is a rollout with its decoded pictures, the update of one optimiser step, and the weights' way back to the
rollout. Every variant is a process of its own; its line of JSON goes to <work>/results.jsonl, and a variant that is
there is not run again. At the end the lines are a table. Weights are random: pictures are noise, the work is not.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import models.families  # noqa: F401  registers the adapters
from benchmarks.real_size import use_random_weights, write_configs
from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, FSDPConfig
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import component_config
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.trainable import trainable


@dataclass(frozen=True)
class Work:
    """What an iteration does: the same for every variant.

    Attributes:
        steps: denoising steps.
        window: trained ones.
        lora: rank and alpha.
        guidance: the field that turns it on, and the scale.
        size: pixels a side.
        text_tokens: of a prompt.
        batch: pictures of an iteration and of the rollout's forward pass.
        micro_batch: pictures of the update's forward and backward pass.
    """

    steps: int
    window: tuple[int, ...]
    lora: tuple[int, int]
    guidance: tuple[str, float]
    size: int
    text_tokens: int
    batch: int
    micro_batch: int


WORK = {
    "tiny": Work(4, (0, 1, 2), (4, 8), ("true_cfg_scale", 4.0), 16, 16, 4, 4),
    "sd3.5-medium": Work(10, tuple(range(9)), (32, 64), ("guidance_scale", 4.5), 512, 205, 32, 32),
    "qwen-image": Work(10, (0, 1), (64, 128), ("true_cfg_scale", 4.0), 512, 128, 16, 4),
}
CONSTANT = {"guidance_gradient": "conditional"}
RECORDED = CONSTANT | {"record": True}
COMPILED = RECORDED | {"compile": True}
WHOLE = COMPILED | {"shard_frozen": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "half without prompt constant": CONSTANT,
    "and recorded": RECORDED,
    "and compiled": COMPILED,
    "and frozen weights whole": WHOLE,
}
"""Each changes one thing of the one before it."""
PUBLIC = "public loop"
CLIP = 0.2
"""Wide: within 1e-4 rounding would decide which samples have a gradient, and gradients could not be compared."""
CHECKPOINTED = {"gradient_checkpointing": True}


def configs(model: str, folder: Path, chosen: dict[str, Any], kl: float) -> tuple[DiffusionModelConfig, Any]:
    """The model's and the trainer's settings of a variant."""
    work = WORK[model]
    model_config = DiffusionModelConfig.load(
        ModelConfig(
            path=str(folder),
            dtype="float32" if model == "tiny" else "bfloat16",
            lora_rank=work.lora[0],
            lora_alpha=work.lora[1],
            compile=chosen.get("compile", False),
        ),
        DiffusionPipelineConfig(
            height=work.size, width=work.size, num_inference_steps=work.steps, **{work.guidance[0]: work.guidance[1]}
        ),
        DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7),
    )
    actor = DiffusionActorConfig(
        ppo_micro_batch_size_per_gpu=chosen["micro_batch"],
        use_kl_loss=kl > 0,
        kl_loss_coef=kl,
        guidance_gradient=chosen.get("guidance_gradient", "both"),
        diffusion_loss=DiffusionLossConfig(clip_ratio=CLIP),
        fsdp_config=FSDPConfig(
            shard_frozen=chosen.get("shard_frozen", True),
            gradient_checkpointing=chosen.get("gradient_checkpointing", False),
        ),
    )
    return model_config, actor


def request_of(
    config: DiffusionModelConfig, text_tokens: int, window: tuple[int, ...], batch: int, record: bool, iteration: int
) -> RolloutRequest:
    """`batch` samples of four prompts, with random embeddings of the model's width and another text to contrast."""
    text = component_config(config.path, "transformer")
    generator = torch.Generator().manual_seed(0)

    def embedded(rows: int, prefix: str = "") -> dict[str, Tensor]:
        tensors = {"prompt_embeds": torch.randn(rows, text_tokens, text["joint_attention_dim"], generator=generator)}
        tensors["prompt_embeds_mask"] = torch.ones(rows, text_tokens, dtype=torch.bool)
        if "pooled_projection_dim" in text:
            tensors["pooled_prompt_embeds"] = torch.randn(rows, text["pooled_projection_dim"], generator=generator)
        return {prefix + name: tensor for name, tensor in tensors.items()}

    keys = tuple(NoiseKey(dist.get_rank(), iteration, f"prompt-{i % 4}", i // 4) for i in range(batch))
    return RolloutRequest(
        keys=keys,
        prompts=PromptTable.of(embedded(4) | embedded(1, "negative_")),
        prompt_index=torch.arange(batch) % 4,
        window=window,
        record_unconditional=record,
    )


def advantages_of(batch: int) -> Tensor:
    """Some of both signs."""
    return torch.randn(batch, generator=torch.Generator().manual_seed(1))


class Clock:
    """Seconds between calls, with the work of every rank's device done: an iteration takes what its slowest does."""

    def __init__(self, device: str):
        self.device, self.last = device, 0.0
        self.lap()

    def lap(self) -> float:
        """Since the call before."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one variant."""
    work, device = WORK[arguments.model], arguments.device
    sizes = {"batch": arguments.batch or work.batch, "micro_batch": arguments.micro_batch or work.micro_batch}
    chosen = VARIANTS[arguments.variant] | sizes
    ranks, batch = dist.get_world_size(), sizes["batch"]
    chosen |= CHECKPOINTED if arguments.checkpointing else {}
    model_config, actor = configs(arguments.model, arguments.work / "model", chosen, arguments.kl)
    if arguments.model != "tiny":
        use_random_weights(DiffusionModelBase.get_class(model_config), device)
    trainer = DiffusersFSDPEngine(model_config, actor, device)
    trainer.initialize()
    move_off_zero(trainer)
    rollout = DiffusersRolloutEngine(model_config, device)
    sync(trainer, rollout)
    numbers: dict[str, Any] = {"variant": arguments.variant, "kl": arguments.kl, "ranks": ranks} | sizes
    laps: dict[str, list[float]] = {"rollout_s": [], "update_s": [], "sync_s": []}
    clock = Clock(device)
    for iteration in range(arguments.repeats + 1):
        record = chosen.get("record", False)
        request = request_of(model_config, work.text_tokens, work.window, batch, record, iteration)
        clock.lap()
        trajectories = rollout.produce(request).recorded
        assert isinstance(trajectories, Trajectories)
        laps["rollout_s"].append(clock.lap())
        if iteration == 0:
            _keep(arguments, trajectories, trainer)
            clock.lap()
        metrics = trainer.update_policy([ActorBatch([(trajectories, advantages_of(batch))], batch * ranks)])
        laps["update_s"].append(clock.lap())
        sync(trainer, rollout)
        laps["sync_s"].append(clock.lap())
        if iteration == 0:
            kept = ("grad_norm", "pg_loss", "logprob_abs_diff/mean", "logprob_abs_diff/max")
            numbers |= {name: metrics[name] for name in kept}
            numbers["first_s"] = sum(times[0] for times in laps.values())
    numbers |= {name: min(times[1:]) for name, times in laps.items()}
    numbers["images/s"] = batch * ranks / sum(min(times[1:]) for times in laps.values())
    latents = torch.randn(batch, *rollout.adapter.latent_shape(model_config), device=device)
    for _ in range(2):
        clock.lap()
        rollout.decode(latents)
        numbers["of it decoding_s"] = clock.lap()
    if device == "cuda":
        numbers["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if arguments.trace:
        _trace(arguments, rollout, trainer, request, batch)
    return numbers


def sync(trainer: DiffusersFSDPEngine, rollout: DiffusersRolloutEngine) -> None:
    """Give each rank's rollout the trainer's weights: from rank 0, over the ranks' own connection."""
    weights = trainer.gather_weights()
    if dist.get_world_size() > 1:
        weights = weights or {name: torch.empty(p.shape) for name, p in trainable(rollout.transformer).items()}
        on_device = {name: tensor.to(trainer.device) for name, tensor in weights.items()}
        for tensor in on_device.values():
            dist.broadcast(tensor, 0)
        weights = on_device
    rollout.load_weights(weights)


def move_off_zero(trainer: DiffusersFSDPEngine) -> None:
    """LoRA's B matrices start at 0, where A has no gradient: a trained model is the honest case."""
    for parameter in trainable(trainer.module).values():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        generator = torch.Generator(local.device).manual_seed(3)
        with torch.no_grad():
            local.add_(torch.randn(local.shape, generator=generator, device=local.device), alpha=0.01)


def _keep(arguments: argparse.Namespace, trajectories: Trajectories, trainer: DiffusersFSDPEngine) -> None:
    """For the public loop to replay: the first variant's samples and its LoRA weights."""
    file, weights = arguments.work / "first.pt", trainer.gather_weights()
    if weights and not file.exists():
        torch.save({"trajectories": trajectories, "weights": weights}, file)


def _trace(
    arguments: argparse.Namespace,
    rollout: DiffusersRolloutEngine,
    trainer: DiffusersFSDPEngine,
    request: RolloutRequest,
    batch: int,
) -> None:
    """Print where the device's time goes, rollout and update apart."""
    from torch.profiler import ProfilerActivity, profile

    recorded: Any = None
    for name in ("rollout", "update"):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            if name == "rollout":
                recorded = rollout.produce(request).recorded
            else:
                trainer.update_policy([ActorBatch([(recorded, advantages_of(batch))], batch)])
        print(f"--- {name}, {arguments.variant}")
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=70))


# ---- the whole


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, one row a variant, with images/s over the public loop's at the same KL."""
    public = {line["kl"]: line["images/s"] for line in lines if line["variant"] == PUBLIC}
    for line in lines:
        if line["kl"] in public:
            line["x public"] = line["images/s"] / public[line["kl"]]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    rows = [columns, ["---"] * len(columns), *([_text(line.get(column)) for column in columns] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_iteration"))
    parser.add_argument("--batch", type=int, help="pictures; the model's own number if left out")
    parser.add_argument("--micro-batch", type=int, help="of the update; the model's own number if left out")
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs, each with its own rollout and a rank of the trainer"
    )
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL to the reference")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--public-loop", type=Path, help="a clone of github.com/yifan123/flow_grpo to run beside")
    parser.add_argument("--public-batch", type=int, default=8)
    parser.add_argument("--trace", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.work / "model"
    if arguments.variant:
        on_gpu = arguments.device == "cuda"
        settings: dict[str, Any] = {"device_id": torch.device("cuda:0")} if on_gpu else {}
        dist.init_process_group("nccl" if on_gpu else "gloo", **settings)
        numbers = measure(arguments)
        if dist.get_rank() == 0:
            _append(arguments.work, numbers)
        dist.destroy_process_group()
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not (folder / "model_index.json").is_file():
        if arguments.model == "tiny":
            from tests.support.tiny_models import FAMILIES

            FAMILIES["qwen_image"].save(folder)
        else:
            write_configs(arguments.model, folder)
    done = {(line["variant"], line["kl"], line.get("ranks", 1)) for line in _lines(arguments.work)}
    for variant in arguments.variants:
        if (variant, arguments.kl, arguments.ranks) not in done:
            print(f"running {variant} on {arguments.ranks}", flush=True)
            _run_ranks(arguments.ranks, variant)
    if arguments.public_loop and (PUBLIC, arguments.kl, 1) not in done:
        from benchmarks.public_loop import run

        _append(arguments.work, run(arguments.public_loop, arguments.work, arguments.public_batch, arguments.kl))
    print(table(_lines(arguments.work)))


def _run_ranks(ranks: int, variant: str) -> None:
    """One process a rank, each with one GPU in sight, as Ray starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.iteration", *sys.argv[1:], "--variant", variant]
    running = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)})
        for rank in range(ranks)
    ]
    for process in running:
        process.wait()


def _append(work: Path, numbers: dict[str, Any]) -> None:
    with (work / "results.jsonl").open("a") as stream:
        stream.write(json.dumps(numbers) + "\n")


def _lines(work: Path) -> list[dict[str, Any]]:
    file = work / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
