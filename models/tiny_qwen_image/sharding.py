# SPDX-License-Identifier: Apache-2.0
"""Repeatable training on a few CPU cores: each core takes its share of the batch through forward and backward.

Layers this small keep a core busy for microseconds only, and torch's own threads spend as long waking up for each of
them. Splitting the batch needs one hand-over a step, loses little on a busy machine, and adds the shares in a fixed
order, so the sums come out the same every time.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.utils.deterministic

ShardLoss = Callable[[slice], torch.Tensor]
"""Mean loss over one share of the current batch, a scalar with a graph."""


class ShardedBackward:
    """Gradient of a batch's mean loss, computed by `threads` threads on as many shares of the batch."""

    def __init__(self, parameters: list[torch.nn.Parameter], threads: int) -> None:
        self.parameters = parameters
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def __call__(self, loss: ShardLoss, batch: int) -> float:
        """Sets `.grad` of every parameter that the loss reaches, and returns the batch's mean loss.

        `loss` must only read shared state: it runs in several threads at once.
        """
        edges = [batch * i // self.threads for i in range(self.threads + 1)]
        shares = [slice(a, b) for a, b in pairwise(edges) if b > a]
        weights = [(share.stop - share.start) / batch for share in shares]
        results = list(self.pool.map(lambda share: self._share(loss, share), shares))
        for parameter, *grads in zip(self.parameters, *(grads for _, grads in results), strict=True):
            parameter.grad = _weighted_sum(grads, weights)
        return sum(w * value for w, (value, _) in zip(weights, results, strict=True))

    def _share(self, loss: ShardLoss, share: slice) -> tuple[float, tuple[torch.Tensor | None, ...]]:
        value = loss(share)
        # autograd.grad instead of backward(): the threads must not add into the same .grad at the same time.
        return value.item(), torch.autograd.grad(value, self.parameters, allow_unused=True)

    def __enter__(self) -> "ShardedBackward":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


@contextmanager
def repeatable_torch() -> Iterator[None]:
    """Within the block torch uses deterministic kernels, one thread an operation; afterwards what it used before."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory finds bugs in kernels and costs time at every operation; nothing here reads such memory.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = fill


def _weighted_sum(grads: list[torch.Tensor | None], weights: list[float]) -> torch.Tensor | None:
    """Sum of weight * grad in the given order; None where the loss does not depend on the parameter."""
    terms = [w * g for w, g in zip(weights, grads, strict=True) if g is not None]
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
