# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of FLUX.2 klein (4B and 9B, base and distilled)."""

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
    pipeline_config,
    pixels_of,
    transformer_config,
    unpack_latents,
)
from models.families.operations import Config, attention, embedded, model_width
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import size_and_steps_shift


@DiffusionModelBase.register("Flux2KleinPipeline")
class Flux2Klein(DiffusionModelBase):
    """Latents are [B, S, C]: 2x2 patches of the VAE's latent, packed into S tokens of C channels, each normalised.

    Text is three of Qwen3's layers side by side, padded to one length that the denoiser sees. The base models are
    guided; those distilled to few steps are not, and the network takes no scale as an input.
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
        "attn.to_qkv_mlp_proj",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )
    pipeline_fields = ("guidance_scale",)
    # FLUX.1's: torch's own choice ended that one's backward pass, whose attention is called alike.
    cuda_attention = "_native_flash"

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        steps = model_config.pipeline.num_inference_steps
        mu = size_and_steps_shift(cls.latent_shape(model_config)[0], steps)
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
        rows, columns = (side // 2 for side in cls._grid(model_config))
        shared = {
            "hidden_states": latent.to(model_config.dtype),
            "timestep": timestep.to(model_config.dtype) / 1000,
            "img_ids": _positions(latent.device, rows=rows, columns=columns),
            "return_dict": False,
        }

        def with_text(embeds: Tensor) -> dict[str, Any]:
            return shared | {
                "encoder_hidden_states": embeds.to(model_config.dtype),
                "txt_ids": _positions(latent.device, words=embeds.shape[1]),
            }

        positive = with_text(prompt_embeds)
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None:
            raise ValueError("guidance_scale > 1 needs negative_prompt_embeds")
        return positive, with_text(negative_prompt_embeds)

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """u + w (c - u), [B, S, C]."""
        if unconditional is None:
            return conditional.float()
        return guided(conditional, unconditional, model_config.pipeline.guidance_scale or 1.0).float()

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        rows, columns = cls._grid(model_config)
        return rows * columns // 4, transformer_config(model_config)["in_channels"]

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        mean, deviation = _statistics(vae)
        latent = unpack_latents(latents.to(mean) * deviation + mean, *cls._grid(model_config))
        return vae.decode(latent, return_dict=False)[0]  # type: ignore[operator]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        mean, deviation = _statistics(vae)
        latent = pack_latents(vae.encode(pixels_of(vae, images)).latent_dist.mode())  # type: ignore[operator]
        return (latent.float() - mean) / deviation

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(prompts, max_sequence_length=max_sequence_length)
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        """The tokens of the chat around each prompt."""
        chats = [
            pipeline.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            for prompt in prompts
        ]
        return [len(ids) for ids in pipeline.tokenizer(chats)["input_ids"]]

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width, both = model_width(config), image_tokens + text_tokens
        hidden = int(config["mlp_ratio"] * width)
        embedders = config["in_channels"] * width * image_tokens + config["joint_attention_dim"] * width * text_tokens
        time = embedded(config["timestep_guidance_channels"], width)
        modulations = (6 + 6 + 3) * width**2  # shared by all blocks of a kind
        # A gated MLP is two projections up and one down; the single blocks' stand beside the attention.
        block = (4 * width**2 + 3 * width * hidden) * both + attention(both, both, width)
        blocks = (config["num_layers"] + config["num_single_layers"]) * block
        out = 2 * width**2 + width * config["in_channels"] * image_tokens
        return embedders + time + modulations + blocks + out

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        return [*module.transformer_blocks, *module.single_transformer_blocks]  # type: ignore[misc]

    @classmethod
    def check_pipeline(cls, model_config: DiffusionModelConfig) -> None:
        super().check_pipeline(model_config)
        distilled = pipeline_config(model_config.path).get("is_distilled", False)
        if distilled and cls.is_guided(model_config.pipeline):
            raise ValueError(
                f"rollout.pipeline.guidance_scale is {model_config.pipeline.guidance_scale}, but this model was "
                "distilled to do without guidance: leave it null"
            )

    @classmethod
    def split_sequences(cls, model_config: DiffusionModelConfig, text_tokens: int) -> dict[str, int]:
        return {"a sample": cls.latent_shape(model_config)[0], "a prompt": text_tokens}

    @classmethod
    def _grid(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Rows and columns of the VAE's latent."""
        return latent_grid(model_config, kl_vae_factor(model_config.path), patch=2)


def _positions(device: torch.device, rows: int = 1, columns: int = 1, words: int = 1) -> Tensor:
    """(0, row, column, word) of each token of a picture or of a text, [1, S, 4]."""
    axes = (torch.arange(length, device=device) for length in (1, rows, columns, words))
    return torch.cartesian_prod(*axes)[None]


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each of a token's channels, [C], in the VAE's number format."""
    norm, dtype = vae.bn, next(vae.parameters()).dtype
    return norm.running_mean.to(dtype), torch.sqrt(norm.running_var + vae.config.batch_norm_eps).to(dtype)
