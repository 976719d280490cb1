# SPDX-License-Identifier: Apache-2.0
"""Pre-training of the tiny base model: first the VAE, then the transformer by flow matching on its latents."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

from models.tiny_qwen_image.build import build_pipeline
from models.tiny_qwen_image.flat_conv import flat_convolutions
from models.tiny_qwen_image.optimizers import scale_learning_rates, transformer_optimizers, trapezoid
from models.tiny_qwen_image.render import render_pictures
from models.tiny_qwen_image.settings import TinySettings
from models.tiny_qwen_image.sharding import ShardedBackward, repeatable_torch

Progress = Callable[[str, int, int, dict[str, float]], None]
"""progress(stage, step, steps, values): stage is "vae" or "transformer", step counts from 1."""


def pretrain(
    train_prompts: list[str], corpus: list[str], settings: TinySettings, progress: Progress
) -> QwenImagePipeline:
    """Build the tiny pipeline and train it from nothing; `save_pretrained` of the result is the base model.

    Only `train_prompts` are ever rendered. `corpus` holds all prompts that the tokenizer has to know, the held-out
    ones included: they reach the tokenizer as text and nothing else.
    """
    pipeline = build_pipeline(corpus, settings)
    with repeatable_torch():
        pixels, owners = render_pictures(train_prompts, settings)
        latents = train_vae(pipeline.vae, pixels, settings, progress)
        embeddings, mask = pipeline.encode_prompt(train_prompts)
        train_transformer(pipeline.transformer, latents, owners, embeddings, mask, settings, progress)
    return pipeline


def train_vae(
    vae: AutoencoderKLQwenImage, pixels: torch.Tensor, settings: TinySettings, progress: Progress
) -> torch.Tensor:
    """Train `vae` on crops of `pixels`, [pictures, 3, height, width] in [-1, 1], and write its latent statistics.

    Returns the latents of all pictures with mean 0 and standard deviation 1 a channel: [pictures, channels, height/2,
    width/2]. Afterwards the VAE is frozen.
    """
    generator = torch.Generator().manual_seed(settings.seed + 1)
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.vae_lr, betas=(0.9, 0.99), weight_decay=0, fused=True)
    with flat_convolutions(vae), ShardedBackward(parameters, settings.threads) as backward:
        for step in range(settings.vae_steps):
            scale_learning_rates([optimizer], trapezoid(step, settings.vae_steps, 30, 1.0))
            crops = draw_crops(pixels, settings, generator)
            noise = settings.vae_latent_noise * torch.randn(latent_size(crops, settings), generator=generator)

            def loss_of(share: slice, x: torch.Tensor = crops, n: torch.Tensor = noise) -> torch.Tensor:
                return vae_loss(vae, x[share], n[share])

            loss = backward(loss_of, len(crops))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            report(progress, "vae", step, settings.vae_steps, settings, {"loss": loss})
        vae.eval().requires_grad_(False)
        latents = torch.cat([encode(vae, part) for part in pixels.split(200)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def train_transformer(
    transformer: QwenImageTransformer2DModel,
    latents: torch.Tensor,
    owners: torch.Tensor,
    embeddings: torch.Tensor,
    mask: torch.Tensor | None,
    settings: TinySettings,
    progress: Progress,
) -> None:
    """Flow matching: x_t = (1 - t) x_0 + t noise, target velocity noise - x_0, mean squared error.

    latents: [pictures, channels, h, w], standardised. owners: [pictures], the row of `embeddings` each belongs to.
    embeddings: [prompts, tokens, text_dim]. mask: [prompts, tokens], or None where all prompts are equally long.
    At the end `transformer` holds the averaged weights.
    """
    generator = torch.Generator().manual_seed(settings.seed + 2)
    pictures = pack_latents(latents)
    grid = (1, latents.shape[2] // 2, latents.shape[3] // 2)
    parameters = list(transformer.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizers = transformer_optimizers(transformer, settings)
    batches = draw_batches(len(pictures), settings.batch, generator)
    transformer.train()
    with ShardedBackward(parameters, settings.threads) as backward:
        for step in range(settings.steps):
            rate = trapezoid(step, settings.steps, settings.warmup_steps, settings.decay_share)
            scale_learning_rates(optimizers, rate)
            rows = next(batches)
            clean, texts = pictures[rows], owners[rows]
            noise = torch.randn(clean.shape, generator=generator)
            times = draw_times(settings, generator)

            batch = (clean, noise, times, texts)

            def loss_of(share: slice, batch: tuple[torch.Tensor, ...] = batch) -> torch.Tensor:
                clean, noise, times, owners = (tensor[share] for tensor in batch)
                part_mask = None if mask is None else mask[owners]
                return flow_loss(transformer, clean, noise, times, embeddings[owners], part_mask, grid)

            loss = backward(loss_of, len(rows))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in optimizers:
                optimizer.step()
            update_average(average, parameters, step, settings.ema_decay)
            report(progress, "transformer", step, settings.steps, settings, {"loss": loss, "lr_share": rate})
    for parameter, mean in zip(parameters, average, strict=True):
        parameter.data.copy_(mean)
    transformer.eval()


def flow_loss(
    transformer: QwenImageTransformer2DModel,
    clean: torch.Tensor,
    noise: torch.Tensor,
    times: torch.Tensor,
    embeddings: torch.Tensor,
    mask: torch.Tensor | None,
    grid: tuple[int, int, int],
) -> torch.Tensor:
    """Mean squared error of the predicted velocity, scalar; clean and noise [B, tokens, 4 * channels], times [B]."""
    t = times[:, None, None]
    velocity = transformer(
        hidden_states=(1 - t) * clean + t * noise,
        timestep=times,
        encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=mask,
        img_shapes=[[grid]] * len(clean),
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, noise - clean)


def vae_loss(vae: AutoencoderKLQwenImage, crops: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Squared plus a little absolute error of the crops [B, 3, height, width] after encoding, noising and decoding.

    The weak pull of the latents towards zero only stops their scale from drifting.
    """
    latents = encode(vae, crops)
    decoded = decode(vae, latents + noise * latents.detach().std())
    return F.mse_loss(decoded, crops) + 0.2 * F.l1_loss(decoded, crops) + 1e-4 * latents.square().mean()


