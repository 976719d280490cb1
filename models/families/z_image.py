# SPDX-License-Identifier: Apache-2.0
"""Training and in-process sampling adapter of Z-Image."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig, select_step
from models.families.latents import (
    kl_vae_factor,
    latent_grid,
    pixels_of,
    scaled,
    transformer_config,
    unscaled,
)
from models.families.operations import TIME_CHANNELS, Config, attention
from models.families.text_masks import rows_without_padding
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift

PATCH = 2

MULTIPLE = 32
"""The denoiser fills image and caption up to a multiple of this."""


@DiffusionModelBase.register("ZImagePipeline")
class ZImage(DiffusionModelBase):
    """Latents are the VAE's own, [B, C, h, w]; the denoiser takes lists, so captions keep their own lengths.

    It is fed 1 - s, predicts x0 - e, and counts guidance from 0: scale w is w + 1 elsewhere. Its pipeline's
    cfg_normalization and cfg_truncation are off by default and not offered here.
    """

    lora_target_modules = (
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )
    pipeline_fields = ("guidance_scale",)
    guides_in_one_pass = True
    negative_first = False

    one_text_length = True

    @classmethod
    def set_timesteps(
        cls, scheduler: FlowMatchSDEDiscreteScheduler, model_config: DiffusionModelConfig, device: str
    ) -> None:
        _, rows, columns = cls.latent_shape(model_config)
        mu = image_shift(scheduler.config, (rows // PATCH) * (columns // PATCH))
        steps = model_config.pipeline.num_inference_steps
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=mu, device=device)
        scheduler.set_begin_index(0)

    @classmethod
    def is_guided(cls, pipeline: Any) -> bool:
        return (pipeline.guidance_scale or 0.0) > 0

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
        frames = latent.to(model_config.dtype).unsqueeze(2)  # the network knows a frame axis

        def with_text(embeds: Tensor, mask: Tensor) -> dict[str, Any]:
            return {
                "x": list(frames.unbind(0)),
                "t": (1000 - timestep) / 1000,
                "cap_feats": rows_without_padding(embeds.to(model_config.dtype), mask),
                "return_dict": False,
            }

        positive = with_text(prompt_embeds, prompt_embeds_mask)
        if not cls.is_guided(model_config.pipeline):
            return positive, None
        if negative_prompt_embeds is None or negative_prompt_embeds_mask is None:
            raise ValueError("guidance_scale > 0 needs negative_prompt_embeds and their mask")
        return positive, with_text(negative_prompt_embeds, negative_prompt_embeds_mask)

    @classmethod
    def denoise(cls, module: nn.Module, model_inputs: dict[str, Any]) -> Tensor:
        """The network knows lists of samples with a frame axis; guidance joins its halves in fp32, [B, C, h, w]."""
        return torch.stack([sample.float() for sample in module(**model_inputs)[0]]).squeeze(2)

    @classmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """c + w (c - u), [B, C, h, w], with the sign turned."""
        if unconditional is None:
            return -conditional
        scale = model_config.pipeline.guidance_scale or 0.0
        return -(conditional + scale * (conditional - unconditional))

    @classmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, int, int]:
        channels = transformer_config(model_config)["in_channels"]
        return channels, *latent_grid(model_config, kl_vae_factor(model_config.path), PATCH)

    @classmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        return vae.decode(unscaled(vae, latents), return_dict=False)[0]  # type: ignore[operator]

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        return scaled(vae, vae.encode(pixels_of(vae, images)).latent_dist.mode())  # type: ignore[operator]

    @classmethod
    def encode_prompts(cls, pipeline: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        # A copy: the pipeline writes its chats over the list that it is given.
        rows, _ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        embeds = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=embeds.device)
        mask = torch.arange(embeds.shape[1], device=embeds.device) < lengths[:, None]
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @classmethod
    def prompt_lengths(cls, pipeline: Any, prompts: list[str]) -> list[int]:
        chats = [
            pipeline.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
            )
            for prompt in prompts
        ]
        return [len(ids) for ids in pipeline.tokenizer(chats)["input_ids"]]

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int:
        width, channels = config["dim"], config["all_patch_size"][0] ** 2 * config["in_channels"]
        image, text = (math.ceil(tokens / MULTIPLE) * MULTIPLE for tokens in (image_tokens, text_tokens))
        narrow = min(width, 256)  # of the modulation's input

        def block(tokens: int) -> int:
            return (4 * width**2 + 3 * width * int(width / 3 * 8)) * tokens + attention(tokens, tokens, width)

        embedders = channels * width * image + config["cap_feat_dim"] * width * text
        time = TIME_CHANNELS * 1024 + 1024 * narrow
        refiners = config["n_refiner_layers"] * (block(image) + block(text) + 4 * narrow * width)
        layers = config["n_layers"] * (block(image + text) + 4 * narrow * width)
        return embedders + time + refiners + layers + narrow * width + width * channels * (image + text)

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        return [*module.noise_refiner, *module.context_refiner, *module.layers]  # type: ignore[misc]
