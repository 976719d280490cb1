# SPDX-License-Identifier: Apache-2.0
"""Every number of the words model in one place: words, pictures, sizes, and how long it is trained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WordsSettings:
    """Settings of the words model; the defaults are those for one GPU, about 250 million weights in the transformer.

    On a CPU the same settings give the same bytes on disk. On a GPU the draws are the same and sums are not: torch's
    fast kernels add in no fixed order.
    """

    seed: int = 0
    """Seeds the words, the weights, the pictures, the batches and the noise, each through a generator of its own."""

    # --- prompts
    n_test: int = 192
    """Held-out prompts, whose words are in no other prompt."""
    n_train: int = 3000
    """Prompts for RL, which the base model learns from as well."""
    n_pretrain: int = 57000
    """Prompts that the base model alone learns from, with one picture each."""
    watched: int = 512
    """Of the last ones, so many that it does not learn from either: the stop of its training is decided on them."""

    # --- pictures
    height: int = 64
    """Picture height in pixels; a multiple of 16 (the VAE makes it 8 times smaller, the patches twice again)."""
    width: int = 256
    """Picture width in pixels; a multiple of 16."""
    font_sizes: tuple[int, ...] = (34, 38, 42)
    """Font sizes in pixels of Pillow's built-in font; each picture draws one, and a wide word takes a smaller one."""

    # --- text side (random and frozen: it has to give each token a vector of its own, and each place another)
    clip_width: int = 128
    """Width of each of the two CLIP encoders; twice as much is the transformer's text width and that of T5."""

    # --- VAE
    vae_channels: tuple[int, ...] = (64, 128, 256, 256)
    """Channels of its stages; each but the last halves height and width."""
    latent_channels: int = 16
    """Channels of a latent."""
    vae_steps: int = 1500
    """Optimiser steps of the VAE."""
    vae_batch: int = 64
    """Crops in a VAE step."""
    vae_crop: int = 128
    """Width of a crop in pixels, a multiple of 8; it is as high as the picture."""
    vae_lr: float = 1e-3
    """Peak learning rate of the VAE (AdamW)."""
    vae_latent_noise: float = 0.1
    """Noise on the latents while the decoder learns, as a share of their own standard deviation."""

    # --- transformer
    layers: int = 12
    """Number of joint text-image blocks."""
    heads: int = 12
    """Attention heads in a block."""
    head_dim: int = 64
    """Channels of a head; heads * head_dim is the transformer's width."""
    batch: int = 384
    """Latents in a transformer step."""
    lr: float = 5e-4
    """Learning rate of AdamW: embeddings, biases, norms, modulations and the two ends of the network."""
    matrix_lr: float = 1e-2
    """Learning rate of Muon: the weight matrices inside the blocks."""
    weight_decay: float = 0.01
    """Decoupled weight decay of Muon; AdamW has none."""
    warmup_steps: int = 200
    """Steps over which both learning rates rise linearly from 0; then they stay until they fall."""
    ema_decay: float = 0.99
    """Decay a step of the averaged weights; the averaged weights are what is measured and saved."""
    compile: bool = True
    """Compile the transformer's blocks for training: half a minute for about half the time of a step."""

    # --- the end of the transformer's training
    target_reward: float = 0.15
    """Mean OCR reward of the watched prompts at which the learning rates begin to fall: what that wins comes on top."""
    measure_every: int = 10
    """Steps between two measurements from half the target on; before it, four times as many."""
    max_steps: int = 1500
    """They begin to fall here, whatever was reached."""
    decay_steps: int = 220
    """The last steps, over which both learning rates fall linearly to 0: these alone win .35 and more."""
    least_reward: float = 0.555
    """Mean OCR reward of the watched prompts below which it does not end: equal steps end .05 apart on a GPU."""
    more_steps: int = 60
    """Steps that then follow, again and again, over which both learning rates fall from a share of theirs to 0."""
    more_rate: float = 0.3
    """That share."""
    sampling_steps: int = 10
    """Steps of the sampler when the watched prompts are drawn."""

    @property
    def text_width(self) -> int:
        """Width of the prompt embeddings."""
        return 2 * self.clip_width


def smallest(seed: int = 0) -> WordsSettings:
    """Settings whose model has the same parts and a few hundred thousand weights, for seconds on a CPU; it learns no
    letter."""
    return WordsSettings(
        seed=seed,
        n_test=6,
        n_train=12,
        n_pretrain=40,
        watched=8,
        height=32,
        width=96,
        font_sizes=(14, 16),
        clip_width=16,
        vae_channels=(8, 8, 16, 16),
        latent_channels=4,
        vae_steps=4,
        vae_batch=8,
        vae_crop=32,
        layers=2,
        heads=2,
        head_dim=16,
        batch=8,
        warmup_steps=2,
        compile=False,
        measure_every=1,
        max_steps=5,
        decay_steps=2,
        more_steps=2,
        sampling_steps=2,
    )
