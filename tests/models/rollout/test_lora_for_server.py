# SPDX-License-Identifier: Apache-2.0
"""A LoRA as vLLM-Omni's own server loads it: a matrix of the server's that packs three gets what each of them had."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.served_lora import draw_lora
from flows.lora_for_server import convert
from models.config.exported import LORA_FILE
from models.families.qwen_image import QwenImage
from models.rollout.vllm_omni.lora_names import packed
from models.weights.trainable import export_weights, make_trainable, trainable
from tasks.config.errors import ConfigError
from tests.support.helpers import model_config
from tests.support.tiny_models import FAMILIES

PARTS = {"to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}


def drawn_and_converted(family: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """A LoRA of rank 4 of the family's tiny model as a run exports it, and as the server gets it, with its config."""
    FAMILIES[family].save(folder / "model")
    draw_lora(folder / "model", 4, folder / "drawn")
    convert(folder / "drawn", folder / "served", folder / "model")
    config = json.loads((folder / "served/adapter_config.json").read_text())
    return load_file(folder / "drawn" / LORA_FILE), load_file(folder / "served/adapter_model.safetensors"), config


def added(tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    """What a LoRA adds to a module's matrix, in float64."""
    a, b = (tensors[f"{module}.lora_{matrix}.weight"].double() for matrix in "AB")
    return scale * b @ a


def test_what_is_packed_adds_the_same_to_every_matrix(tmp_path: Path) -> None:
    """FLUX's transformer packs q, k and v and does not say so: by their own names the server refuses them."""
    exported, served, config = drawn_and_converted("flux", tmp_path)
    assert {tensor.shape["AB".index(name[-8])] for name, tensor in served.items()} == {config["r"]} == {12}
    modules = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in served}
    unpacked = {module for module in modules if module.rpartition(".")[2] not in PARTS}
    assert modules - unpacked
    assert unpacked
    for module in modules:
        above, _, last = module.rpartition(".")
        names = [f"{above}.{part}" for part in PARTS[last]] if last in PARTS else [module]
        expected = torch.cat([added(exported, name, 2.0) for name in names])
        scale = config["lora_alpha"] / config["r"]
        torch.testing.assert_close(added(served, f"base_model.model.{module}", scale), expected, rtol=1e-12, atol=1e-12)
    of_exported = {name.rpartition(".lora_")[0] for name in exported}
    assert len(of_exported) == len(unpacked) + 3 * len(modules - unpacked)
    assert {target.rpartition(".")[2] for target in config["target_modules"]} >= {*PARTS}


def test_where_the_server_knows_the_parts_they_stay(tmp_path: Path) -> None:
    exported, served, _ = drawn_and_converted("qwen_image", tmp_path)
    renamed = {f"base_model.model.{name}".replace("to_out.0", "to_out"): tensor for name, tensor in exported.items()}
    assert served.keys() == renamed.keys()
    assert all(torch.equal(served[name], renamed[name]) for name in served)


def test_what_a_server_would_leave_out_is_refused(tmp_path: Path) -> None:
    FAMILIES["qwen_image"].save(tmp_path / "model")
    config = model_config(tmp_path / "model", lora_rank=4, target_modules=("img_in",))
    module = QwenImage.load_transformer(config, torch.float32)
    make_trainable(QwenImage, module, config)
    export_weights(QwenImage, config, trainable(module), tmp_path / "exported")
    with pytest.raises(ConfigError, match="has LoRA weights of img_in, which vLLM-Omni's server leaves out"):
        convert(tmp_path / "exported", tmp_path / "served", tmp_path / "model")


@pytest.mark.parametrize(("name", "shape"), [("lora_A.weight", (4, 3, 2, 2)), ("lora_magnitude_vector", (4,))])
def test_what_is_no_matrix_is_refused_by_its_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"proj\.{name} is no matrix"):
        packed({f"proj.{name}": torch.zeros(shape)}, {})
