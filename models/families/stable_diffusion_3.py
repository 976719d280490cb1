# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of Stable Diffusion 3 and 3.5."""

from typing import Any

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.families.guidance import guided
from models.families.latents import (
    component_config,
    kl_vae_factor,
    latent_grid,
    pixels_of,
    scaled,
    transformer_config,
    unscaled,
)
from models.families.operations import TIME_CHANNELS, Config, attention, double_block, embedded, model_width
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift


@DiffusionModelBase.register("StableDiffusion3Pipeline")
class StableDiffusion3(DiffusionModelBase):
    """Latents are the VAE's own, [B, C, h, w]; text is CLIP's and T5's sequence and CLIP's pooled vectors.

    Every prompt is padded to the same length and the denoiser sees the padding, so there is no mask.
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
    )
    pipeline_fields = ("guidance_scale",)
    guides_in_one_pass = True
    projects_streams = True
    prompt_extras = ("pooled_prompt_embeds",)

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        mu = None
        if scheduler.config.use_dynamic_shifting:
            patch = transformer_config(model_config)["patch_size"]
            _, rows, columns = cls.latent_shape(model_config)
            mu = image_shift(scheduler.config, (rows // patch) * (columns // patch))
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, mu=mu, device=device)
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

        def with_text(embeds: Tensor, pooled: Tensor) -> dict[str, Any]:
            return {
                "hidden_states": latent.to(model_config.dtype),
                "timestep": timestep,
                "encoder_hidden_states": embeds.to(model_config.dtype),
                "pooled_projections": pooled.to(model_config.dtype),
                "return_dict": False,
            }

        positive = with_text(prompt_embeds, micro_batch["pooled_prompt_embeds"])
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None:
            raise ValueError("guidance_scale > 1 needs negative_prompt_embeds and negative_pooled_prompt_embeds")
        return positive, with_text(negative_prompt_embeds, micro_batch["negative_pooled_prompt_embeds"])

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        if unconditional is None:
            return conditional.float()
        return guided(conditional, unconditional, model_config.pipeline.guidance_scale or 1.0).float()

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int, int]:
        config = transformer_config(model_config)
        rows, columns = latent_grid(model_config, kl_vae_factor(model_config.path), config["patch_size"])
        largest = config["pos_embed_max_size"] * config["patch_size"]
        if max(rows, columns) > largest:
            limit = largest * kl_vae_factor(model_config.path)
            height, width = model_config.pipeline.height, model_config.pipeline.width
            raise ValueError(
                f"pipeline.height {height} and pipeline.width {width} must be at most {limit}: the model has no "
                "positions beyond"
            )
        return config["in_channels"], rows, columns

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        return vae.decode(unscaled(vae, latents), return_dict=False)[0]  # type: ignore[operator]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        return scaled(vae, vae.encode(pixels_of(vae, images)).latent_dist.mode())  # type: ignore[operator]

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "pooled_prompt_embeds": pooled}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        """T5's tokens. CLIP cuts at 77 without harm: T5 reads on."""
        return [len(ids) for ids in pipeline.tokenizer_3(prompts)["input_ids"]]

    @classmethod
    def text_shapes(cls, model_config: DiffusionModelConfig, max_sequence_length: int) -> dict[str, tuple[int, ...]]:
        """CLIP's tokens stand before T5's."""
        clip = component_config(model_config.path, "text_encoder")["max_position_embeddings"]
        return super().text_shapes(model_config, clip + max_sequence_length)

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width, patch = model_width(config), config["patch_size"] ** 2
        embedders = patch * config["in_channels"] * width * image_tokens
        embedders += config["joint_attention_dim"] * width * text_tokens
        time = embedded(TIME_CHANNELS, width) + embedded(config["pooled_projection_dim"], width)
        blocks = config["num_layers"] * double_block(width, image_tokens, text_tokens)
        second = 4 * width**2 * image_tokens + 3 * width**2 + attention(image_tokens, image_tokens, width)
        # The last block's text has no output: no projection, no MLP, and two of the six modulations.
        unused = (1 + 8) * width**2 * text_tokens + 4 * width**2
        out = 2 * width**2 + width * patch * config["out_channels"] * image_tokens
        return embedders + time + blocks + len(config["dual_attention_layers"]) * second - unused + out
