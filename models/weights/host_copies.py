# SPDX-License-Identifier: Apache-2.0
"""Weights that leave a GPU and come back, again and again; what is frozen makes the way to the host once.

Torch's move to the CPU takes new host memory each time, and on a virtual machine the first touch of a page costs more
than what is copied into it: 38 GiB took 42 s there and back. So the host's memory stays when the weights go back. Its
pages are locked, which lets a GPU read them at its bus's speed (19 GiB in .38 s on an H200); others the driver copies
piece by piece.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

ALIGNED = 256
"""Bytes at a multiple of which a tensor begins."""


class HostCopies:
    """The weights of modules in host memory, which they take from their first leave on for good.

    Args:
        modules: whose parameters and buffers travel; each keeps its identity and shape.
        trained: those parameters that may change between a return and the next leave, and may be left out of one. The
            others must not: of them the first copy is what comes back. Buffers may change.
        away: they are in host memory now.
    """

    def __init__(self, modules: Iterable[nn.Module], trained: Iterable[Tensor] = (), away: bool = False):
        self._modules = list(modules)
        self._trained = {id(parameter) for parameter in trained}
        self._kept = dict[int, Tensor]()
        self._left_out = dict[int, tuple[int, ...]]()  # -> strides on the device
        self._away = away

    @torch.no_grad()
    def leave(self, with_trained: bool = True) -> None:
        """To the host; nothing where they are there.

        Args:
            with_trained: those too. Else they take no host memory, and are NaN until new ones are loaded on the device.
        """
        if self._away:
            return
        held = list(self._held())
        if not with_trained:
            self._leave_out(tensor for tensor in held if id(tensor) in self._trained)
            held = [tensor for tensor in held if id(tensor) not in self._trained]
        new = {id(tensor): tensor for tensor in held if id(tensor) not in self._kept}
        self._take_memory(new)
        for tensor in held:
            kept = self._kept[id(tensor)]
            if id(tensor) not in new and not self._is_frozen(tensor):
                kept.copy_(tensor)
            tensor.data = kept
        self._away = True

    @torch.no_grad()
    def come_back(self, device: torch.device | str) -> None:
        """To `device`; nothing where they are not in host memory."""
        if not self._away:
            return
        for tensor in self._held():
            if (strides := self._left_out.pop(id(tensor), None)) is not None:
                empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
                tensor.data = empty.fill_(torch.nan)
                continue
            kept = self._kept[id(tensor)] = tensor.data
            tensor.data = torch.empty_like(kept, device=device).copy_(kept)
        self._away = False

    def _leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Their memory is free then, and their shapes are what they were."""
        for tensor in tensors:
            self._left_out[id(tensor)] = tensor.stride()
            tensor.data = torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape)

    def _take_memory(self, tensors: Mapping[int, Tensor]) -> None:
        """A first copy of each, one behind the other in one piece of memory, which is locked as a whole."""
        if not tensors:
            return
        memory = torch.empty(sum(_room(tensor) for tensor in tensors.values()), dtype=torch.uint8)
        begin = 0
        for name, tensor in tensors.items():
            part = memory[begin : begin + tensor.nbytes].view(tensor.dtype)
            # In the order of its dimensions in memory, too, as a convolution's weights in channels-last have theirs.
            strides = torch.empty_like(tensor, device="meta").stride()
            self._kept[name] = part.as_strided(tensor.shape, strides, part.storage_offset()).copy_(tensor)
            begin += _room(tensor)
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._lock(memory)

    def _lock(self, memory: Tensor) -> None:
        """Until this is gone: memory that is given back locked cannot be used again. Where the driver will not lock it
        copies are slower, and a warning says so."""
        failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if not failed:
            weakref.finalize(self, _unlock, memory).atexit = False
            return
        with suppress(RuntimeError):  # torch would tell of the error at its next kernel, whosever that is
            torch.zeros(1, device="cuda")
        log.warning(
            "%.1f GiB of host memory could not be locked (CUDA error %d): weights come back to the GPU several times "
            "as slowly",
            memory.nbytes / 2**30,
            failed,
        )

    def _is_frozen(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and id(tensor) not in self._trained

    def _held(self) -> Iterable[Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()


def _room(tensor: Tensor) -> int:
    """Bytes that a tensor takes, with what lies between it and the next."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
