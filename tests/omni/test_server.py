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
from tests.support.published_layout import save_both
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
SMALLER = """
import sys
from functools import partialmethod
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class Smaller(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm_omni.diffusion.models.z_image.z_image_transformer":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            model = module.ZImageTransformer2DModel
            model.__init__ = partialmethod(model.__init__, **{size})

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Smaller())
"""
"""What each of the server's processes imports first: vLLM-Omni's Z-Image in another size than the published one."""
SIZE = ("in_channels", "dim", "n_layers", "n_refiner_layers", "n_heads", "n_kv_heads", "cap_feat_dim", "axes_dims")


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


def compared(model: Path, **more: str) -> dict[str, float]:
    """By the command that compares a server's pictures with those of diffusers, whose LoRA nobody trained."""
    command = [sys.executable, "-m", "benchmarks.served_lora", str(model), str(model.parent / "lora")]
    command += ["--device", "cpu", "--draw", "4", "--times", "30", "--steps", "2"]
    ended = subprocess.run(
        command, check=True, timeout=PATIENCE, stdout=subprocess.PIPE, text=True, env=os.environ | more
    )
    return json.loads(ended.stdout.splitlines()[-1])


def check_served(found: dict[str, float]) -> None:
    """The server draws what diffusers draws, with the LoRA and without, and the LoRA is seen."""
    assert found["LoRA, server to diffusers"] < 0.05
    assert found["base, server to diffusers"] < 0.05
    assert found["server, LoRA to base"] > 1


@pytest.mark.parametrize("name", ["flux", "flux_2_klein"])
def test_a_lora_is_served_whose_server_packs_matrices(name: str, tmp_path: Path) -> None:
    """FLUX.1's by the packed matrices' names, klein's by those of their parts."""
    FAMILIES[name].save(tmp_path / "model")
    check_served(compared(tmp_path / "model"))


def test_a_lora_of_z_image_is_served_whose_server_counts_a_step_that_does_nothing(tmp_path: Path) -> None:
    _, model = save_both("z-image", tmp_path)
    config = json.loads((model / "transformer/config.json").read_text())
    size = {name: config[name] for name in SIZE}
    (tmp_path / "sitecustomize.py").write_text(SMALLER.replace("{size}", repr(size)))
    check_served(compared(model, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])))
