# SPDX-License-Identifier: Apache-2.0
"""Frozen matrices in 8 bits: their products with the activations run on the GPU's float8 units."""

from typing import Any

import torch
from torch import Tensor, nn

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
ALIGNMENT = 16
"""Rows and columns of a matrix must divide into so many for the product."""

VECTOR_LAYERS = ("norm", "mod", "adaln")
"""Parts of the names of layers that are given one vector a sample (modulation): small products, and what they say is
said to every token."""


class Float8Linear(nn.Module):
    """A frozen linear layer whose matrix is in float8, each of its rows with a scale.

    A row of the activations is divided by its largest magnitude and rounded as well; the product is added up in fp32.

    Args:
        linear: the layer that this one stands for, on the device that is to round it.
        gradient: compute the gradient of the activations with float8 products too, and not with the same matrix in the
            activations' format.

    Attributes:
        weight: [N, K], float8, divided by `scale`.
        scale: [N, 1], fp32.
        bias: [N] or None.
    """

    def __init__(self, linear: nn.Linear, gradient: bool):
        super().__init__()
        weight, scale = rounded(linear.weight.data)
        self.weight, self.scale = nn.Parameter(weight, False), nn.Parameter(scale, False)
        self.bias = linear.bias
        self.gradient = gradient

    def forward(self, tensor: Tensor) -> Tensor:
        """[..., K] to [..., N], in the format of what is given."""
        return product(tensor, self.weight, self.scale, self.bias, self.gradient)


def store_in_float8(module: nn.Module, device: torch.device | str, gradient: bool) -> None:
    """Replace the frozen linear layers of a module that work on tokens, in place; names stay.

    Left as they are: layers whose matrix is trained, does not divide into `ALIGNMENT`, or works on vectors
    (`VECTOR_LAYERS`).

    Args:
        module: whose LoRA layers, if it has any, are there already. A repeated block, as a rule.
        device: that rounds the matrices; they go back to where they were.
        gradient: as `Float8Linear` takes it.
    """
    for name, layer in layers_for_float8(module):
        place = layer.weight.device
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, Float8Linear(layer.to(device), gradient).to(place))


def scales_in(module: nn.Module) -> set[nn.Parameter]:
    """The scales [N, 1] of the module's matrices in float8. The product takes them in fp32 alone: nobody may cast
    them with the other weights."""
    return {layer.scale for layer in module.modules() if isinstance(layer, Float8Linear)}


def layers_for_float8(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Name and layer of those that `store_in_float8` replaces, which keeps a number of 8 bits for each of a matrix and
    an fp32 scale for each of its rows."""
    return [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and _suits(name, layer)
    ]


def _suits(name: str, layer: nn.Linear) -> bool:
    on_vectors = any(part in name.lower() for part in VECTOR_LAYERS)
    divides = not any(size % ALIGNMENT for size in layer.weight.shape)
    return divides and not on_vectors and not layer.weight.requires_grad


def product(tensor: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, gradient: bool) -> Tensor:
    """tensor @ (scale weight)^T + bias, [..., N] in the tensor's format, with a gradient for the tensor alone.

    Args:
        tensor: [..., K].
        weight: [N, K], float8.
        scale: [N, 1], fp32.
        bias: [N] or None.
        gradient: as `Float8Linear` takes it.
    """
    return _Product.apply(tensor, weight, scale, bias, gradient)


def rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [..., K], scale [..., 1] fp32) whose product is the tensor: each row's largest magnitude is the format's
    largest number. A row that is not finite is NaN."""
    values = tensor.float()
    largest = values.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    # What is a rounding error beyond the largest number is rounded to it: no clamp, which costs as much as the rest.
    return (values * (LARGEST / largest)).to(FORMAT), largest / LARGEST


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, gradient: bool) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.gradient = gradient
        values, rows = rounded(tensor.flatten(0, -2))
        output = _scaled(values, rows, weight, scale, bias, tensor.dtype)
        return output.view(*tensor.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        # The columns' scales go to the gradient: the matrix is then in float8 as it is.
        scaled = given.flatten(0, -2).float() * scale.T
        if ctx.gradient:
            values, rows = rounded(scaled)
            ones = torch.ones_like(scale[:1]).expand(weight.shape[1], 1).contiguous()
            output = _scaled(values, rows, weight.T.contiguous(), ones, None, given.dtype)
        else:
            output = scaled.to(given.dtype) @ weight.to(given.dtype)
        return output.view(*given.shape[:-1], -1), None, None, None, None


def _scaled(
    values: Tensor, rows: Tensor, weight: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(rows values) @ (columns weight)^T + bias of float8 [M, K] and [N, K] with scales [M, 1] and [N, 1], [M, N]."""
    if values.is_cuda:
        # Of scales for each row and column torch gives out bf16 alone.
        added = bias.to(torch.bfloat16) if bias is not None else None
        return torch._scaled_mm(
            values, weight.T, scale_a=rows, scale_b=columns.T, bias=added, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    output = (values.float() @ weight.float().T) * rows * columns.T
    return (output if bias is None else output + bias.float()).to(dtype)
