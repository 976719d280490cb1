# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in diffusers format, one a family, with tokenizers of their own and nothing downloaded.

No weight is zero, so that no layer hides what comes before it; modulations are large, so that prompt, timestep and
guidance all show in the picture.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.flux import Flux
from models.families.flux_2_klein import Flux2Klein
from models.families.latents import latent_grid, text_width, transformer_config, unpack_latents
from models.families.qwen_image import QwenImage
from models.families.stable_diffusion_3 import StableDiffusion3
from models.families.wan import Wan
from models.families.z_image import ZImage
from models.samples.trajectories import PromptTable
from models.tiny_qwen_image.build import train_tokenizer
from tests.support.helpers import PROMPTS, save_tiny_model

NEGATIVE = "blurry and low quality"
CORPUS = [*PROMPTS, NEGATIVE]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CLIP_LENGTH = 16
MAX_SEQUENCE_LENGTH = 24


@dataclass(frozen=True)
class Family:
    """How one family is tested.

    Attributes:
        adapter: what is tested.
        save: writes the tiny checkpoint into a folder.
        schedulers: scheduler configs to test with, by name; each is laid over the checkpoint's own.
        sizes: (height, width), two of them.
        plain, guided: pipeline settings without and with classifier-free guidance.
        call: what the diffusers pipeline is called with besides, such as the length of its text.
        unguided_call: what turns its guidance off.
        text_rows: rows of embeddings [B, L, D] whose length max_sequence_length bounds.
        padded: the denoiser sees the text's padding, and both halves of guidance have texts of one length.
        dead_ends: parts of the names of weights whose output leads nowhere, so that no gradient reaches them.
        prepare: makes the diffusers pipeline the oracle, where it is not so from the start.
        contrasts: what the pipeline is called with for guidance to contrast with these texts.
        start: the latents that the pipeline begins with, as it takes them, from the adapter's.
        finish: what the pipeline shows of the adapter's latents as its own at the end.
    """

    adapter: type[DiffusionModelBase]
    save: Callable[[Path], None]
    schedulers: dict[str, dict[str, Any]] = field(default_factory=lambda: {"own": {}})
    sizes: tuple[tuple[int, int], ...] = ((16, 24), (24, 16))
    plain: dict[str, Any] = field(default_factory=dict)
    guided: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=lambda: {"max_sequence_length": MAX_SEQUENCE_LENGTH})
    unguided_call: dict[str, Any] = field(default_factory=dict)
    text_rows: tuple[int, int | None] = (0, None)
    padded: bool = False
    dead_ends: tuple[str, ...] = ()
    prepare: Callable[[Any], None] = lambda pipeline: None
    contrasts: Callable[[Any, list[str]], dict[str, Any]] = lambda pipeline, texts: {"negative_prompt": texts}
    start: Callable[[DiffusionModelConfig, Tensor], Tensor] = lambda config, latents: latents
    finish: Callable[[Any, DiffusionModelConfig, Tensor], Tensor] = lambda pipeline, config, latents: latents

    def unreached(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are dead ends."""
        return {name for name in names if any(part in name for part in self.dead_ends)}


def enliven(module: nn.Module, seed: int = 1, gain: float = 1.0) -> nn.Module:
    """Give every weight that is zero, or one like a norm's, a value that matters; matrices are multiplied by `gain`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.any():
                parameter.normal_(std=0.3, generator=generator)
            elif "norm" in name and parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim > 1:
                parameter.mul_(gain)
    return module.eval()


def seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def clip_tokenizer(letters: Sequence[str] = LETTERS, length: int = CLIP_LENGTH) -> CLIPTokenizer:
    """Letters, with and without the end of a word."""
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length)


def t5_tokenizer(corpus: Sequence[str] = CORPUS, letters: Sequence[str] = LETTERS) -> T5Tokenizer:
    """Letters, and the words of the prompts."""
    words = sorted({f"▁{word}" for prompt in corpus for word in prompt.split()})
    pieces = dict.fromkeys(["<pad>", "</s>", "<unk>", "▁", *letters, *words])
    return T5Tokenizer(vocab=[(piece, 0.0 if i < 3 else -2.0) for i, piece in enumerate(pieces)], extra_ids=0)


