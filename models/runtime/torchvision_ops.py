# SPDX-License-Identifier: Apache-2.0
"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

PyPI's torchvision is a CUDA build. Its compiled part does not load beside a CPU torch, and then its Python part fails
at import, because it describes an operator that does not exist: `nms`. transformers imports torchvision wherever it is
installed, and vLLM needs it to be. Nothing here calls the operator; its declaration is enough.
"""

import importlib.util

_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_missing() -> None:
    """Declare the operators, where torchvision is installed and torch is a CPU build; elsewhere do nothing."""
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    if torch.version.cuda is not None:  # the compiled part loads, and a second declaration would end the process
        return
    for name, signature in _OPERATORS.items():
        try:
            torch.library.define(name, signature)
        except RuntimeError:  # declared already: a CPU build of torchvision, or the parent of a forked process
            continue
