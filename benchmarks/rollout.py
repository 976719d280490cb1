# SPDX-License-Identifier: Apache-2.0
"""Rollout engines side by side, on random weights: pictures a second, start-up, sync, sleep, memory, log-probs.

    python -m benchmarks.rollout --model tiny-qwen-image                           # CPU, some minutes
    python -m benchmarks.rollout --model sd3.5-medium --device cuda --work /tmp/sd3   # one GPU

Every variant runs in a process of its own. Each writes one line of JSON into <work>/results.jsonl; a variant that is
there already is not run again. At the end the lines are printed as a table. Real-size models are built from their
published configs, with random weights, below <work>/model. Weights are random, so pictures are noise.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.failures import refuse_failed
from benchmarks.logs import keep_settings, rows_in
from benchmarks.real_size import transformer, vae, write_configs
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.samples.trajectories import PromptTable, RolloutRequest, Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.weights.trainable import make_trainable, trainable

TINY = {"tiny-qwen-image": "qwen_image", "tiny-sd3": "stable_diffusion_3"}
WINDOW, REPLAYED = (0, 1), 8
LORA = {"lora_rank": 32, "lora_alpha": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "diffusers, eager": {"engine": "diffusers"},
    "diffusers, compiled": {"engine": "diffusers", "compiled": True},
    "diffusers, LoRA": {"engine": "diffusers", "lora": True},
    "vllm-omni, SDPA": {"engine": "vllm_omni", "attention": "TORCH_SDPA"},
    "vllm-omni, SDPA, LoRA": {"engine": "vllm_omni", "attention": "TORCH_SDPA", "lora": True},
    "vllm-omni, SDPA, step execution": {"engine": "vllm_omni", "attention": "TORCH_SDPA", "step_execution": True},
    "vllm-omni, FA3": {"engine": "vllm_omni", "attention": "FLASH_ATTN"},
    "vllm-omni, SDPA, compiled": {"engine": "vllm_omni", "attention": "TORCH_SDPA", "compiled": True},
    "vllm-omni, SDPA, two processes": {"engine": "vllm_omni", "attention": "TORCH_SDPA", "processes": 2},
}
ONLY_ON_A_GPU = ("diffusers, compiled", "vllm-omni, FA3", "vllm-omni, SDPA, compiled")


# ---- models


def build(model: str, folder: Path, device: str) -> None:
    """Write the model's folder, unless it is there."""
    if (folder / "model_index.json").is_file():
        return
    if model in TINY:
        from tests.support.tiny_models import FAMILIES

        FAMILIES[TINY[model]].save(folder)
        return
    aside = folder.with_name("unfinished")
    write_configs(model, aside)
    transformer(aside, torch.bfloat16, device).save_pretrained(aside / "transformer", max_shard_size="5GB")
    vae(read_architecture(aside), device).save_pretrained(aside / "vae")
    aside.rename(folder)


def settings_of(
    model: str, folder: Path, size: int, lora: bool, compiled: bool = False, steps: int = 10
) -> DiffusionModelConfig:
    """The model's config; guidance is off. Only diffusers compiles by it; vLLM-Omni has a setting of its own."""
    dtype = "float32" if model in TINY else "bfloat16"
    return DiffusionModelConfig.load(
        ModelConfig(path=str(folder), dtype=dtype, compile=compiled, **(LORA if lora else {})),
        DiffusionPipelineConfig(height=size, width=size, num_inference_steps=steps),
        DiffusionRolloutAlgoConfig(),
    )


def guided(config: DiffusionModelConfig) -> DiffusionPipelineConfig:
    """The same sampling with guidance: twice the work."""
    field = DiffusionModelBase.get_class(config).pipeline_fields[0]
    return config.pipeline.model_copy(update={field: 4.0})


def warm_up(pipeline: DiffusionPipelineConfig) -> DiffusionPipelineConfig:
    """The same sampling in as few steps as the window allows. What is compiled wants the whole at its first call."""
    return pipeline.model_copy(update={"num_inference_steps": len(WINDOW)})


