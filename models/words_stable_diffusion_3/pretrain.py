# SPDX-License-Identifier: Apache-2.0
"""Pre-training of the words model: first the VAE, then the transformer by flow matching, until it half knows how."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline

from models.words_stable_diffusion_3.build import T5_TOKENS, build_pipeline
from models.words_stable_diffusion_3.render import render_pictures
from models.words_stable_diffusion_3.settings import WordsSettings

Progress = Callable[[str, int, int, dict[str, float]], None]
"""progress(stage, step, steps, values): stage is "vae" or "transformer", step counts from 1."""
Measure = Callable[[np.ndarray, list[str]], float]
"""Mean reward of pictures, uint8 [pictures, height, width, 3], by their prompts."""
Text = tuple[torch.Tensor, torch.Tensor]
"""Prompt embeddings (prompts, tokens, width) and pooled ones (prompts, width)."""

REPORT_EVERY = 50
ENCODED_AT_ONCE = 512


def pretrain(
    prompts: list[str], settings: WordsSettings, device: str, progress: Progress, measure: Measure
) -> StableDiffusion3Pipeline:
    """Build the pipeline and train it from nothing; `save_pretrained` of the result is the base model.

    Args:
        prompts: what may be learnt from. All but the last `settings.watched` have a picture; when training ends is
            decided on those.
        device: "cpu" or "cuda", where it trains; the pipeline comes back on the CPU.
        measure: called with drawn pictures of the watched prompts.
    """
    drawn, watched = prompts[: -settings.watched], prompts[-settings.watched :]
    pipeline = build_pipeline(settings).to(device)
    pixels = torch.from_numpy(render_pictures(drawn, settings, os.cpu_count() or 1)).to(device)
    train_vae(pipeline.vae, pixels, settings, progress)
    latents = standardise(pipeline.vae, encode(pipeline.vae, pixels))
    del pixels
    text, watched_text = encode_text(pipeline, drawn), encode_text(pipeline, watched)

    def watch(transformer: SD3Transformer2DModel) -> float:
        pictures = draw(transformer, pipeline.vae, watched_text, settings)
        return measure(pictures, watched)

    train_transformer(pipeline.transformer, latents, text, settings, progress, watch)
    return pipeline.to("cpu")


def train_vae(vae: AutoencoderKL, pixels: torch.Tensor, settings: WordsSettings, progress: Progress) -> None:
    """Train `vae` on crops of `pixels`, uint8 [pictures, height, width, 3]; afterwards it is frozen."""
    device = pixels.device.type
    # On the CPU: its draws are the same for every device.
    generator = torch.Generator().manual_seed(settings.seed + 1)
    vae.to(memory_format=torch.channels_last).train()
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.vae_lr, betas=(0.9, 0.99), weight_decay=0, fused=True)
    for step in range(settings.vae_steps):
        rise, fall = (step + 1) / 100, (settings.vae_steps - step) / (0.4 * settings.vae_steps)
        optimizer.param_groups[0]["lr"] = settings.vae_lr * min(1.0, rise, fall)
        rows = torch.randint(len(pixels), (settings.vae_batch,), generator=generator).to(device)
        left = int(torch.randint((settings.width - settings.vae_crop) // 8 + 1, (), generator=generator)) * 8
        crops = normalised(pixels[rows, :, left : left + settings.vae_crop])
        noise_seed = int(torch.randint(2**62, (), generator=generator))
        with half_precision(device):
            loss = vae_loss(vae, crops, settings.vae_latent_noise, noise_seed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if _is_reported(step, settings.vae_steps):
            progress("vae", step + 1, settings.vae_steps, {"loss": loss.item()})
    vae.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def vae_loss(vae: AutoencoderKL, crops: torch.Tensor, latent_noise: float, seed: int) -> torch.Tensor:
    """Absolute and squared error (a scalar) of crops [B, 3, h, w] after encoding, noising and decoding.

    The weak pull of the latents towards zero only stops their scale from drifting.
    """
    latents = vae.encoder(crops).chunk(2, dim=1)[0]
    noise = torch.randn(latents.shape, device=crops.device, generator=_seeded(seed, crops.device.type))
    decoded = vae.decoder(latents + latent_noise * latents.detach().std() * noise)
    return F.l1_loss(decoded, crops) + F.mse_loss(decoded, crops) + 1e-4 * latents.square().mean()


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """The latents of uint8 pictures [B, height, width, 3], as the VAE gives them, float32 [B, channels, h, w]."""
    parts = []
    for part in pixels.split(ENCODED_AT_ONCE):
        with half_precision(pixels.device.type):
            parts.append(vae.encoder(normalised(part)).chunk(2, dim=1)[0].float())
    return torch.cat(parts)


def standardise(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """The latents [B, channels, h, w] with mean 0 and deviation 1; the VAE's config gets both as shift and scale."""
    mean, std = latents.mean().item(), latents.std().item()
    vae.register_to_config(scaling_factor=1 / std, shift_factor=mean)
    return (latents - mean) / std


