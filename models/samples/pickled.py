# SPDX-License-Identifier: Apache-2.0
"""How dataclasses of tensors pass between processes: as they lie in memory.

torch writes a tensor into a buffer of its own and pickles that; 120 MB, a batch of 24 samples of Stable Diffusion 3.5,
then take 0.2 to 0.5 s on either side, in which a rollout worker samples nothing. Arrays are pickled apart from the rest
(PEP 574), so a process copies them once into shared memory, and another once out of it.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class TensorBytes(NamedTuple):
    """A contiguous tensor of the CPU.

    Attributes:
        dtype: in which it counts.
        shape: any.
        content: its bytes, uint8 [n].
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: np.ndarray


class PickledAsBytes:
    """A dataclass whose tensors, also those in mappings by name, are pickled as arrays.

    What comes out has memory of its own. A tensor that is not contiguous, or not on the CPU, is pickled as torch does
    it: its strides are part of how kernels round.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: _packed(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return _rebuilt, (type(self), values)


def _rebuilt(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{name: _unpacked(value) for name, value in values.items()})


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.is_contiguous():
        return TensorBytes(value.dtype, tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).numpy())
    return {name: _packed(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, TensorBytes):
        flat = torch.empty(value.content.size, dtype=torch.uint8)
        flat.numpy()[:] = value.content  # which is shared memory that nobody may write to
        return flat.view(value.dtype).view(value.shape)
    return {name: _unpacked(each) for name, each in value.items()} if isinstance(value, Mapping) else value