def clip_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_config(tokenizer: T5Tokenizer, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 1,
        "num_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def kl_vae(latent_channels: int = 4, shift_factor: float | None = 0.2) -> AutoencoderKL:
    """One halving of height and width, and statistics that are not trivial."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=latent_channels,
        scaling_factor=1.3,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def save_stable_diffusion_3(folder: Path, **transformer: Any) -> None:
    """Like Stable Diffusion 3.5: normalised queries and keys, and one block with a second attention.

    Unless `transformer`, fields of its config, says otherwise.
    """
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    width, own = 16, {"dual_attention_layers": (0,), "qk_norm": "rms_norm"} | transformer

    def build() -> StableDiffusion3Pipeline:
        return StableDiffusion3Pipeline(
            transformer=enliven(
                SD3Transformer2DModel(
                    sample_size=16,
                    in_channels=4,
                    out_channels=4,
                    num_layers=3,
                    attention_head_dim=8,
                    num_attention_heads=2,
                    joint_attention_dim=2 * width,
                    caption_projection_dim=16,
                    pooled_projection_dim=2 * width,
                    pos_embed_max_size=16,
                    **own,
                )
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=enliven(kl_vae()),
            text_encoder=CLIPTextModelWithProjection(clip_config(clip, width)).eval(),
            tokenizer=clip,
            text_encoder_2=CLIPTextModelWithProjection(clip_config(clip, width)).eval(),
            tokenizer_2=clip,
            text_encoder_3=T5EncoderModel(T5Config(**t5_config(t5, 2 * width))).eval(),
            tokenizer_3=t5,
        )

    seeded(build).save_pretrained(folder)


def save_flux(folder: Path) -> None:
    """Like FLUX.1-dev: distilled with a guidance scale, joint and single blocks."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    width = 16

    def build() -> FluxPipeline:
        return FluxPipeline(
            transformer=enliven(
                FluxTransformer2DModel(
                    in_channels=16,
                    num_layers=2,
                    num_single_layers=2,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=width,
                    pooled_projection_dim=width,
                    guidance_embeds=True,
                    axes_dims_rope=(4, 6, 6),
                )
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=enliven(kl_vae()),
            text_encoder=CLIPTextModel(clip_config(clip, width)).eval(),
            tokenizer=clip,
            text_encoder_2=T5EncoderModel(T5Config(**t5_config(t5, width))).eval(),
            tokenizer_2=t5,
        )

    seeded(build).save_pretrained(folder)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_flux_2_klein(folder: Path, is_distilled: bool = False) -> None:
    """A base model unless told otherwise: blocks of both kinds, text of three layers far apart, and channels of the
    latent whose statistics differ."""
    tokenizer = train_tokenizer(CORPUS, 4096)
    tokenizer.chat_template = CHAT
    width, channels = 16, 4

    def build() -> Flux2KleinPipeline:
        text = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        vae = AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=channels,
        )
        vae.bn.running_mean.uniform_(-0.3, 0.3)
        vae.bn.running_var.uniform_(0.5, 2.0)
        return Flux2KleinPipeline(
            transformer=enliven(
                Flux2Transformer2DModel(
                    in_channels=4 * channels,
                    num_layers=2,
                    num_single_layers=2,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=3 * width,
                    timestep_guidance_channels=32,
                    axes_dims_rope=(4, 4, 4, 4),
                    guidance_embeds=False,
                ),
                gain=2.5,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=enliven(vae),
            text_encoder=Qwen3ForCausalLM(text).eval(),
            tokenizer=tokenizer,
            is_distilled=is_distilled,
        )

    seeded(build).save_pretrained(folder)


def encoded_by_klein(pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
    """Its pipeline takes what guidance contrasts with as embeddings alone."""
    return {"negative_prompt_embeds": pipeline.encode_prompt(texts, max_sequence_length=MAX_SEQUENCE_LENGTH)[0]}


def as_patches(config: DiffusionModelConfig, latents: Tensor) -> Tensor:
    """Tokens [B, S, C] as a grid [B, C, rows, columns]."""
    rows, columns = latent_grid(config, vae_factor=2, patch=2)
    return latents.mT.unflatten(-1, (rows // 2, columns // 2))


def as_kleins_vae_has_them(pipeline: Any, config: DiffusionModelConfig, latents: Tensor) -> Tensor:
    """Tokens [B, S, C] as the decoder takes them, [B, C/4, h, w]."""
    norm = pipeline.vae.bn
    deviation = torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
    return unpack_latents(latents * deviation + norm.running_mean, *latent_grid(config, vae_factor=2, patch=2))


def save_z_image(folder: Path) -> None:
    """A chat around the prompt, refiners of both streams, and token counts that need padding to 32."""
    tokenizer = train_tokenizer(CORPUS, 4096)
    tokenizer.chat_template = CHAT
    width = 16

    def build() -> ZImagePipeline:
        text = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        )
        return ZImagePipeline(
            transformer=enliven(
                ZImageTransformer2DModel(
                    in_channels=4,
                    dim=32,
                    n_layers=2,
                    n_refiner_layers=1,
                    n_heads=2,
                    n_kv_heads=2,
                    cap_feat_dim=width,
                    axes_dims=[4, 6, 6],
                    axes_lens=[128, 32, 32],
                )
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=enliven(kl_vae()),
            text_encoder=Qwen3Model(text).eval(),
            tokenizer=tokenizer,
        )

    seeded(build).save_pretrained(folder)


def save_wan(folder: Path, vae: nn.Module | None = None, expand_timesteps: bool = True) -> None:
    """Like Wan 2.2 TI2V-5B, unless told otherwise: a timestep for each token, a VAE that is 16 times smaller a side and
    4 in time."""
    t5 = t5_tokenizer()
    width = 16

    def build() -> WanPipeline:
        return WanPipeline(
            transformer=enliven(
                WanTransformer3DModel(
                    num_attention_heads=2,
                    attention_head_dim=12,
                    in_channels=4,
                    out_channels=4,
                    text_dim=width,
                    freq_dim=16,
                    ffn_dim=48,
                    num_layers=2,
                    rope_max_seq_len=32,
                )
            ),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, num_train_timesteps=1000
            ),
            vae=vae
            or enliven(
                AutoencoderKLWan(
                    base_dim=4,
                    decoder_base_dim=4,
                    z_dim=4,
                    dim_mult=[1, 1, 1, 1],
                    num_res_blocks=1,
                    is_residual=True,
                    in_channels=12,
                    out_channels=12,
                    patch_size=2,
                    scale_factor_spatial=16,
                    latents_mean=[0.1, -0.2, 0.3, 0.0],
                    latents_std=[1.3, 0.7, 1.1, 0.9],
                )
            ),
            text_encoder=UMT5EncoderModel(UMT5Config(**t5_config(t5, width))).eval(),
            tokenizer=t5,
            expand_timesteps=expand_timesteps,
        )

    seeded(build).save_pretrained(folder)


def with_euler_steps(pipeline: Any) -> None:
    """Its own solver takes several steps into account; ours is the Euler step of the same shift."""
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=pipeline.scheduler.config.flow_shift)


DYNAMIC_SHIFT = {  # the values of Qwen/Qwen-Image
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

FAMILIES = {
    "qwen_image": Family(
        QwenImage,
        lambda folder: save_tiny_model(folder) and None,
        schedulers={"own": {}, "dynamic": DYNAMIC_SHIFT},
        guided={"true_cfg_scale": 4.0},
        call={"max_sequence_length": 512},
        dead_ends=tuple(
            f"transformer_blocks.1.{part}"
            for part in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
        ),
    ),
    "stable_diffusion_3": Family(
        StableDiffusion3,
        save_stable_diffusion_3,
        schedulers={"own": {}, "dynamic": DYNAMIC_SHIFT | {"shift_terminal": None}},
        guided={"guidance_scale": 4.5},
        unguided_call={"guidance_scale": 1.0},
        text_rows=(CLIP_LENGTH, None),
        padded=True,
        dead_ends=("transformer_blocks.2.attn.add_q_proj", "transformer_blocks.2.attn.norm_added_q"),
    ),
    "flux": Family(
        Flux,
        save_flux,
        schedulers={"own": {}, "static": {"use_dynamic_shifting": False, "shift": 3.0}},
        plain={"guidance_scale": 3.5},
        guided={"guidance_scale": 3.5, "true_cfg_scale": 4.0},
    ),
    "flux_2_klein": Family(
        Flux2Klein,
        save_flux_2_klein,
        schedulers={"own": {}, "static": {"use_dynamic_shifting": False}},
        guided={"guidance_scale": 4.0},
        unguided_call={"guidance_scale": 1.0},
        padded=True,
        contrasts=encoded_by_klein,
        start=as_patches,
        finish=as_kleins_vae_has_them,
    ),
    "z_image": Family(
        ZImage,
        save_z_image,
        schedulers={"own": {}, "dynamic": DYNAMIC_SHIFT | {"shift_terminal": None}},
        guided={"guidance_scale": 4.0},
        unguided_call={"guidance_scale": 0.0},
    ),
    "wan": Family(
        Wan,
        save_wan,
        schedulers={"own": {}, "shifted": {"flow_shift": 1.0}},
        sizes=((32, 64), (64, 32)),
        plain={"num_frames": 5},
        guided={"num_frames": 5, "guidance_scale": 5.0},
        unguided_call={"guidance_scale": 1.0},
        prepare=with_euler_steps,
    ),
}


def embeddings_of(
    config: DiffusionModelConfig, lengths: Sequence[int], negative_length: int | None = None
) -> PromptTable:
    """Random embeddings as this model's transformer takes them, of prompts with these token counts."""
    transformer, width = transformer_config(config), text_width(config)
    pooled = transformer.get("pooled_projection_dim")
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    adapter = DiffusionModelBase.get_class(config)
    if any(family.padded for family in FAMILIES.values() if family.adapter is adapter):
        mask, negative_length = torch.ones_like(mask), negative_length and longest
    tensors = {"prompt_embeds": torch.randn(len(lengths), longest, width), "prompt_embeds_mask": mask}
    if pooled:
        tensors["pooled_prompt_embeds"] = torch.randn(len(lengths), pooled)
    if negative_length:
        tensors["negative_prompt_embeds"] = torch.randn(1, negative_length, width)
        tensors["negative_prompt_embeds_mask"] = torch.ones(1, negative_length, dtype=torch.bool)
        if pooled:
            tensors["negative_pooled_prompt_embeds"] = torch.randn(1, pooled)
    return PromptTable.of(tensors)
