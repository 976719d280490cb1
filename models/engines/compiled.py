"""torch.compile of a denoiser, block by block, and of an image decoder."""

from typing import Any

import torch
from torch import nn

from models.base import DiffusionModelBase

VARIANTS = 64
"""Most compilations of one block's code: they differ in shape, gradient, adapters on or off, kind of block."""


def compile_blocks(adapter: type[DiffusionModelBase], module: nn.Module) -> None:
    """Compile the forward of each repeated block, in place.

    Blocks of one kind share their code, so it compiles once for all of them. The forward is replaced and not the
    module: names stay, and FSDP's hooks stay outside of the graph.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * VARIANTS)
    for block in adapter.transformer_blocks(module):
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


def compile_decoder(vae: nn.Module) -> None:
    """Compile an image VAE's decoder, in place, with its channels last in memory as its convolutions want them.

    Others stay as they are: those of video walk through the frames with a cache, and cost little beside the denoiser.
    """
    from diffusers import AutoencoderKL

    if isinstance(vae, AutoencoderKL):
        decoder: Any = vae.decoder.to(memory_format=torch.channels_last)
        decoder.forward = torch.compile(decoder.forward, dynamic=False)
