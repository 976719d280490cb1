# SPDX-License-Identifier: Apache-2.0
"""A LoRA as vLLM-Omni's own server loads it: a matrix of the server's that packs three gets what each of them had."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.served_lora import draw_lora
from flows.lora_for_server import convert
from models.weights.trainable import LORA_FILE
from tests.support.tiny_models import FAMILIES

PARTS = {"to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}


def added(tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    """What a LoRA adds to a module's matrix, in float64."""
    a, b = (tensors[f"{module}.lora_{matrix}.weight"].double() for matrix in "AB")
    return scale * b @ a


def test_what_is_packed_adds_the_same_to_every_matrix(tmp_path: Path) -> None:
    """FLUX's transformer packs q, k and v and does not say so: by their own names the server refuses them."""
    model = tmp_path / "model"
    FAMILIES["flux"].save(model)
    draw_lora(model, 4, tmp_path / "drawn")
    convert(tmp_path / "drawn", tmp_path / "for_server", model)
    exported, served = (
        load_file(tmp_path / "drawn" / LORA_FILE),
        load_file(tmp_path / "for_server/adapter_model.safetensors"),
    )
    config = json.loads((tmp_path / "for_server/adapter_config.json").read_text())
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
    model = tmp_path / "model"
    FAMILIES["qwen_image"].save(model)
    draw_lora(model, 4, tmp_path / "drawn")
    convert(tmp_path / "drawn", tmp_path / "for_server", model)
    exported, served = (
        load_file(tmp_path / "drawn" / LORA_FILE),
        load_file(tmp_path / "for_server/adapter_model.safetensors"),
    )
    renamed = {f"base_model.model.{name}".replace("to_out.0", "to_out"): tensor for name, tensor in exported.items()}
    assert served.keys() == renamed.keys()
    assert all(torch.equal(served[name], renamed[name]) for name in served)
