"""Training and in-process sampling adapter of Qwen-Image."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn

from models.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.schedulers import FlowMatchSDEDiscreteScheduler


@DiffusionModelBase.register("QwenImagePipeline")
class QwenImage(DiffusionModelBase):
    """Latents are [B, S, C]: 2x2 patches of the VAE's latent, packed into S tokens of C channels."""

    lora_target_modules = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig) -> FlowMatchSDEDiscreteScheduler:
        scheduler = FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.path, subfolder="scheduler")
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        steps = model_config.pipeline.num_inference_steps
        config = scheduler.config
        mu = calculate_shift(
            cls.latent_shape(model_config)[0],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu, device=device)
        scheduler.set_begin_index(0)

    @classmethod
    def prepare_model_inputs(
        cls,
        module: nn.Module,
        model_config: DiffusionModelConfig,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        prompt_embeds_mask: Tensor,
        negative_prompt_embeds: Tensor | None,
        negative_prompt_embeds_mask: Tensor | None,
        micro_batch: Any,
        step: int,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        latent, timestep = select_step(latents, timesteps, step)
        rows, columns = cls._token_grid(model_config)
        shared = {
            "hidden_states": latent.to(model_config.dtype),
            "timestep": timestep.to(model_config.dtype) / 1000,
            "guidance": None,
            "img_shapes": [[(1, rows, columns)]] * latent.shape[0],
            "return_dict": False,
        }

        def with_text(embeds: Tensor, mask: Tensor) -> dict[str, Any]:
            # As in the pipeline: no mask when nothing is padded, which takes the attention's unmasked path.
            text_mask = None if bool(mask.all()) else mask
            return shared | {
                "encoder_hidden_states": embeds.to(model_config.dtype),
                "encoder_hidden_states_mask": text_mask,
            }

        positive = with_text(prompt_embeds, prompt_embeds_mask)
        if model_config.pipeline.true_cfg_scale <= 1:
            return positive, None
        if negative_prompt_embeds is None or negative_prompt_embeds_mask is None:
            raise ValueError("true_cfg_scale > 1 needs negative_prompt_embeds and their mask")
        return positive, with_text(negative_prompt_embeds, negative_prompt_embeds_mask)

    @classmethod
    def predict_velocity(
        cls,
        module: nn.Module,
        model_config: DiffusionModelConfig,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
    ) -> Tensor:
        """True guidance, then each token's velocity is rescaled to the length of its conditional half."""
        conditional = module(**model_inputs)[0]
        if negative_model_inputs is None:
            return conditional.float()
        unconditional = module(**negative_model_inputs)[0]
        guided = unconditional + model_config.pipeline.true_cfg_scale * (conditional - unconditional)
        length = torch.norm(conditional, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True)
        return (guided * length).float()

    @classmethod
    def load_transformer(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> QwenImageTransformer2DModel:
        return QwenImageTransformer2DModel.from_pretrained(
            model_config.path, subfolder="transformer", torch_dtype=dtype
        )

    @classmethod
    def load_vae(cls, model_config: DiffusionModelConfig) -> AutoencoderKLQwenImage:
        vae = AutoencoderKLQwenImage.from_pretrained(model_config.path, subfolder="vae", torch_dtype=model_config.dtype)
        return vae.eval().requires_grad_(False)

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        rows, columns = cls._token_grid(model_config)
        return rows * columns, _component_config(model_config.path, "transformer")["in_channels"]

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        config: Any = vae.config
        rows, columns = cls._token_grid(model_config)
        batch, _, channels = latents.shape
        grid = latents.view(batch, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
        latent = grid.reshape(batch, channels // 4, 1, rows * 2, columns * 2).to(next(vae.parameters()).dtype)
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1).to(latent)
        # Divided by the reciprocal, as the pipeline does, so that the last bit agrees with it.
        inverse_std = 1.0 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1).to(latent)
        decoded = vae.decode(latent / inverse_std + mean, return_dict=False)[0][:, :, 0]  # type: ignore[operator]
        unit = (decoded * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
        return (unit * 255).round().to(torch.uint8)

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        config: Any = vae.config
        weight = next(vae.parameters())
        pixels = images.permute(0, 3, 1, 2)[:, :, None].to(weight) / 127.5 - 1
        latent = vae.encode(pixels).latent_dist.mode().float()  # type: ignore[operator]
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
        normalised = ((latent - mean.to(latent)) / std.to(latent))[:, :, 0]
        batch, channels, height, width = normalised.shape
        patches = normalised.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(batch, height // 2 * (width // 2), channels * 4)

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        return list(module.transformer_blocks)  # type: ignore[arg-type]

    @classmethod
    def _token_grid(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Rows and columns of 2x2 latent patches."""
        config = _component_config(model_config.path, "vae")
        patch = 2 ** len(config["temperal_downsample"]) * 2  # the misspelling is diffusers' own key
        height, width = model_config.pipeline.height, model_config.pipeline.width
        if height % patch or width % patch:
            raise ValueError(f"pipeline.height {height} and pipeline.width {width} must be multiples of {patch}")
        return height // patch, width // patch


@functools.lru_cache(maxsize=64)
def _component_config(path: str, component: str) -> dict[str, Any]:
    """config.json of one component; cached, since every forward asks for the token grid."""
    return json.loads((Path(path) / component / "config.json").read_text())
