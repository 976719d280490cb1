# SPDX-License-Identifier: Apache-2.0
"""Pictures of a vLLM-Omni server with a LoRA that a run exported, beside those of diffusers with the same LoRA.

    python -m benchmarks.served_lora data/stable_diffusion_3_5 runs/<run>/weights [--device cuda] [--times 300]

For a Python that has vLLM-Omni (docs/vllm-omni.md). Draws a picture without and one with the LoRA by diffusers' own
pipeline, then starts `vllm serve MODEL --omni`, has it draw both from the same seed, and prints how far its pictures
are from diffusers' and from each other: mean |difference| of the pixels' values, 0 to 255. Ends with 1 where either
picture is farther from diffusers' than half of what the LoRA changes: then they say nothing of it. `--times` multiplies
what the LoRA adds, on both sides: three iterations change less than bf16 rounds. `--draw RANK` makes WEIGHTS first, by
chance, where no run has exported any: what a server has to take is the same.
"""

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import models  # noqa: F401  # isort: skip  declares what torchvision lacks beside a CPU torch
import httpx
import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from benchmarks.local_services import wait_until
from flows.lora_for_server import convert
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.exported import LORA_FILE
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.weights.trainable import meta_module, save_lora, trainable
from tasks.system.ports import free_port

GUIDANCE = {
    "StableDiffusion3Pipeline": {"guidance_scale": 1.0},
    "QwenImagePipeline": {"true_cfg_scale": 1.0},
    "FluxPipeline": {"guidance_scale": 3.5},
    "Flux2KleinPipeline": {"guidance_scale": 1.0},
    "ZImagePipeline": {"guidance_scale": 0.0},
}
"""Said to both sides, whose defaults are not the same; off, but FLUX.1's, which is an input of its network."""
IDLE_STEPS = {"ZImagePipeline": 1}
"""Steps that the server counts among those it is asked for and that do nothing: its Z-Image makes one at sigma 0."""
SEED, PROMPT, START_SECONDS = 1, "a sign", 900
DRAWN = 0.02
"""Deviation of a drawn LoRA's numbers: of rank 32 it adds .0045, where torch draws a matrix 3,072 wide with .0104."""
Pictures = dict[str, np.ndarray]
"""Which weights, "base" or "lora" -> uint8 [H, W, 3], as integers."""


def draw_lora(model: Path, rank: int, folder: Path) -> None:
    """A LoRA as a run exports it, whose matrices are drawn; of the model only its configs are read."""
    settings = ModelConfig(path=str(model), lora_rank=rank, lora_alpha=2 * rank)
    config = DiffusionModelConfig.load(settings, DiffusionPipelineConfig(), DiffusionRolloutAlgoConfig())
    module = meta_module(DiffusionModelBase.get_class(config), config)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in trainable(module).items():
        owner, _, field = name.rpartition(".")
        drawn = DRAWN * torch.randn(parameter.shape, generator=generator)
        setattr(module.get_submodule(owner), field, nn.Parameter(drawn))
    save_lora(module, config, folder)


def by_diffusers(model: Path, weights: Path, call: dict[str, Any], device: str, dtype: torch.dtype) -> Pictures:
    """Both pictures by the model's own pipeline."""
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(model, dtype=dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)

    def drawn() -> np.ndarray:
        return np.asarray(
            pipeline(prompt=PROMPT, generator=torch.Generator(device).manual_seed(SEED), **call).images[0]
        )

    base = drawn().astype(int)
    pipeline.load_lora_weights(weights)
    return {"base": base, "lora": drawn().astype(int)}


