# SPDX-License-Identifier: Apache-2.0
"""What a pass, an optimiser step and a weight sync cost the processor, where the model itself costs nothing.

    python -m benchmarks.host_overhead                        # eager; --compile for compiled blocks
    python -m benchmarks.host_overhead --beside PATH          # another checkout in turn with this one, and the ratios

A small model's GPU waits for the host, which calls its kernels: then these milliseconds are an iteration's. The model
is the words model with twelve blocks of sixteen channels and its recipes' settings and losses, on one rank on the CPU;
all times are processor time of one thread. A checkout is a process of its own and gets its turn in each round, so that
whatever else the machine does falls on both; the smallest of the rounds counts. Of kernels this says nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from models.config.actor import (
    DiffusionActorConfig,
    DiffusionLossConfig,
    EmaConfig,
    ForwardProcessConfig,
    FSDPConfig,
    OptimConfig,
)
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelConfig
from models.families.latents import component_config
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.digests import digests_of
from models.words_stable_diffusion_3.build import build_pipeline
from models.words_stable_diffusion_3.settings import smallest

BLOCKS, BATCH, BATCHES, LEVELS, STEPS = 12, 2, 4, 4, 10
"""An iteration: so many batches of so many samples, each an optimiser step, with so many noise levels."""


def build_model(folder: Path) -> None:
    """The words model, narrow but as deep as it is."""
    if not (folder / "model_index.json").is_file():
        settings = replace(smallest(), layers=BLOCKS, heads=2, head_dim=8)
        build_pipeline(settings).save_pretrained(folder)


def model_settings(folder: Path, compiled: bool, noise_level: float = 0.0, lora_rank: int = 32) -> DiffusionModelConfig:
    """As the recipe `words`, or with noise `words-flow-grpo`, has them, in a picture of two tokens."""
    return DiffusionModelConfig.load(
        ModelConfig(path=str(folder), dtype="bfloat16", compile=compiled, lora_rank=lora_rank, lora_alpha=64),
        DiffusionPipelineConfig(
            height=16, width=32, num_inference_steps=STEPS, guidance_scale=1.0, max_sequence_length=8
        ),
        DiffusionRolloutAlgoConfig(noise_level=noise_level),
    )


def actor_settings(
    levels_per_pass: int, loss: str, checkpointing: bool = False, all_weights: bool = False
) -> DiffusionActorConfig:
    """As the recipes have them; a checkout that knows no levels, or steps, in one pass takes them one by one."""
    known = "levels_per_pass" in DiffusionActorConfig.model_fields
    given: dict[str, Any] = {"levels_per_pass": levels_per_pass} if known else {}
    if all_weights:
        given |= {
            "use_kl_loss": True,
            "kl_loss_coef": 0.05,
            "ema": EmaConfig(enable=True, decay=0.95, update_interval=1),
        }
    return DiffusionActorConfig(
        ppo_micro_batch_size_per_gpu=BATCH,
        diffusion_loss=DiffusionLossConfig(loss_mode=loss),
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0),
        fsdp_config=FSDPConfig(
            param_dtype="bfloat16", reshard_after_forward=False, gradient_checkpointing=checkpointing
        ),
        **given,
    )


def request_of(config: DiffusionModelConfig, number: int, window: tuple[int, ...] = ()) -> RolloutRequest:
    """A batch of two prompts with random embeddings."""
    width, generator = component_config(config.path, "transformer"), torch.Generator().manual_seed(number)
    prompts = PromptTable.of(
        {
            "prompt_embeds": torch.randn(BATCH, 6, width["joint_attention_dim"], generator=generator),
            "prompt_embeds_mask": torch.ones(BATCH, 6, dtype=torch.bool),
            "pooled_prompt_embeds": torch.randn(BATCH, width["pooled_projection_dim"], generator=generator),
        }
    )
    keys = tuple(NoiseKey(0, number, f"prompt-{i}", 0) for i in range(BATCH))
    nothing: frozenset[str] = frozenset()
    return RolloutRequest(keys, prompts, torch.arange(BATCH), window, record_finished=not window, outputs=nothing)


def parts(folder: Path, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Name of a part of an iteration -> what does it."""
    config = model_settings(folder, compiled)
    rollout, request = DiffusersRolloutEngine(config), request_of(config, 0)
    levels = ForwardProcessConfig(num_train_timesteps=LEVELS)
    engines, batches = learning(config, "diffusion_nft", levels)
    full = model_settings(folder, compiled, lora_rank=0)
    whole = trainer_of(full, actor_settings(LEVELS, "diffusion_nft", all_weights=True), levels)
    replays, sampled = learning(model_settings(folder, compiled, noise_level=0.7), "flow_grpo", window=range(LEVELS))
    anew = trainer_of(replays[1].model_config, actor_settings(1, "flow_grpo", checkpointing=True))
    trainer = engines[1]
    weights = trainer.gather_weights()
    return {
        f"rollout of a batch ({STEPS} passes)": lambda: rollout.produce(request),
        "update": lambda: trainer.update_policy(batches),
        "update, levels_per_pass: 4": lambda: engines[LEVELS].update_policy(batches),
        "update of all weights with KL and average, levels_per_pass: 4": lambda: whole.update_policy(batches),
        "update by sampled steps": lambda: replays[1].update_policy(sampled),
        "update by sampled steps, levels_per_pass: 4": lambda: replays[LEVELS].update_policy(sampled),
        "update by sampled steps, gradient_checkpointing": lambda: anew.update_policy(sampled),
        "old log-probs": lambda: rescored(replays[1], sampled),
        "old log-probs, gradient_checkpointing": lambda: rescored(anew, sampled),
        "weights gathered": trainer.gather_weights,
        "digests of what is sent": lambda: digests_of(weights, torch.bfloat16),
        "digests of what is held": lambda: digests_of(rollout.held_weights()),
        "weights loaded": lambda: rollout.load_weights(weights),
    }


