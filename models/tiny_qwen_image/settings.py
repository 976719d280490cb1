# SPDX-License-Identifier: Apache-2.0
"""Every number of the tiny base model in one place: sizes, pictures, and how long it is trained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinySettings:
    """Settings of the tiny Qwen-Image model; the defaults are the recommended ones.

    The same settings on the same machine give the same bytes on disk, so a data stage may cache the folder by them.
    """

    # --- randomness and the machine
    seed: int = 0
    """Seeds the weights, the pictures, the batches and the noise, each through a generator of its own."""
    threads: int = 2
    """CPU threads, each of which computes its share of every batch. Part of the settings because sums change in the
    last bit with the number of shares."""

    # --- pictures
    height: int = 24
    """Picture height in pixels; a multiple of 4 (the VAE halves it once, the transformer's 2x2 patches again)."""
    width: int = 48
    """Picture width in pixels; a multiple of 4."""
    font_sizes: tuple[int, ...] = (20, 21, 22)
    """Font sizes in pixels of Pillow's built-in font; each picture draws one of them at random."""
    pictures: int = 12000
    """How many pictures are rendered and encoded once, before the training starts; the batches draw from these."""

    # --- text side (random and frozen: it only has to give each token a vector of its own)
    vocab_size: int = 4096
    """Upper bound for the tokenizer's vocabulary; the trained one is far smaller."""
    text_dim: int = 64
    """Width of the text encoder's hidden states, and so of the prompt embeddings."""
    text_layers: int = 2
    """Number of text encoder layers."""

    # --- VAE
    vae_base_dim: int = 8
    """Channels of the VAE's first stage (the second has twice as many)."""
    latent_channels: int = 4
    """Channels of a latent; packing 2x2 of them makes four times as many for the transformer."""
    vae_steps: int = 500
    """Optimiser steps of the VAE."""
    vae_batch: int = 32
    """Crops in a VAE step."""
    vae_crop: int = 16
    """Side of the square crops in pixels; crops are cheaper than whole pictures and the VAE is convolutional."""
    vae_lr: float = 2e-3
    """Peak learning rate of the VAE (AdamW)."""
    vae_latent_noise: float = 0.05
    """Noise on the latents while the decoder learns, as a share of their own standard deviation: the decoder then
    forgives the small errors that a sampler leaves."""

    # --- transformer
    layers: int = 4
    """Number of joint text-image blocks."""
    heads: int = 4
    """Attention heads in a block."""
    head_dim: int = 16
    """Channels of a head; heads * head_dim is the transformer's width."""
    rope_axes: tuple[int, int, int] = (4, 6, 6)
    """Channels of a head that turn with frame, row and column; even numbers which sum to head_dim."""
    steps: int = 950
    """Optimiser steps of the transformer. They decide how good the base model is: it should draw about half of the
    digits of unseen numbers right, so that reinforcement learning has both a start and something to gain."""
    batch: int = 64
    """Latents in a transformer step."""
    lr: float = 2e-3
    """Peak learning rate of AdamW: embeddings, biases, norms and the two ends of the network."""
    matrix_lr: float = 5e-3
    """Peak learning rate of Muon: the weight matrices inside the blocks. 0 gives these to AdamW too, which then needs
    several times the steps."""
    warmup_steps: int = 100
    """Steps over which both learning rates rise linearly from 0."""
    decay_share: float = 0.6
    """Share of the steps, at the end, over which both learning rates fall linearly to 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay of both optimisers."""
    ema_decay: float = 0.99
    """Decay a step of the averaged weights; the averaged weights are what is saved."""
    time_mean: float = 0.0
    """Mean of the logit of t in training (t = 0 is the picture, t = 1 is noise); above 0 favours the noisy side."""
    time_std: float = 1.0
    """Standard deviation of the logit of t."""
    time_uniform_share: float = 0.5
    """Share of a batch that draws t uniformly instead, so that no noise level is left untrained."""

    # --- reporting
    report_every: int = 20
    """Steps between two calls of the progress function."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one picture's latent."""
        return self.latent_channels, self.height // 2, self.width // 2
