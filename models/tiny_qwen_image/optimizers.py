# SPDX-License-Identifier: Apache-2.0
"""What moves the transformer's weights: Muon for the matrices of its blocks, AdamW for the rest, one lr schedule."""

from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from models.tiny_qwen_image.settings import TinySettings

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (Jordan et al. 2024), after which singular values lie near 1 (0.7-1.2)."""


class BatchedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, which orthogonalises all matrices of one shape in a single batched product.

    A tiny transformer has dozens of small matrices; handling them one by one would cost as much as the model itself.
    With G the momentum and O the nearest orthogonal matrix to it: W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, cols)) O.
    The last factor gives an update the typical size of AdamW's, so both can share the order of their learning rates.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        shapes = sorted({tuple(m.shape) for m in matrices})
        groups = [{"params": [m for m in matrices if tuple(m.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            matrices = [m for m in group["params"] if m.grad is not None]
            if not matrices:
                continue
            grads = torch.stack([m.grad for m in matrices])
            state = self.state[matrices[0]]
            average = state.setdefault("momentum", torch.zeros_like(grads))
            average.lerp_(grads, 1 - group["momentum"])
            update = orthogonalise(grads.lerp(average, group["momentum"]))
            scale = -group["lr"] * 0.2 * max(update.shape[-2:]) ** 0.5
            for matrix, direction in zip(matrices, update, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=scale)


def orthogonalise(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Roughly the nearest (semi-)orthogonal matrix to each of `matrices`, [count, rows, columns]."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def transformer_optimizers(
    transformer: QwenImageTransformer2DModel, settings: TinySettings
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, biases, norms and the output layer; Muon for the matrices inside the blocks."""
    named = list(transformer.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and name.startswith("transformer_blocks.")]
    matrices = inner if settings.matrix_lr > 0 else []
    known = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in known]
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    return [adamw, BatchedMuon(matrices, settings.matrix_lr, settings.weight_decay)]


def scale_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak, which is remembered at the first call."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
            group["lr"] = factor * group["peak_lr"]


def trapezoid(step: int, steps: int, warmup_steps: int, decay_share: float) -> float:
    """Share of the peak learning rate at `step` (from 0): linear rise, plateau, linear fall towards 0."""
    rise = (step + 1) / max(1, warmup_steps)
    fall = (steps - step) / max(1.0, decay_share * steps)
    return min(1.0, rise, fall)
