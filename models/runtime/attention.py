# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a denoiser computes with, chosen for rollout and update alike."""

from typing import Any

import torch

from models.families.base import DiffusionModelBase

HALF = (torch.bfloat16, torch.float16)


def attention_kernel(adapter: type[DiffusionModelBase], device: torch.device | str, dtype: torch.dtype) -> str | None:
    """The name under which diffusers knows the family's kernel; None leaves the choice to torch.

    Args:
        dtype: the format that attention computes in. The kernels that a family may name exist for 2-byte formats.
    """
    return adapter.cuda_attention if torch.device(device).type == "cuda" and dtype in HALF else None


def choose_attention(
    adapter: type[DiffusionModelBase], module: Any, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Let the module's attention layers use `attention_kernel`; those of other modules go on as they were.

    Call it before the module's first forward, which may compile it.
    """
    from diffusers.models.attention_dispatch import attention_backend

    kernel = attention_kernel(adapter, device, dtype)
    if kernel is None:
        return
    with attention_backend("native"):  # the setter also changes the default of the process; leaving gives it back
        module.set_attention_backend(kernel)