def trainer_of(
    config: DiffusionModelConfig, settings: DiffusionActorConfig, levels: ForwardProcessConfig | None = None
) -> DiffusersFSDPEngine:
    """One that is ready."""
    engine = DiffusersFSDPEngine(config, settings, "cpu", levels)
    engine.initialize()
    return engine


def rescored(trainer: DiffusersFSDPEngine, batches: Iterable[ActorBatch]) -> None:
    """The trainer's own log-probs of all samples."""
    for batch in batches:
        for samples, _ in batch.parts:
            trainer.rescored(cast(Trajectories, samples))


def learning(
    config: DiffusionModelConfig, loss: str, levels: ForwardProcessConfig | None = None, window: Iterable[int] = ()
) -> tuple[dict[int, DiffusersFSDPEngine], list[ActorBatch]]:
    """Levels, or steps, in one pass -> a trainer by the loss; and an iteration's batches, with these steps recorded."""
    rollout, advantages = DiffusersRolloutEngine(config), torch.linspace(-1, 1, BATCH)
    requests = [request_of(config, number, tuple(window)) for number in range(BATCHES)]
    batches = [ActorBatch([(rollout.produce(one).recorded, advantages)], BATCH) for one in requests]  # type: ignore[list-item]
    engines = {together: trainer_of(config, actor_settings(together, loss), levels) for together in (1, LEVELS)}
    return engines, batches


def answer_turns(folder: Path, compiled: bool) -> None:
    """In a process of one checkout: a line of milliseconds for each line that comes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    doing = parts(folder, compiled)
    for part in doing.values():
        part()
    print("ready", flush=True)
    for _ in sys.stdin:
        took = {}
        for name, part in doing.items():
            start = time.process_time()
            part()
            took[name] = 1e3 * (time.process_time() - start)
        print(json.dumps(took), flush=True)
    dist.destroy_process_group()


def start(checkout: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    """This file over the code of a checkout."""
    command = [sys.executable, __file__, "--turns", "--work", str(arguments.work)]
    command += ["--compile"] if arguments.compile else []
    settings = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(
        command, cwd=checkout, env=os.environ | settings, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def turn(process: subprocess.Popen) -> dict[str, float]:
    """Milliseconds of one round."""
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(line_of(process))


def line_of(process: subprocess.Popen) -> str:
    """The next line that a checkout's process writes. Raises RuntimeError where it has ended."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait()}: its error is above")
    return line


def table(checkouts: list[Path], rounds: list[list[dict[str, float]]]) -> str:
    """Markdown, a row a part: the smallest milliseconds of each checkout, and the first's over the second's."""
    least = [{name: min(one[name] for one in of_checkout) for name in of_checkout[0]} for of_checkout in rounds]
    columns = [f"{checkout.name}, ms" for checkout in checkouts]
    lines = ["| | " + " | ".join([*columns, *(["ratio"] if len(columns) > 1 else [])]) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    for name in least[0]:
        cells = [f"{of_checkout[name]:.1f}" for of_checkout in least]
        cells += [f"{least[0][name] / least[1][name]:.2f}"] if len(least) > 1 else []
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_host_overhead"))
    parser.add_argument("--beside", type=Path, help="a checkout to compare this one with")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    if arguments.turns:
        answer_turns(arguments.work / "model", arguments.compile)
        return
    build_model(arguments.work / "model")
    own = Path(__file__).resolve().parents[1]
    checkouts = [*([arguments.beside.resolve()] if arguments.beside else []), own]
    running = [start(checkout, arguments) for checkout in checkouts]
    try:
        for process in running:
            line_of(process)
        rounds: list[list[dict[str, float]]] = [[] for _ in running]
        for _ in range(arguments.rounds):
            for process, found in zip(running, rounds, strict=True):
                found.append(turn(process))
        print(table(checkouts, rounds))
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