def by_server(model: Path, lora: Path, call: dict[str, Any], dtype: str, log: Path) -> Pictures:
    """Both pictures by vLLM-Omni's server, which ends before this returns."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--omni", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    address, body = f"http://127.0.0.1:{port}", dict(call)
    size = f"{body.pop('width')}x{body.pop('height')}"
    body["num_inference_steps"] += IDLE_STEPS.get(read_architecture(model), 0)

    def drawn(**more: Any) -> np.ndarray:
        asked = {"prompt": PROMPT, "size": size, "n": 1, "seed": SEED} | body | more
        answer = httpx.post(f"{address}/v1/images/generations", json=asked, timeout=START_SECONDS)
        if not answer.is_success:
            raise RuntimeError(f"the server answered {answer.status_code}, {answer.text[:500]}: {end_of(log)}")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))).astype(int)

    def answers() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"the server has ended: {end_of(log)}")
        try:
            return httpx.get(f"{address}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    with log.open("w") as said:
        server = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"VLLM_NO_USAGE_STATS": "1"})
    try:
        wait_until(answers, START_SECONDS, "the server's answer")
        base = drawn()
        return {"base": base, "lora": drawn(lora={"name": "trained", "path": str(lora.resolve())})}
    finally:
        server.terminate()
        server.wait()


def end_of(log: Path) -> str:
    """What it says last."""
    return log.read_text(errors="replace")[-3000:]


def multiplied(weights: Path, times: float, folder: Path) -> Path:
    """A copy of an export whose LoRA adds so many times as much."""
    folder.mkdir()
    with safe_open(weights / LORA_FILE, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = {name: tensor * times if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    save_file(changed, folder / LORA_FILE, header)
    return folder


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Mean |difference|."""
    return round(float(np.abs(one - other).mean()), 3)


def distances(served: Pictures, drawn: Pictures) -> dict[str, float]:
    """How far the server's pictures are from diffusers', and what the LoRA changes in each."""
    return {
        "base, server to diffusers": apart(served["base"], drawn["base"]),
        "LoRA, server to diffusers": apart(served["lora"], drawn["lora"]),
        "server, LoRA to base": apart(served["lora"], served["base"]),
        "diffusers, LoRA to base": apart(drawn["lora"], drawn["base"]),
    }


def agree(found: dict[str, float]) -> bool:
    """Is what the LoRA changes seen beside what the two programs do not round alike?"""
    changed = min(found["server, LoRA to base"], found["diffusers, LoRA to base"])
    return max(found["base, server to diffusers"], found["LoRA, server to diffusers"]) < changed / 2


def main() -> None:
    """Draw, serve, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="in diffusers format")
    parser.add_argument("weights", type=Path, help="folder that a LoRA run exported")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--keep", type=Path, help="folder in which the four pictures are kept")
    parser.add_argument("--side", type=int, help="of the picture (default: 512, on the CPU 32)")
    parser.add_argument("--times", type=float, default=1.0, help="by which the LoRA is multiplied")
    parser.add_argument(
        "--draw", type=int, metavar="RANK", help="draw such a LoRA into WEIGHTS, which is not there yet"
    )
    parser.add_argument("--steps", type=int, default=4)
    chosen = parser.parse_args()
    side = chosen.side or (32 if chosen.device == "cpu" else 512)
    dtype = "float32" if chosen.device == "cpu" else "bfloat16"
    call = {"height": side, "width": side, "num_inference_steps": chosen.steps}
    call |= GUIDANCE[read_architecture(chosen.model)]
    if chosen.draw:
        draw_lora(chosen.model, chosen.draw, chosen.weights)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = multiplied(chosen.weights, chosen.times, folder / "weights")
        drawn = by_diffusers(chosen.model, weights, call, chosen.device, getattr(torch, dtype))
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
        convert(weights, folder / "lora", chosen.model)
        served = by_server(chosen.model, folder / "lora", call, dtype, folder / "server.log")
    if chosen.keep:
        chosen.keep.mkdir(parents=True, exist_ok=True)
        for by, pictures in (("server", served), ("diffusers", drawn)):
            for name, picture in pictures.items():
                Image.fromarray(picture.astype(np.uint8)).save(chosen.keep / f"{by}-{name}.png")
    found = distances(served, drawn)
    print(json.dumps(found))
    sys.exit(not agree(found))


if __name__ == "__main__":
    main()