def request_of(config: DiffusionModelConfig, batch: int, with_negative: bool) -> RolloutRequest:
    """`batch` samples of one prompt, with random embeddings of the model's width."""
    text = json.loads((Path(config.path) / "transformer" / "config.json").read_text())
    length, width = (16, text["joint_attention_dim"]) if text["joint_attention_dim"] < 256 else (128, None)
    width = width or text["joint_attention_dim"]
    generator = torch.Generator().manual_seed(0)
    tensors = {"prompt_embeds": torch.randn(1, length, width, generator=generator)}
    tensors["prompt_embeds_mask"] = torch.ones(1, length, dtype=torch.bool)
    if "pooled_projection_dim" in text:
        tensors["pooled_prompt_embeds"] = torch.randn(1, text["pooled_projection_dim"], generator=generator)
    if with_negative:
        # Another text: with the same one guidance would do the work and change nothing.
        tensors |= {f"negative_{name}": tensor.flip(-1) for name, tensor in tensors.items()}
    keys = tuple(NoiseKey(0, 1, "prompt", i) for i in range(batch))
    return RolloutRequest(keys, PromptTable.of(tensors), torch.zeros(batch, dtype=torch.long), WINDOW)


def weights_of(config: DiffusionModelConfig, scale: float = 0.02) -> dict[str, Tensor]:
    """What a sync sends, on the CPU: random LoRA matrices, or the folder's own weights."""
    adapter = DiffusionModelBase.get_class(config)
    if not config.model.lora_rank:
        return {name: p.data for name, p in adapter.load_transformer(config, config.dtype).named_parameters()}
    import diffusers

    text = json.loads((Path(config.path) / "transformer" / "config.json").read_text())
    with torch.device("meta"):
        module = getattr(diffusers, text["_class_name"]).from_config(text)
        make_trainable(adapter, module, config)
    return {name: torch.randn(p.shape) * scale for name, p in trainable(module).items()}


# ---- measuring


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(seconds, result)."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def used_gib(device: str) -> float | None:
    """Of the GPU's memory, by whoever."""
    if device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def can_sleep(chosen: dict[str, Any]) -> bool:
    """An engine spread over several GPUs is never colocated, so it need not sleep."""
    return chosen.get("processes", 1) == 1


def start(config: DiffusionModelConfig, chosen: dict[str, Any], device: str, largest: int) -> Any:
    """The engine of a variant."""
    if chosen["engine"] == "vllm_omni":
        from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine

        attention = chosen["attention"] if device == "cuda" else None
        settings = VllmOmniConfig(
            attention_backend=attention,
            enforce_eager=not chosen.get("compiled"),
            step_execution=bool(chosen.get("step_execution")),
            tensor_parallel_size=chosen.get("processes", 1),
        )
        return VllmOmniRolloutEngine(config, settings, max_num_seqs=largest, sleep_mode=can_sleep(chosen))
    from models.rollout.diffusers import DiffusersRolloutEngine

    return DiffusersRolloutEngine(config, device)


def replay_distance(engine: Any, trajectories: Trajectories, pipeline: DiffusionPipelineConfig) -> dict[str, float]:
    """|difference| of the log-probs to those that the trainer's own forward gives: this engine is diffusers'.

    Args:
        pipeline: how the trajectories were sampled.
    """
    adapter, device = engine.adapter, engine.device
    config = replace(engine.model_config, pipeline=pipeline)
    moved = trajectories.to(device)
    text = moved.prompts.expand(moved.prompt_index)
    scheduler = adapter.build_scheduler(config)
    distances = []
    with torch.no_grad():
        for step in range(len(moved.window)):
            one = moved.step(step)
            inputs = adapter.model_inputs(engine.transformer, config, one.latents, one.timesteps, text)
            given = {"latents": one.latents, "timesteps": one.timesteps}
            log_prob, *_ = adapter.forward_and_sample_previous_step(
                engine.transformer, scheduler, config, *inputs, given, 0
            )
            distances.append((log_prob - one.log_probs[:, 0]).abs())
    stacked = torch.cat(distances)
    return {"mean": stacked.mean().item(), "max": stacked.max().item()}


