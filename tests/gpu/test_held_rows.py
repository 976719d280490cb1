# SPDX-License-Identifier: Apache-2.0
"""Inductor's kernels hold the rows of a denoiser.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.runtime.compiled import SAME_EVERYWHERE
from models.runtime.float8 import rounded
from models.runtime.held_rows import HOLD_ROWS, hold_marked_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

HELD, LOOPED = "@triton_heuristics.persistent_reduction", "@triton_heuristics.reduction"


def normed(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rounded(functional.layer_norm(rows, rows.shape[-1:]))


def activated(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rounded(functional.gelu(rows, approximate="tanh"))


def gated(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rounded(functional.gelu(rows, approximate="tanh") * rows.flip(0))


def code_of(function: Callable[[Tensor], tuple[Tensor, Tensor]], rows: Tensor, options: dict[str, Any]) -> str:
    """The compiled kernels, once their result is near that of fp64."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    (values, scale), code = run_and_get_code(torch.compile(function, dynamic=False, options=options), rows)
    wanted = function(rows.double())
    # Half a step of the format is 2^-4 of a number.
    torch.testing.assert_close(
        values.double() * scale, wanted[0].double() * wanted[1].double(), rtol=2**-3, atol=0.02, equal_nan=False
    )
    return "\n".join(code)


@pytest.mark.parametrize(
    ("function", "width"), [(normed, 1536), (normed, 3072), (gated, 3072), (activated, 6144), (activated, 12_288)]
)
def test_marked_rows_are_held_and_others_are_as_inductor_chooses(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], width: int
) -> None:
    hold_marked_rows()
    rows = torch.randn(256, width, device="cuda", dtype=torch.bfloat16)
    held = code_of(function, rows, SAME_EVERYWHERE | HOLD_ROWS)
    assert HELD in held
    assert LOOPED not in held
    assert LOOPED in code_of(function, rows, SAME_EVERYWHERE)


def test_long_rows_of_several_tensors_are_looped_over() -> None:
    hold_marked_rows()
    rows = torch.randn(256, 6144, device="cuda", dtype=torch.bfloat16)
    other = torch.randn(256, 6144, device="cuda", dtype=torch.bfloat16)
    assert LOOPED in code_of(lambda given: gated(given * other.to(given.dtype)), rows, SAME_EVERYWHERE | HOLD_ROWS)
