# SPDX-License-Identifier: Apache-2.0
"""The LoRA that stands in for an exported one where a server is to be tried at a size that nobody trained."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from benchmarks.served_lora import GUIDANCE, agree, draw_lora
from flows.lora_for_server import convert
from models.config.exported import LORA_FILE
from models.families.base import read_architecture
from models.weights.stored import file_shapes
from models.weights.trainable import export_weights, make_trainable, trainable
from tests.support.helpers import model_config
from tests.support.tiny_models import FAMILIES

SERVED = [name for name in FAMILIES if name != "wan"]


@pytest.mark.parametrize("name", SERVED)
def test_a_drawn_lora_has_what_a_run_exports_and_diffusers_takes_all_of_it(name: str, tmp_path: Path) -> None:
    family, model = FAMILIES[name], tmp_path / "model"
    family.save(model)
    assert read_architecture(model) in GUIDANCE
    draw_lora(model, 4, tmp_path / "drawn")
    config = model_config(model, lora_rank=4, lora_alpha=8)
    module = family.adapter.load_transformer(config, torch.float32)
    make_trainable(family.adapter, module, config)
    export_weights(family.adapter, config, trainable(module), tmp_path / "exported")
    shapes = [file_shapes(tmp_path / folder / LORA_FILE, folder) for folder in ("drawn", "exported")]
    assert shapes[0] == shapes[1] != {}
    pipeline = DiffusionPipeline.from_pretrained(model)
    pipeline.load_lora_weights(tmp_path / "drawn")
    layers = [layer for layer in pipeline.transformer.modules() if hasattr(layer, "lora_B")]
    assert len(layers) == len(shapes[0]) / 2
    assert all(layer.lora_B[layer.active_adapters[0]].weight.abs().min() > 0 for layer in layers)
    convert(tmp_path / "drawn", tmp_path / "for_server", model)


@pytest.mark.parametrize(
    ("base", "lora", "changed", "is_seen"),
    [(0.97, 0.97, 3.98, True), (15.9, 15.5, 16.3, False), (0.1, 3.0, 4.0, False)],
    ids=["as rounded", "two programs that draw otherwise", "a LoRA of which a part is taken"],
)
def test_pictures_say_that_a_lora_is_served_only_where_they_agree(
    base: float, lora: float, changed: float, is_seen: bool
) -> None:
    found = {"base, server to diffusers": base, "LoRA, server to diffusers": lora}
    assert agree(found | {"server, LoRA to base": changed, "diffusers, LoRA to base": changed}) == is_seen
