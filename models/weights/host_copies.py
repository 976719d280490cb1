# SPDX-License-Identifier: Apache-2.0
"""Weights that leave a GPU and come back, again and again; what is frozen makes the way to the host once.

Torch's move to the CPU takes new host memory each time, and on a virtual machine the first touch of a page costs more
than what is copied into it: 38 GiB took 42 s there and back. So the host's tensors stay when the weights go back. Their
pages are locked, which lets the GPU read them at its bus's speed; from others the driver copies piece by piece.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

LOCKED_FROM = 2**20
"""Bytes of a tensor whose pages are locked. Smaller ones may share a page, which is locked but once."""


class HostCopies:
    """The weights of modules in host memory, which they take from their first leave on for good.

    Args:
        modules: whose parameters and buffers travel; each keeps its identity and shape.
        trained: those parameters that may change between a return and the next leave. The others must not: of them the
            first copy is what comes back. Buffers may change.
        away: they are in host memory now.
    """

    def __init__(self, modules: Iterable[nn.Module], trained: Iterable[Tensor] = (), away: bool = False):
        self._modules = list(modules)
        self._trained = {id(parameter) for parameter in trained}
        self._kept = dict[int, Tensor]()
        self._away = away
        self._locks = True

    @torch.no_grad()
    def leave(self) -> None:
        """To the host; nothing where they are there."""
        if self._away:
            return
        for tensor in self._held():
            kept = self._kept.get(id(tensor))
            if kept is None:
                self._kept[id(tensor)] = kept = torch.empty_like(tensor, device="cpu").copy_(tensor)
                if tensor.is_cuda and kept.nbytes >= LOCKED_FROM:
                    self._lock_pages(kept)
            elif not self._is_frozen(tensor):
                kept.copy_(tensor)
            tensor.data = kept
        self._away = True

    @torch.no_grad()
    def come_back(self, device: torch.device | str) -> None:
        """To `device`; nothing where they are not in host memory."""
        if not self._away:
            return
        for tensor in self._held():
            kept = self._kept[id(tensor)] = tensor.data
            tensor.data = torch.empty_like(kept, device=device).copy_(kept)
        self._away = False

    def _lock_pages(self, kept: Tensor) -> None:
        """For good; where the driver will not, the copies are slower and a warning says so once."""
        if not self._locks:
            return
        failed = int(torch.cuda.cudart().cudaHostRegister(kept.data_ptr(), kept.nbytes, 0))
        if failed:
            self._locks = False
            log.warning(
                "host memory could not be locked (CUDA error %d): weights come back to the GPU several times as slowly",
                failed,
            )

    def _is_frozen(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and id(tensor) not in self._trained

    def _held(self) -> Iterable[Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()
