# SPDX-License-Identifier: Apache-2.0
"""Cheaper convolutions while the VAE learns.

Qwen-Image's VAE is a causal video VAE. Of a single frame, each 3-D kernel meets data only with its last slice in
time: the slices before it lie on zero padding. Leaving them out makes a 2-D convolution with the same result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d


@contextmanager
def flat_convolutions(vae: AutoencoderKLQwenImage) -> Iterator[None]:
    """Within the block, the causal convolutions of `vae` treat a single frame as a plain picture.

    Only the instances inside `vae` are changed, and they are put back at the end, also after an error.
    """
    convolutions = [m for m in vae.modules() if isinstance(m, QwenImageCausalConv3d) and m.stride == (1, 1, 1)]
    for convolution in convolutions:
        convolution.forward = MethodType(_flat_forward, convolution)
    try:
        yield
    finally:
        for convolution in convolutions:
            del convolution.forward  # uncovers the class's own method


def _flat_forward(self: QwenImageCausalConv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
    """x: [batch, channels, frames, height, width]; falls back to 3-D for several frames or a cached past."""
    if x.shape[2] != 1 or cache_x is not None:
        return QwenImageCausalConv3d.forward(self, x, cache_x)
    left, _, top, *_ = (int(side) for side in self._padding)
    picture = F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=(top, left))
    return picture[:, :, None]
