# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own OpenAI-compatible server, with a LoRA that was trained here."""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from models.rollout.diffusers import DiffusersRolloutEngine
from models.weights.trainable import export_weights, trainable
from tasks.system.ports import free_port
from tests.support.forked import Program
from tests.support.helpers import model_config
from tests.support.patience import PATIENCE, wait_for_server
from tests.support.platform_helpers import running
from tests.support.tiny_models import FAMILIES

PROMPT = "the number 472"
VLLM = """
from vllm.entrypoints.cli.main import main
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

QwenImagePipeline.dummy_run_num_frames = 0  # a picture of 512 x 512 for nobody, which takes eight seconds
main()
"""
"""The command `vllm`."""
STEPS = {"num_inference_steps": 2, "true_cfg_scale": 1.0}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of the tiny model."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = ["-c", VLLM, "serve", str(tiny_model), "--omni", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    address = f"http://127.0.0.1:{port}"
    with running(Program(command, folder, os.environ | {"VLLM_NO_USAGE_STATS": "1"}, folder / "log")):
        wait_for_server(f"{address}/health", f"the start of the server of {folder / 'log'}")
        yield address


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a LoRA run leaves: diffusers' own format."""
    config = model_config(tiny_model, lora_rank=4, lora_alpha=8)
    engine = DiffusersRolloutEngine(config)
    generator = torch.Generator().manual_seed(1)
    named = trainable(engine.transformer).items()
    weights = {name: torch.randn(p.shape, generator=generator) * 0.2 for name, p in named}
    folder = tmp_path_factory.mktemp("exported") / "weights"
    export_weights(engine.adapter, config, weights, folder)
    return folder


def served(address: str, **more: Any) -> np.ndarray:
    """The picture that the server answers with."""
    body = {"prompt": PROMPT, "size": "24x16", "n": 1, "seed": 1} | STEPS | more
    answer = httpx.post(f"{address}/v1/images/generations", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    return np.asarray(picture).astype(int)


def test_a_served_lora_draws_what_diffusers_draws_with_it(
    server: str, exported: Path, tiny_model: Path, tmp_path: Path
) -> None:
    # A process of its own, which knows nothing but what the command itself imports.
    command = [sys.executable, "-m", "flows.lora_for_server", str(exported), str(tmp_path / "lora")]
    subprocess.run([*command, "--model", str(tiny_model)], check=True, timeout=PATIENCE)
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    pipeline.set_progress_bar_config(disable=True)

    def drawn() -> np.ndarray:
        picture = pipeline(PROMPT, height=16, width=24, generator=torch.Generator().manual_seed(1), **STEPS).images[0]
        return np.asarray(picture).astype(int)

    plain = served(server)
    assert np.abs(plain - drawn()).max() <= 1
    trained = served(server, lora={"name": "trained", "path": str(tmp_path / "lora")})
    pipeline.load_lora_weights(exported)
    assert np.abs(trained - drawn()).max() <= 1
    assert np.abs(trained - plain).max() > 10
    assert np.array_equal(served(server), plain)


def test_a_lora_of_flux_is_served_under_the_names_of_packed_matrices(tmp_path: Path) -> None:
    """By the command that compares a server's pictures with those of diffusers, whose LoRA nobody trained."""
    FAMILIES["flux"].save(tmp_path / "model")
    command = [sys.executable, "-m", "benchmarks.served_lora", str(tmp_path / "model"), str(tmp_path / "lora")]
    command += ["--device", "cpu", "--draw", "4", "--times", "30", "--steps", "2"]
    answer = subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    assert found["LoRA, server to diffusers"] < 0.05
    assert found["base, server to diffusers"] < 0.05
    assert found["server, LoRA to base"] > 1