def encode(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> torch.Tensor:
    """Mean latents [B, channels, h, w] of pixels [B, 3, height, width].

    Goes past `vae.encode`, which keeps a cache for video on the object and so cannot run in two threads.
    """
    moments = vae.quant_conv(vae.encoder(pixels[:, :, None]))
    return moments.chunk(2, dim=1)[0][:, :, 0]


def decode(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
    """Pixels [B, 3, height, width] of latents [B, channels, h, w], not clamped; see `encode`."""
    return vae.decoder(vae.post_quant_conv(latents[:, :, None]))[:, :, 0]


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """[B, channels, h, w] -> [B, h/2 * w/2, 4 * channels], the pipeline's own order of 2x2 patches."""
    return QwenImagePipeline._pack_latents(latents, *latents.shape).contiguous()


def draw_crops(pixels: torch.Tensor, settings: TinySettings, generator: torch.Generator) -> torch.Tensor:
    """A batch of square crops, all cut at one place: [vae_batch, 3, vae_crop, vae_crop]."""
    rows = torch.randint(len(pixels), (settings.vae_batch,), generator=generator)
    size = settings.vae_crop
    # Even offsets keep the crops on the grid of the latents.
    top = 2 * int(torch.randint((settings.height - size) // 2 + 1, (1,), generator=generator))
    left = 2 * int(torch.randint((settings.width - size) // 2 + 1, (1,), generator=generator))
    return pixels[rows, :, top : top + size, left : left + size]


def latent_size(crops: torch.Tensor, settings: TinySettings) -> tuple[int, ...]:
    """Shape [B, channels, h, w] of the latents of `crops` [B, 3, height, width]."""
    return len(crops), settings.latent_channels, crops.shape[2] // 2, crops.shape[3] // 2


def draw_batches(pictures: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Endless batches [batch] of row numbers, each picture once before any comes again."""
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(pictures, generator=generator)])
        yield left[:batch]
        left = left[batch:]


def draw_times(settings: TinySettings, generator: torch.Generator) -> torch.Tensor:
    """Noise levels t in (0, 1) of a batch, [batch]: some uniform, the others logit-normal.

    Each kind is drawn one from every quantile of its distribution, so that no batch is all noise or all picture, which
    makes the gradient quieter at no cost.
    """
    uniform = round(settings.time_uniform_share * settings.batch)
    flat = stratified(uniform, generator)
    normal = torch.special.ndtri(stratified(settings.batch - uniform, generator).clamp(1e-4, 1 - 1e-4))
    times = torch.cat([flat, torch.sigmoid(settings.time_mean + settings.time_std * normal)])
    return times[torch.randperm(settings.batch, generator=generator)]


def stratified(count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` numbers [count] of at least 0 and below 1, one from each of as many equal intervals, in rising order."""
    return (torch.arange(count) + torch.rand(count, generator=generator)) / max(1, count)


@torch.no_grad()
def update_average(average: list[torch.Tensor], parameters: list[torch.nn.Parameter], step: int, decay: float) -> None:
    """Exponential moving average of the weights, tensor by tensor of one shape, with a shorter memory at the start."""
    weight = 1 - min(decay, (1 + step) / (10 + step))
    for mean, parameter in zip(average, parameters, strict=True):
        mean.lerp_(parameter, weight)


def report(
    progress: Progress, stage: str, step: int, steps: int, settings: TinySettings, values: dict[str, float]
) -> None:
    """Call `progress` every `report_every` steps and at the last one."""
    done = step + 1
    if done % settings.report_every == 0 or done == steps:
        progress(stage, done, steps, values)
