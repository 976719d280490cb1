# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of Wan, text to video."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.families.guidance import guided
from models.families.latents import (
    component_config,
    destandardised,
    latent_grid,
    pipeline_config,
    pixels_of,
    standardised,
    transformer_config,
)
from models.families.operations import Config, attention, embedded, model_width
from models.schedulers import FlowMatchSDEDiscreteScheduler


@DiffusionModelBase.register("WanPipeline")
class Wan(DiffusionModelBase):
    """Latents are the VAE's own, [B, C, F, h, w]; text is UMT5's sequence, filled up with zeros that the model sees.

    The folder's scheduler is UniPC, a solver of several steps, which has no stochastic counterpart here. Of it the
    shift is kept and the steps are Euler's: the sampling of `WanPipeline` with
    `FlowMatchEulerDiscreteScheduler(shift=flow_shift)`.
    """

    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    pipeline_fields = ("guidance_scale", "num_frames")
    samples_video = True

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig) -> FlowMatchSDEDiscreteScheduler:
        config = component_config(model_config.path, "scheduler")
        shift = config["flow_shift"] if "flow_shift" in config else config["shift"]
        scheduler = FlowMatchSDEDiscreteScheduler(num_train_timesteps=config["num_train_timesteps"], shift=shift)
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, device=device)
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
        if pipeline_config(model_config.path).get("expand_timesteps"):  # TI2V: a timestep for each token
            timestep = timestep[:, None].expand(-1, cls._tokens(model_config))
        shared = {"hidden_states": latent.to(model_config.dtype), "timestep": timestep, "return_dict": False}
        positive = shared | {"encoder_hidden_states": prompt_embeds.to(model_config.dtype)}
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None:
            raise ValueError("guidance_scale > 1 needs negative_prompt_embeds")
        return positive, shared | {"encoder_hidden_states": negative_prompt_embeds.to(model_config.dtype)}

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        if unconditional is None:
            return conditional.float()
        return guided(conditional, unconditional, model_config.pipeline.guidance_scale or 1.0).float()

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int, int, int]:
        vae, transformer = component_config(model_config.path, "vae"), transformer_config(model_config)
        frames, every = model_config.pipeline.num_frames, vae["scale_factor_temporal"]
        if frames is None or (frames - 1) % every:
            raise ValueError(
                f"pipeline.num_frames is {frames}: {model_config.architecture} samples video, of 1 frame and a "
                f"multiple of {every}"
            )
        grid = latent_grid(model_config, vae["scale_factor_spatial"], transformer["patch_size"][1])
        return transformer["in_channels"], (frames - 1) // every + 1, *grid

    @classmethod
    def check_pipeline(cls, model_config: DiffusionModelConfig) -> None:
        super().check_pipeline(model_config)
        if pipeline_config(model_config.path).get("boundary_ratio") is not None:
            raise ValueError(
                f"{model_config.path} has two denoisers (boundary_ratio in model_index.json), and one is trained here: "
                "use a Wan model with one, such as TI2V-5B"
            )

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        return vae.decode(destandardised(vae, latents), return_dict=False)[0]  # type: ignore[operator]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        return standardised(vae, vae.encode(pixels_of(vae, images)).latent_dist.mode())  # type: ignore[operator]

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones_like(embeds[..., 0], dtype=torch.bool)}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean  # here: every family's start would wait for it

        return [len(ids) for ids in pipeline.tokenizer([prompt_clean(prompt) for prompt in prompts])["input_ids"]]

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width, patch = model_width(config), math.prod(config["patch_size"])
        embedders = patch * config["in_channels"] * width * image_tokens
        embedders += embedded(config["text_dim"], width) * text_tokens
        time = (embedded(config["freq_dim"], width) + 6 * width**2) * timesteps
        own = 4 * width**2 * image_tokens + attention(image_tokens, image_tokens, width)
        cross = 2 * width**2 * (image_tokens + text_tokens) + attention(image_tokens, text_tokens, width)
        blocks = config["num_layers"] * (own + cross + 2 * width * config["ffn_dim"] * image_tokens)
        return embedders + time + blocks + width * patch * config["out_channels"] * image_tokens

    @classmethod
    def split_sequences(cls, model_config: DiffusionModelConfig, text_tokens: int) -> dict[str, int]:
        return {"a sample": cls._tokens(model_config)}

    @classmethod
    def _tokens(cls, model_config: DiffusionModelConfig) -> int:
        """Patches of a sample."""
        patch = transformer_config(model_config)["patch_size"]
        return math.prod(size // side for size, side in zip(cls.latent_shape(model_config)[1:], patch, strict=True))

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        return list(module.blocks)  # type: ignore[arg-type]
