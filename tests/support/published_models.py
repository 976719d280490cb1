# SPDX-License-Identifier: Apache-2.0
"""Models as they are published: the configs, without weights, and what is known of their size.

Sources: the config.json of transformer and VAE and the scheduler_config.json, in the fields that matter here, of
stabilityai/stable-diffusion-3.5-medium, Qwen/Qwen-Image, black-forest-labs/FLUX.1-dev and FLUX.2-klein-base-4B,
Tongyi-MAI/Z-Image and Wan-AI/Wan2.2-TI2V-5B-Diffusers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.families.base import DiffusionModelBase, DiffusionModelConfig
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
    "flux.2-klein-base-4b": Published(
        "Flux2KleinPipeline",
        {
            "_class_name": "Flux2Transformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [32, 32, 32, 32],
            "eps": 1e-6,
            "guidance_embeds": False,
            "in_channels": 128,
            "joint_attention_dim": 7680,
            "mlp_ratio": 3.0,
            "num_attention_heads": 24,
            "num_layers": 5,
            "num_single_layers": 20,
            "out_channels": None,
            "patch_size": 1,
            "rope_theta": 2000,
            "timestep_guidance_channels": 256,
        },
        KL_VAE,
        DYNAMIC | {"max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0},
        billions=3.88,
        lora_modules=5 * 12 + 20,
        text=(512, 7680, 0),
        index=(("is_distilled", False),),
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
