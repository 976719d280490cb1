# SPDX-License-Identifier: Apache-2.0
"""Only kernels that give the same bits every time."""

import os

CUBLAS_WORKSPACE = ":4096:8"
"""Buffers with which cuBLAS chooses the same algorithm every time; torch's own documentation names this value."""


def use_deterministic_algorithms() -> None:
    """Make this process repeat its results to the last bit, given the same inputs on the same hardware.

    Call it before CUDA is first used: cuBLAS reads its setting when it starts. An operation without a deterministic
    kernel raises RuntimeError from then on.
    """
    import torch  # here, so that Ray can send the function to processes that know no path to this module yet

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
