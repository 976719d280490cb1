# SPDX-License-Identifier: Apache-2.0
"""Real-size transformers on the meta device, from the configs that are published with the weights.

Sources: the config.json of transformer and VAE and the scheduler_config.json, in the fields that matter here, of
stabilityai/stable-diffusion-3.5-medium, Qwen/Qwen-Image, black-forest-labs/FLUX.1-dev, Tongyi-MAI/Z-Image and
Wan-AI/Wan2.2-TI2V-5B-Diffusers.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.cost.flops import forward_flops, step_flops
from models.cost.meta_pass import KnownResults
from models.families.base import TEXT, DiffusionModelBase, DiffusionModelConfig
from models.families.qwen_image import QwenImage
from models.samples.trajectories import PromptTable
from models.weights.trainable import make_trainable, trainable
from tests.support.helpers import model_config

KL_VAE = {"block_out_channels": [128, 256, 512, 512]}
STATIC = {"shift": 3.0, "num_train_timesteps": 1000}
DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 256, "base_shift": 0.5}


@dataclass(frozen=True)
class Published:
    """A model as it is published.

    Attributes:
        architecture: of model_index.json.
        transformer, vae, scheduler: their configs.
        billions: parameters of the transformer.
        lora_modules: modules that get LoRA weights by default.
        text: (tokens, width, pooled width) of what the denoiser sees.
        measured: (LoRA rank, operations of a 512 x 512 forward in 1e12), counted on a GPU where that is known.
        pipeline: sampling settings besides the size.
        index: further entries of model_index.json.
    """

    architecture: str
    transformer: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    billions: float
    lora_modules: int
    text: tuple[int, int, int]
    measured: tuple[int, float] | None = None
    pipeline: tuple[tuple[str, Any], ...] = ()
    index: tuple[tuple[str, Any], ...] = ()


MODELS = {
    "sd3.5-medium": Published(
        "StableDiffusion3Pipeline",
        {
            "_class_name": "SD3Transformer2DModel",
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "dual_attention_layers": list(range(13)),
            "in_channels": 16,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 24,
            "out_channels": 16,
            "patch_size": 2,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "sample_size": 128,
        },
        KL_VAE,
        STATIC,
        billions=2.24,
        lora_modules=24 * 8 - 1,  # the last block has no to_add_out
        text=(77 + 128, 4096, 2048),
        measured=(32, 2.25),
    ),
    "qwen-image": Published(
        "QwenImagePipeline",
        {
            "_class_name": "QwenImageTransformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": False,
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 60,
            "out_channels": 16,
            "patch_size": 2,
        },
        {"temperal_downsample": [False, True, True]},
        DYNAMIC | {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02},
        billions=20.43,
        lora_modules=60 * 12,
        text=(128, 3584, 0),
        measured=(64, 17.1),
    ),
    "flux.1-dev": Published(
        "FluxPipeline",
        {
            "_class_name": "FluxTransformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": True,
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 19,
            "num_single_layers": 38,
            "patch_size": 1,
            "pooled_projection_dim": 768,
        },
        KL_VAE,
        DYNAMIC | {"max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0},
        billions=11.90,
        lora_modules=19 * 12 + 38 * 3,
        text=(512, 4096, 768),
        pipeline=(("guidance_scale", 3.5),),
    ),
    "z-image": Published(
        "ZImagePipeline",
        {
            "_class_name": "ZImageTransformer2DModel",
            "all_f_patch_size": [1],
            "all_patch_size": [2],
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "cap_feat_dim": 2560,
            "dim": 3840,
            "in_channels": 16,
            "n_heads": 30,
            "n_kv_heads": 30,
            "n_layers": 30,
            "n_refiner_layers": 2,
            "norm_eps": 1e-5,
            "qk_norm": True,
            "rope_theta": 256.0,
            "t_scale": 1000.0,
        },
        KL_VAE,
        STATIC,
        billions=6.15,
        lora_modules=(30 + 2 + 2) * 7,
        text=(100, 2560, 0),
    ),
    "wan2.2-ti2v-5b": Published(
        "WanPipeline",
        {
            "_class_name": "WanTransformer3DModel",
            "attention_head_dim": 128,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "ffn_dim": 14336,
            "freq_dim": 256,
            "in_channels": 48,
            "num_attention_heads": 24,
            "num_layers": 30,
            "out_channels": 48,
            "patch_size": [1, 2, 2],
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": 4096,
        },
        {"scale_factor_spatial": 16, "scale_factor_temporal": 4},
        {"flow_shift": 5.0, "num_train_timesteps": 1000},
        billions=5.0,
        lora_modules=30 * (8 + 2),
        text=(512, 4096, 0),
        pipeline=(("num_frames", 17),),
        index=(("expand_timesteps", True), ("boundary_ratio", None)),
    ),
}


def published(name: str, folder: Path, **overrides: Any) -> tuple[type[DiffusionModelBase], DiffusionModelConfig]:
    """The adapter and config of a folder that holds the published config files and no weights."""
    model = MODELS[name]
    for component in ("transformer", "vae"):
        (folder / component).mkdir()
        (folder / component / "config.json").write_text(json.dumps(getattr(model, component)))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(model.scheduler))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": model.architecture} | dict(model.index)))
    config = model_config(folder, **({"height": 512, "width": 512} | dict(model.pipeline) | overrides))
    return DiffusionModelBase.get_class(config), config


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
