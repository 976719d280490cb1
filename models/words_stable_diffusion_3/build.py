# SPDX-License-Identifier: Apache-2.0
"""A complete, untrained StableDiffusion3Pipeline of any size, with tokenizers of its own and nothing downloaded."""

from itertools import pairwise

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.models.clip.modeling_clip import CLIPTextEmbeddings

from models.words_stable_diffusion_3.render import CONSONANTS, INKS, LENGTHS, PAPERS, PREPOSITIONS, VOWELS
from models.words_stable_diffusion_3.settings import WordsSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
WHOLE_WORDS = ("the", "word", *INKS, *PAPERS)
"""CLIP reads each of these as one token, and all other words letter by letter."""
CLIP_TOKENS = 2 + 2 + LENGTHS[1] + 2 + sum(map(len, PREPOSITIONS))
"""Of the longest prompt: start and end, "the word", the letters, ink and paper, the prepositions letter by letter."""
T5_TOKENS = 8
"""Of every prompt: seven words, of which the pseudo-word is unknown, and the end."""
POSITION_SCALE = 0.7
"""Size of a position's vector beside that of a token's."""


def build_pipeline(settings: WordsSettings) -> StableDiffusion3Pipeline:
    """An untrained pipeline: tokenizers, random frozen text encoders, VAE and transformer.

    The weights depend on `settings.seed` alone; torch's global generator is left as it was found.
    """
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        pipeline = StableDiffusion3Pipeline(
            tokenizer=clip,
            tokenizer_2=clip,
            tokenizer_3=t5,
            text_encoder=build_clip(clip, settings),
            text_encoder_2=build_clip(clip, settings),
            text_encoder_3=build_t5(t5, settings),
            vae=build_vae(settings),
            transformer=build_transformer(settings),
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair encoding with merges for `WHOLE_WORDS` alone.

    Each chain of merges begins at two neighbours that no pseudo-word has, two consonants or a letter that pseudo-words
    lack: so every pseudo-word stays a row of letters, the last of which carries the mark of a word's end.
    """
    pieces = [START, END, *LETTERS, *(letter + WORD_END for letter in LETTERS)]
    merges: list[tuple[str, str]] = []
    for word in WHOLE_WORDS:
        merges += [merge for merge in merge_chain(word) if merge not in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *("".join(merge) for merge in merges)]))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def merge_chain(word: str) -> list[tuple[str, str]]:
    """Merges that make one token of `word`, from the first two neighbours that no pseudo-word has."""
    letters = [*word[:-1], word[-1] + WORD_END]
    alternating = [(a in CONSONANTS and b in VOWELS) or (a in VOWELS and b in CONSONANTS) for a, b in pairwise(word)]
    if all(alternating):
        raise ValueError(f"{word!r} is spelt like a pseudo-word, so it cannot be one token: choose another word")
    place = alternating.index(False)
    chain, piece = [], letters[place]
    for letter in letters[place + 1 :]:
        chain.append((piece, letter))
        piece += letter
    for letter in reversed(letters[:place]):
        chain.append((letter, piece))
        piece = letter + piece
    return chain


def build_t5_tokenizer() -> T5Tokenizer:
    """T5's unigrams, with the words of the prompts alone: a pseudo-word is one unknown token."""
    words = [f"▁{word}" for word in (*WHOLE_WORDS, *PREPOSITIONS)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -2.0) for word in words)]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def build_clip(tokenizer: CLIPTokenizer, settings: WordsSettings) -> CLIPTextModelWithProjection:
    """A random, frozen encoder of one layer.

    Stable Diffusion 3 takes the hidden states before the last layer: here they are a random vector of the token and
    one of its place. The last layer makes the pooled vector. A letter at a word's end has the vector of that letter
    and one of the end.
    """
    width = settings.clip_width
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width,
            projection_dim=width,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vocab = tokenizer.get_vocab()
    (embeddings,) = (module for module in encoder.modules() if isinstance(module, CLIPTextEmbeddings))
    with torch.no_grad():
        tokens = nn.init.normal_(embeddings.token_embedding.weight)
        word_end = POSITION_SCALE * torch.randn(width)
        for letter in LETTERS:
            tokens[vocab[letter + WORD_END]] = tokens[vocab[letter]] + word_end
        nn.init.normal_(embeddings.position_embedding.weight, std=POSITION_SCALE)
    return encoder.eval().requires_grad_(False)


def build_t5(tokenizer: T5Tokenizer, settings: WordsSettings) -> T5EncoderModel:
    """A random, frozen encoder of one layer."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=settings.text_width,
        d_kv=settings.text_width // 4,
        d_ff=settings.text_width,
        num_layers=1,
        num_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval().requires_grad_(False)


def build_vae(settings: WordsSettings) -> AutoencoderKL:
    """Stable Diffusion 3's kind of VAE, without attention; its latent statistics are set after training."""
    stages = len(settings.vae_channels)
    return AutoencoderKL(
        block_out_channels=settings.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        layers_per_block=1,
        norm_num_groups=min(16, settings.vae_channels[0] // 2),
        latent_channels=settings.latent_channels,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        sample_size=settings.width,
    )


def build_transformer(settings: WordsSettings) -> SD3Transformer2DModel:
    """The denoiser, starting as the zero function: the output layer and all modulations begin at zero."""
    width, side = settings.heads * settings.head_dim, max(settings.height, settings.width) // 8
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=settings.latent_channels,
        out_channels=settings.latent_channels,
        num_layers=settings.layers,
        attention_head_dim=settings.head_dim,
        num_attention_heads=settings.heads,
        caption_projection_dim=width,
        joint_attention_dim=settings.text_width,
        pooled_projection_dim=settings.text_width,
        pos_embed_max_size=side,
        qk_norm="rms_norm",
    )
    for name, parameter in transformer.named_parameters():
        if name.startswith(("proj_out.", "norm_out.linear.")) or "norm1.linear." in name or "norm1_context" in name:
            nn.init.zeros_(parameter)
    return transformer
