# SPDX-License-Identifier: Apache-2.0
"""Real-size transformers on the meta device, from the configs that are published with the weights."""

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.cost.flops import forward_flops, step_flops
from models.cost.meta_pass import KnownResults
from models.families.base import TEXT, DiffusionModelBase, DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.samples.trajectories import PromptTable
from models.weights.trainable import make_trainable, meta_module, trainable
from tests.support.helpers import model_config
from tests.support.published_models import MODELS, published


# Qwen-Image has as many blocks as three of the others, and its formula another test: `test_utilisation.py`.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "qwen-image" else []) for name in MODELS]
)
def test_parameters_operations_and_lora_targets(name: str, tmp_path: Path) -> None:
    """Operations by the formula and by torch's own count of the real modules, with LoRA also by a count on a GPU."""
    model = MODELS[name]
    adapter, config = published(name, tmp_path)
    adapter.check_pipeline(config)
    assert len(adapter.build_scheduler(config).timesteps) == config.pipeline.num_inference_steps
    with torch.device("meta"):
        module = getattr(diffusers, model.transformer["_class_name"]).from_config(model.transformer)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(model.billions, rel=0.01)

    tokens = model.text[0]
    assert step_flops(config, tokens) == pytest.approx(counted(name, adapter, config, module), rel=0.001)

    rank, tflop = model.measured or (32, None)
    with torch.device("meta"):
        make_trainable(adapter, module, replace(config, model=config.model.model_copy(update={"lora_rank": rank})))
    assert len(trainable(module)) == 2 * model.lora_modules
    blocks = {id(parameter) for block in adapter.transformer_blocks(module) for parameter in block.parameters()}
    assert all(id(parameter) in blocks for parameter in trainable(module).values())
    if tflop is not None:
        assert counted(name, adapter, config, module) / 1e12 == pytest.approx(tflop, rel=0.005)
        assert step_flops(config, tokens) / 1e12 == pytest.approx(tflop, rel=0.03)  # LoRA is the rest


@pytest.mark.filterwarnings("error")  # torch's, that it begins every GPU
def test_lora_is_counted_without_a_look_at_any_gpu(one_block_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = model_config(one_block_model, lora_rank=4)
    assert trainable(meta_module(DiffusionModelBase.get_class(config), config))


def counted(
    name: str, adapter: type[DiffusionModelBase], config: DiffusionModelConfig, module: torch.nn.Module
) -> float:
    """Operations of one velocity of one sample, by torch."""
    tokens, width, pooled = MODELS[name].text
    extras = {"pooled_prompt_embeds": torch.empty(1, pooled, device="meta")} if pooled else {}
    mask = torch.ones(1, tokens, dtype=torch.bool)
    prompts = PromptTable(torch.empty(1, tokens, width, device="meta"), mask, extras=extras)
    latents, index = torch.empty(1, *adapter.latent_shape(config), device="meta"), torch.tensor([0])
    text = prompts.expand(index)
    inputs = adapter.prepare_model_inputs(
        module,
        config,
        latents,
        torch.full((1,), 500.0, device="meta"),
        **{name: text[name] for name in TEXT},
        micro_batch=text,
        step=0,
    )
    with torch.no_grad(), KnownResults(), FlopCounterMode(display=False) as counter:
        assert adapter.predict_velocity(module, config, *inputs).shape == latents.shape
    return counter.get_total_flops()


def test_a_guided_step_is_two_forwards(tmp_path: Path) -> None:
    adapter, config = published("qwen-image", tmp_path, true_cfg_scale=4.0)
    assert step_flops(config, 128) == 2 * forward_flops(adapter, MODELS["qwen-image"].transformer, 1024, 128)


def test_a_family_without_a_formula_has_no_count() -> None:
    class Uncounted(QwenImage):
        multiplications = DiffusionModelBase.multiplications

    with pytest.raises(ValueError, match=r"Uncounted has no formula for the operations of 'NoSuchTransformer'"):
        forward_flops(Uncounted, {"_class_name": "NoSuchTransformer"}, 1, 1)