@torch.no_grad()
def encode_text(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> Text:
    """What the pipeline's own encoders make of the prompts, on its device."""
    embeds, pooled = [], []
    for start in range(0, len(prompts), ENCODED_AT_ONCE):
        part = prompts[start : start + ENCODED_AT_ONCE]
        encoded = pipeline.encode_prompt(
            part, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_TOKENS
        )
        embeds.append(encoded[0])
        pooled.append(encoded[2])
    return torch.cat(embeds), torch.cat(pooled)


def train_transformer(
    transformer: SD3Transformer2DModel,
    latents: torch.Tensor,
    text: Text,
    settings: WordsSettings,
    progress: Progress,
    watch: Callable[[SD3Transformer2DModel], float],
) -> None:
    """Until a measurement of the averaged weights reaches `settings.target_reward`, then `settings.decay_steps` more.

    Over these the learning rates fall to 0. As long as the averaged weights then read less than `least_reward`, and
    steps are left, they do so once more from `more_rate` of theirs. Leaves the averaged weights.

    Args:
        latents: [pictures, channels, h, w], standardised.
        text: of each picture.
        watch: the reward of the watched prompts with a transformer's present weights.
    """
    if settings.compile:
        for block in transformer.transformer_blocks:
            block.compile(dynamic=False)
    transformer.train()
    training = TransformerTraining(transformer, text, settings)
    last, reward = settings.max_steps, 0.0

    def measure(loss: torch.Tensor) -> float:
        reward = measured(transformer, training.average, watch)
        progress("transformer", training.steps, last, {"loss": loss.item(), "reward": reward})
        return reward

    while training.steps < last and reward < settings.target_reward:
        loss = training.step(latents, min(1.0, (training.steps + 1) / settings.warmup_steps))
        every = settings.measure_every * (1 if reward >= settings.target_reward / 2 else 4)
        if training.steps % every == 0 or training.steps == last:
            reward = measure(loss)
    falling, peak = settings.decay_steps, 1.0
    while falling:
        last = training.steps + falling
        for left in range(falling, 0, -1):
            loss = training.step(latents, peak * left / falling)
        reward = measure(loss)
        is_enough = reward >= settings.least_reward or training.steps >= settings.max_steps
        falling, peak = 0 if is_enough else settings.more_steps, settings.more_rate
    copy_weights(training.parameters, training.average)
    transformer.eval()


class TransformerTraining:
    """Weights, their average, optimisers and draws, from step to step.

    Flow matching: x_t = (1 - t) x_0 + t noise, target velocity noise - x_0, mean squared error.
    """

    def __init__(self, transformer: SD3Transformer2DModel, text: Text, settings: WordsSettings):
        self.steps = 0
        self.parameters = list(transformer.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self._transformer, self._text, self._settings = transformer, text, settings
        self._generator = torch.Generator().manual_seed(settings.seed + 2)
        self._optimizers = transformer_optimizers(transformer, settings)

    def step(self, latents: torch.Tensor, rate: float) -> torch.Tensor:
        """One optimiser step at `rate` times the peak learning rates; latents: [pictures, channels, h, w]; the loss."""
        device, batch = latents.device.type, self._settings.batch
        scale_learning_rates(self._optimizers, rate)
        rows = torch.randint(len(latents), (batch,), generator=self._generator).to(device)
        times = draw_times(batch, self._generator).to(device)
        noise_seed = int(torch.randint(2**62, (), generator=self._generator))
        noise = torch.randn((batch, *latents.shape[1:]), device=device, generator=_seeded(noise_seed, device))
        text = (self._text[0][rows], self._text[1][rows])
        loss = flow_loss(self._transformer, latents[rows], noise, times, text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update_average(self.average, self.parameters, self.steps, self._settings.ema_decay)
        self.steps += 1
        return loss.detach()


def flow_loss(
    transformer: SD3Transformer2DModel, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, text: Text
) -> torch.Tensor:
    """Mean squared error of the predicted velocity; clean and noise: [batch, channels, h, w], times: [batch]."""
    t = times[:, None, None, None]
    with half_precision(clean.device.type):
        velocity = predict(transformer, (1 - t) * clean + t * noise, times, text)
    return F.mse_loss(velocity.float(), noise - clean)


def predict(transformer: SD3Transformer2DModel, latents: torch.Tensor, times: torch.Tensor, text: Text) -> torch.Tensor:
    """The velocity at latents [batch, channels, h, w] and times [batch] in [0, 1]."""
    return transformer(
        hidden_states=latents,
        timestep=1000 * times,
        encoder_hidden_states=text[0],
        pooled_projections=text[1],
        return_dict=False,
    )[0]


def draw_times(batch: int, generator: torch.Generator) -> torch.Tensor:
    """Half of the batch uniform in [0, 1], half logit-normal(0, 1): [batch]."""
    uniform = torch.rand(batch // 2, generator=generator)
    return torch.cat([uniform, torch.randn(batch - batch // 2, generator=generator).sigmoid()])


def measured(
    transformer: SD3Transformer2DModel, average: list[torch.Tensor], watch: Callable[[SD3Transformer2DModel], float]
) -> float:
    """What `watch` says (a scalar) of the averaged weights; the transformer then has its own again."""
    parameters = list(transformer.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    copy_weights(parameters, average)
    # Eager: compiled blocks would be compiled again for a batch of another size without gradient.
    with torch.compiler.set_stance("force_eager"):
        reward = watch(transformer)
    copy_weights(parameters, own)
    return reward


@torch.no_grad()
def draw(transformer: SD3Transformer2DModel, vae: AutoencoderKL, text: Text, settings: WordsSettings) -> np.ndarray:
    """Pictures of the prompts by Euler's method from fixed noise, uint8 [prompts, height, width, 3]."""
    device, count = text[0].device.type, len(text[0])
    shape = (count, settings.latent_channels, settings.height // 8, settings.width // 8)
    latents = torch.randn(shape, generator=_seeded(settings.seed + 3, "cpu")).to(device)
    edges = torch.linspace(1, 0, settings.sampling_steps + 1, device=device)
    with half_precision(device):
        for now, then in pairwise(edges):
            velocity = predict(transformer, latents, now.expand(count), text)
            latents = latents + (then - now) * velocity.float()
        decoded = vae.decoder(latents / vae.config.scaling_factor + vae.config.shift_factor)
    pictures = (decoded.float() / 2 + 0.5).clamp(0, 1).mul(255).round().byte()
    return pictures.permute(0, 2, 3, 1).cpu().numpy()


def transformer_optimizers(transformer: SD3Transformer2DModel, settings: WordsSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, but for the modulations', and AdamW for the rest."""
    named = list(transformer.named_parameters())
    inner = {
        name: p for name, p in named if name.startswith("transformer_blocks.") and p.ndim == 2 and "norm1" not in name
    }
    rest = [p for name, p in named if name not in inner]
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0, fused=True)
    muon = torch.optim.Muon(
        list(inner.values()), lr=settings.matrix_lr, weight_decay=settings.weight_decay, adjust_lr_fn="original"
    )
    return [adamw, muon]


def scale_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak, which is remembered at the first call."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
            group["lr"] = factor * group["peak_lr"]


@torch.no_grad()
def update_average(average: list[torch.Tensor], parameters: list[torch.nn.Parameter], step: int, decay: float) -> None:
    """Exponential moving average of the weights, each of its own shape, with a shorter memory at the start."""
    torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - min(decay, (1 + step) / (10 + step)))


@torch.no_grad()
def copy_weights(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    """In place; each value has its parameter's shape."""
    torch._foreach_copy_([*parameters], values)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [pictures, height, width, 3] as float32 [pictures, 3, height, width] in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def half_precision(device: str) -> "torch.autocast | nullcontext[None]":
    """bf16 on a GPU; the CPU computes in float32."""
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()


def _seeded(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _is_reported(step: int, steps: int) -> bool:
    return (step + 1) % REPORT_EVERY == 0 or step + 1 == steps
