# SPDX-License-Identifier: Apache-2.0
"""A complete QwenImagePipeline, small enough to be trained on two CPU cores, made without downloading anything."""

import json
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from models.tiny_qwen_image.settings import TinySettings

PREFIX_TOKENS = 34
"""QwenImagePipeline cuts this many tokens off the front of every prompt without looking at them."""

PROMPT_TEMPLATE = (
    "<|im_start|>system\n"
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The chat that QwenImagePipeline wraps around a prompt."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def build_pipeline(corpus: list[str], settings: TinySettings) -> QwenImagePipeline:
    """An untrained pipeline: a tokenizer fitted to `corpus`, random text encoder, VAE and transformer.

    The weights depend on `settings.seed` alone; torch's global generator is left as it was found.
    """
    tokenizer = train_tokenizer(corpus, settings.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        text_encoder = build_text_encoder(tokenizer, settings)
        vae = build_vae(settings)
        transformer = build_transformer(settings)
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def train_tokenizer(corpus: list[str], vocab_size: int) -> Qwen2Tokenizer:
    """Qwen's byte-level BPE, with merges learnt from the chat template and `corpus`.

    Every template word must become a single token, else the pipeline's blind cut would land inside the prompt; the
    template is therefore counted as often as all prompts together.
    """
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = Sequence([Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"), byte_level])
    bpe.train_from_iterator(
        [_template_text()] * max(1, len(corpus)) + corpus,
        BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=1,
            show_progress=False,
            initial_alphabet=sorted(ByteLevel.alphabet()),
        ),
    )
    learnt = json.loads(bpe.to_str())["model"]
    vocab: dict[str, int] = dict(learnt["vocab"])
    for token in SPECIAL_TOKENS:
        vocab.setdefault(token, len(vocab))
    merges: Any = [tuple(pair) for pair in learnt["merges"]]  # typed too narrowly in transformers
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    found = len(tokenizer(PROMPT_TEMPLATE.split("{}")[0]).input_ids)
    if found != PREFIX_TOKENS:
        raise ValueError(f"the chat prefix makes {found} tokens, the pipeline needs {PREFIX_TOKENS}")
    return tokenizer


def build_text_encoder(tokenizer: Qwen2Tokenizer, settings: TinySettings) -> Qwen2_5_VLForConditionalGeneration:
    """A random, frozen Qwen2.5-VL language model with the smallest vision tower that its class accepts."""
    width = settings.text_dim
    ids = {token: int(i) for token, i in zip(SPECIAL_TOKENS, _token_ids(tokenizer), strict=True)}
    # Two heads, so a head has width/2 channels; rotary sections count pairs: together a quarter of the width.
    rotary = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [width // 8, width // 16, width // 16],
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": settings.text_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": rotary,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    encoder = Qwen2_5_VLForConditionalGeneration(config)
    return encoder.eval().requires_grad_(False)


def build_vae(settings: TinySettings) -> AutoencoderKLQwenImage:
    """Qwen-Image's VAE with a single halving of height and width; its latent statistics are set after training."""
    channels = settings.latent_channels
    return AutoencoderKLQwenImage(
        base_dim=settings.vae_base_dim,
        z_dim=channels,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
    )


def build_transformer(settings: TinySettings) -> QwenImageTransformer2DModel:
    """The denoiser, starting as the zero function: the output layer and all modulations begin at zero.

    diffusers leaves them at the default initialisation, with which early training is slow and noisy.
    """
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * settings.latent_channels,
        out_channels=settings.latent_channels,
        num_layers=settings.layers,
        attention_head_dim=settings.head_dim,
        num_attention_heads=settings.heads,
        joint_attention_dim=settings.text_dim,
        axes_dims_rope=settings.rope_axes,
    )
    for name, parameter in transformer.named_parameters():
        if name.startswith(("proj_out.", "norm_out.linear.")) or "_mod.1." in name:
            torch.nn.init.zeros_(parameter)
    return transformer


def _template_text() -> str:
    """The template's ordinary words: special tokens never reach the BPE, so they must not be merged into words."""
    text = PROMPT_TEMPLATE
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text


def _token_ids(tokenizer: Qwen2Tokenizer) -> list[int]:
    """Ids of SPECIAL_TOKENS, in their order."""
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert isinstance(ids, list)
    return ids
