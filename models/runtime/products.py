# SPDX-License-Identifier: Apache-2.0
"""How a denoiser's matrices are multiplied, chosen for rollout and update alike."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from models.families.base import DiffusionModelBase
from models.runtime.float8 import store_in_float8
from models.runtime.projections import fuse_projections

if TYPE_CHECKING:
    from models.config.view import DiffusionModelConfig


def choose_products(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: "DiffusionModelConfig",
    device: torch.device | str,
) -> None:
    """Apply `model.frozen_dtype` and `model.fuse_projections`, in place, to a module that has its LoRA layers and its
    weights, and is not compiled yet; without either it stays as it is.

    Args:
        device: that rounds the weights.
    """
    model = model_config.model
    if model.frozen_dtype is not None:
        for block in adapter.transformer_blocks(module):
            store_in_float8(block, device, gradient=model.frozen_dtype == "float8")
    if model.fuse_projections:
        fuse_projections(adapter, module)
