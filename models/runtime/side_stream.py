# SPDX-License-Identifier: Apache-2.0
"""A GPU's work that need not wait for what was queued last."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Mark:
    """All that a GPU has been given so far, by the present stream; on a CPU, whose work is done, nothing."""

    def __init__(self, device: torch.device | str):
        on_gpu = torch.device(device).type == "cuda"
        self.event = torch.cuda.current_stream(device).record_event() if on_gpu else None


class SideStream:
    """Has a GPU work on one thing while it works on another one. On a CPU one comes after the other, as always."""

    def __init__(self, device: torch.device | str):
        self._stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """What is queued in the block waits for the mark and not for what the outer stream was given since.

        In the block, wait for the results, as `Tensor.cpu` does: the memory of what it reads is the outer stream's, and
        could be given away before it is read.
        """
        if self._stream is None or mark.event is None:
            yield
            return
        self._stream.wait_event(mark.event)
        with torch.cuda.stream(self._stream):
            yield
