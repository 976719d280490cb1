# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of FLUX.1 (dev and schnell)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.families.guidance import guided
from models.families.latents import (
    kl_vae_factor,
    latent_grid,
    pack_latents,
    pixels_of,
    scaled,
    transformer_config,
    unpack_latents,
    unscaled,
)
from models.families.operations import TIME_CHANNELS, Config, attention, double_block, embedded, model_width
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift


@DiffusionModelBase.register("FluxPipeline")
class Flux(DiffusionModelBase):
    """Latents are [B, S, C]: 2x2 patches of the VAE's latent, packed into S tokens of C channels.

    Text is T5's sequence, padded to one length that the denoiser sees, and CLIP's pooled vector. `guidance_scale` is
    an input of the network where it was distilled with one (dev), and does not exist where it was not (schnell);
    `true_cfg_scale` is ordinary guidance with a negative prompt.
    """

    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    pipeline_fields = ("true_cfg_scale", "guidance_scale")
    prompt_extras = ("pooled_prompt_embeds",)
    # torch 2.11 chooses cuDNN's on an H200, whose backward pass ends in an illegal memory access here.
    cuda_attention = "_native_flash"

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        steps = model_config.pipeline.num_inference_steps
        mu = image_shift(scheduler.config, cls.latent_shape(model_config)[0])
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
        scale = model_config.pipeline.guidance_scale
        shared = {
            "hidden_states": latent.to(model_config.dtype),
            "timestep": timestep.to(model_config.dtype) / 1000,
            "guidance": None if scale is None else torch.full((len(latent),), scale, device=latent.device),
            "img_ids": _positions(*cls._grid(model_config), latent.device),
            "return_dict": False,
        }

        def with_text(embeds: Tensor, pooled: Tensor) -> dict[str, Any]:
            return shared | {
                "encoder_hidden_states": embeds.to(model_config.dtype),
                "pooled_projections": pooled.to(model_config.dtype),
                "txt_ids": torch.zeros(embeds.shape[1], 3, device=latent.device),
            }

        positive = with_text(prompt_embeds, micro_batch["pooled_prompt_embeds"])
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None:
            raise ValueError("true_cfg_scale > 1 needs negative_prompt_embeds and negative_pooled_prompt_embeds")
        return positive, with_text(negative_prompt_embeds, micro_batch["negative_pooled_prompt_embeds"])

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """The distilled model's own guidance, and standard guidance around it if asked for; [B, S, C]."""
        if unconditional is None:
            return conditional.float()
        return guided(conditional, unconditional, model_config.pipeline.true_cfg_scale).float()

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        rows, columns = cls._grid(model_config)
        return rows * columns // 4, transformer_config(model_config)["in_channels"]

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        latent = unpack_latents(latents, *cls._grid(model_config))
        return vae.decode(unscaled(vae, latent), return_dict=False)[0]  # type: ignore[operator]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        return pack_latents(scaled(vae, vae.encode(pixels_of(vae, images)).latent_dist.mode()))  # type: ignore[operator]

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, pooled, _ = pipeline.encode_prompt(prompts, max_sequence_length=max_sequence_length)
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "pooled_prompt_embeds": pooled}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        """T5's tokens; CLIP gives one vector of the first 77."""
        return [len(ids) for ids in pipeline.tokenizer_2(prompts)["input_ids"]]

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width, both = model_width(config), image_tokens + text_tokens
        embedders = config["in_channels"] * width * image_tokens + config["joint_attention_dim"] * width * text_tokens
        scalars = 2 if config["guidance_embeds"] else 1
        time = scalars * embedded(TIME_CHANNELS, width) + embedded(config["pooled_projection_dim"], width)
        double = config["num_layers"] * double_block(width, image_tokens, text_tokens)
        # Queries, keys, values and MLP side by side, joined by one output projection of width 5.
        single = config["num_single_layers"] * (
            (3 + 4 + 5) * width**2 * both + 3 * width**2 + attention(both, both, width)
        )
        out = 2 * width**2 + width * config["in_channels"] * image_tokens
        return embedders + time + double + single + out

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        return [*module.transformer_blocks, *module.single_transformer_blocks]  # type: ignore[misc]

    @classmethod
    def check_pipeline(cls, model_config: DiffusionModelConfig) -> None:
        super().check_pipeline(model_config)
        distilled = transformer_config(model_config)["guidance_embeds"]
        scale = model_config.pipeline.guidance_scale
        if distilled and scale is None:
            raise ValueError("rollout.pipeline.guidance_scale is null, but this model is distilled with one: give 3.5")
        if not distilled and scale is not None:
            raise ValueError(
                f"rollout.pipeline.guidance_scale is {scale}, but this model is not distilled with one: leave it null"
            )

    @classmethod
    def split_sequences(cls, model_config: DiffusionModelConfig, text_tokens: int) -> dict[str, int]:
        return {"a sample": cls.latent_shape(model_config)[0], "a prompt": text_tokens}

    @classmethod
    def _grid(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Rows and columns of the VAE's latent."""
        return latent_grid(model_config, kl_vae_factor(model_config.path), patch=2)


def _positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """(0, row, column) of each token, [S, 3]."""
    sides = (torch.arange(side // 2, dtype=torch.float32, device=device) for side in (rows, columns))
    row, column = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).flatten(0, 1)