def sync_seconds(engine: Any, config: DiffusionModelConfig, device: str) -> float:
    """To take weights that lie in this process's memory; the way there is Ray's."""
    weights = weights_of(config)
    return timed(lambda: engine.load_weights(weights), device)[0]


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one variant."""
    chosen, device = VARIANTS[name], arguments.device
    lora, compiled = bool(chosen.get("lora")), bool(chosen.get("compiled"))
    folder, size, steps = arguments.work / "model", arguments.size, arguments.steps
    config = settings_of(arguments.model, folder, size, lora, compiled, steps)
    seconds, engine = timed(lambda: start(config, chosen, device, max(arguments.batches)), device)
    numbers: dict[str, Any] = {"variant": name, "start_s": seconds}
    numbers["sync_s"] = sync_seconds(engine, config, device)
    for pipeline, label in ((config.pipeline, ""), (guided(config), ", guided")):
        for batch in arguments.batches:
            request = request_of(config, batch, with_negative=bool(label))
            first = pipeline if compiled else warm_up(pipeline)
            warm, _ = timed(lambda r=request, p=first: engine.generate(r, p), device)
            seconds, _ = timed(lambda r=request, p=pipeline: engine.generate(r, p), device)
            numbers[f"images/s, {batch}{label}"] = batch / seconds
            numbers[f"first call s, {batch}{label}"] = warm
        _, paths = engine.generate(request_of(config, REPLAYED, with_negative=bool(label)), pipeline)
        torch.save(paths, arguments.work / f"{name}{label}.pt")
    numbers["GPU GiB"] = used_gib(device)
    if can_sleep(chosen):
        numbers["sleep_s"], _ = timed(engine.sleep, device)
        numbers["GPU GiB asleep"] = used_gib(device)
        numbers["wake_s"], _ = timed(engine.wake, device)
    if name == "diffusers, eager":
        for file in arguments.work.glob("*.pt"):
            if "LoRA" not in file.stem:
                trajectories = torch.load(file, weights_only=False)
                sampled_with = guided(config) if "guided" in file.stem else config.pipeline
                numbers[f"log-prob distance of {file.stem}"] = replay_distance(engine, trajectories, sampled_with)
    if chosen["engine"] == "vllm_omni":
        engine.shutdown()
    return numbers


# ---- the whole


def variants(device: str) -> Iterator[str]:
    """Those that this machine can run; the trainer's own forward, which replays the others' samples, comes last."""
    for name in VARIANTS:
        if name != "diffusers, eager" and (device == "cuda" or name not in ONLY_ON_A_GPU):
            yield name
    yield "diffusers, eager"


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, one row a variant; log-prob distances below it."""
    columns = list(dict.fromkeys(key for line in lines for key in line if not key.startswith(("log-prob", "first"))))
    rows = [columns, ["---"] * len(columns)]
    rows += [[_text(line.get(column)) for column in columns] for line in lines]
    distances = [f"{key}: {line[key]}" for line in lines for key in line if key.startswith("log-prob")]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + "\n".join(distances)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


OF_A_FOLDER = ("model", "device", "batches", "size", "steps")
"""Arguments that all lines of a folder share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["sd3.5-medium", "qwen-image"]
    parser.add_argument("--model", choices=[*TINY, *sizes], default="tiny-qwen-image")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--work", type=Path, help="of one setting; runs/benchmark_rollout/MODEL if left out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--size", type=int, help="pixels a side; 16 for tiny models, else 512")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps of a picture")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="these variants alone")
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = arguments.work or Path("runs/benchmark_rollout", arguments.model)
    arguments.size = arguments.size or (16 if arguments.model in TINY else 512)
    if missing := sorted({*(arguments.only or ())} - {*variants(arguments.device)}):
        parser.error(f"--only {', '.join(missing)}: not with --device {arguments.device}")
    results = arguments.work / "results.jsonl"
    if arguments.variant:
        numbers = measure(arguments.variant, arguments)
        with results.open("a") as stream:
            stream.write(json.dumps(numbers) + "\n")
        return
    keep_settings(arguments, OF_A_FOLDER)
    build(arguments.model, arguments.work / "model", arguments.device)
    done = {line["variant"] for line in rows_in(results)}
    failed = []
    for name in variants(arguments.device):
        if name not in done and (not arguments.only or name in arguments.only):
            print(f"running {name}", flush=True)
            command = [sys.executable, "-m", "benchmarks.rollout", *sys.argv[1:], "--variant", name]
            if code := subprocess.run(command).returncode:
                failed.append(f"{name} failed with exit code {code}, see above")
    print(table(rows_in(results)))
    refuse_failed(failed)


if __name__ == "__main__":
    main()
