# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of Qwen-Image."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.families.guidance import guided
from models.families.latents import (
    component_config,
    destandardised,
    latent_grid,
    pack_latents,
    pixels_of,
    standardised,
    transformer_config,
    unpack_latents,
)
from models.families.operations import TIME_CHANNELS, Config, double_block, embedded, model_width
from models.families.text_masks import is_full
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift


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

    pipeline_fields = ("true_cfg_scale",)
    most_text_tokens = 1024
    negative_prompt = " "
    projects_streams = True

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
        rows, columns = cls._grid(model_config)
        shared = {
            "hidden_states": latent.to(model_config.dtype),
            "timestep": timestep.to(model_config.dtype) / 1000,
            "guidance": None,
            "img_shapes": [[(1, rows // 2, columns // 2)]] * latent.shape[0],
            "return_dict": False,
        }

        def with_text(embeds: Tensor, mask: Tensor) -> dict[str, Any]:
            # As in the pipeline: no mask when nothing is padded, which takes the attention's unmasked path.
            text_mask = None if is_full(mask) else mask
            return shared | {
                "encoder_hidden_states": embeds.to(model_config.dtype),
                "encoder_hidden_states_mask": text_mask,
            }

        positive = with_text(prompt_embeds, prompt_embeds_mask)
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None or negative_prompt_embeds_mask is None:
            raise ValueError("true_cfg_scale > 1 needs negative_prompt_embeds and their mask")
        return positive, with_text(negative_prompt_embeds, negative_prompt_embeds_mask)

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """True guidance, then each token's velocity [B, S, C] is rescaled to the length of its conditional half."""
        if unconditional is None:
            return conditional.float()
        joined = guided(conditional, unconditional, model_config.pipeline.true_cfg_scale)
        length = torch.norm(conditional, dim=-1, keepdim=True) / torch.norm(joined, dim=-1, keepdim=True)
        return (joined * length).float()

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        rows, columns = cls._grid(model_config)
        return rows * columns // 4, transformer_config(model_config)["in_channels"]

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        latent = unpack_latents(latents, *cls._grid(model_config)).unsqueeze(2)
        decoded = vae.decode(destandardised(vae, latent), return_dict=False)[0]  # type: ignore[operator]
        return decoded[:, :, 0]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        latent = vae.encode(pixels_of(vae, images.unsqueeze(1))).latent_dist.mode()  # type: ignore[operator]
        return pack_latents(standardised(vae, latent)[:, :, 0])

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=max_sequence_length)
        # The pipeline leaves the mask out where nothing is padded.
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask.to(embeds.device)}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        chats = [pipeline.prompt_template_encode.format(prompt) for prompt in prompts]
        dropped = pipeline.prompt_template_encode_start_idx
        return [len(ids) - dropped for ids in pipeline.tokenizer(chats)["input_ids"]]

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width = model_width(config)
        embedders = config["in_channels"] * width * image_tokens + config["joint_attention_dim"] * width * text_tokens
        blocks = config["num_layers"] * double_block(width, image_tokens, text_tokens)
        out = 2 * width**2 + width * config["patch_size"] ** 2 * config["out_channels"] * image_tokens
        return embedders + embedded(TIME_CHANNELS, width) + blocks + out

    @classmethod
    def split_sequences(cls, model_config: DiffusionModelConfig, text_tokens: int) -> dict[str, int]:
        return {"a sample": cls.latent_shape(model_config)[0]}

    @classmethod
    def lengths_of_text(cls, inputs: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The text's states [B, tokens, C], its rotary angles [tokens, C] and, if padded, its mask [B, tokens]."""
        mask = inputs["encoder_hidden_states_mask"]
        _, angles = inputs["image_rotary_emb"]
        return [(inputs["encoder_hidden_states"], 1), (angles, 0), *([] if mask is None else [(mask, 1)])]

    @classmethod
    def padded_text(cls, model_inputs: dict[str, Any], multiple: int) -> dict[str, Any]:
        text, mask = model_inputs["encoder_hidden_states"], model_inputs["encoder_hidden_states_mask"]
        missing = -text.shape[1] % multiple
        if not missing:
            return model_inputs
        if mask is None:
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        return model_inputs | {
            "encoder_hidden_states": torch.nn.functional.pad(text, (0, 0, 0, missing)),
            "encoder_hidden_states_mask": torch.nn.functional.pad(mask, (0, missing)),
        }

    @classmethod
    def _grid(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Rows and columns of the VAE's latent."""
        factor = 2 ** len(component_config(model_config.path, "vae")["temperal_downsample"])  # diffusers' own spelling
        return latent_grid(model_config, factor, patch=2)
