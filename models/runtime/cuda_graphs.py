# SPDX-License-Identifier: Apache-2.0
"""A denoiser's calls without gradient as CUDA graphs: one launch in place of the hundreds of kernels of a forward pass.

A model that is small for its GPU waits for the processor, which calls its kernels one by one. A graph holds these calls
as they were made once and has the GPU make them again: the same kernels with the same arguments in the same order, so
the bits stay. What it holds are addresses. So inputs are copied to where they lay, outputs are copied away before the
next call overwrites them, and weights must stay where they are: new ones are copied into the old ones' place.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

Forward = Callable[..., Any]
Replay = Callable[[], object]

KEPT = 16
"""Graphs of one module, one for each kind of input; the one that was not used for longest goes first."""


class Recorder(Protocol):
    """Notes the GPU's work of calls."""

    def record(self, function: Callable[[], Any]) -> tuple[Replay, Any]:
        """What does the call's work again, and the call's output, which each replay rewrites."""

    def begin_anew(self) -> None:
        """All that was recorded is gone."""


@dataclass(frozen=True)
class Recorded:
    """One graph.

    Attributes:
        inputs: the tensors that it reads, apart from weights.
        replay: does its work.
        output: what it writes.
    """

    inputs: list[Tensor]
    replay: Replay
    output: Any


class CudaGraphs:
    """Has a module's forward recorded at its first call with inputs of a kind, and replayed at the next ones.

    The first call of a kind (shapes, strides and formats of the tensors, values of all else) computes twice, and both
    outputs must be equal to the bit.

    Args:
        module: whose forward is replaced, in place; what is compiled of it must be so by now.
        recorder: makes recordings; a `CudaRecorder`.
    """

    def __init__(self, module: nn.Module, recorder: Recorder):
        self._recorder = recorder
        self._weights: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._addresses: list[int] = []
        self._recorded: OrderedDict[Any, Recorded] = OrderedDict()
        module.forward = self.of_whole(module.forward)

    def __len__(self) -> int:
        return len(self._recorded)

    def of_whole(self, forward: Forward) -> Forward:
        """The forward that replays; a call with gradient, which a graph cannot pass on, goes to `forward` itself."""

        def whole(*arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return forward(*arguments, **named)
            leaves, structure = tree_flatten((arguments, named))
            kind = (structure, *map(_kind, leaves))
            if kind in self._recorded:
                self._recorded.move_to_end(kind)
                return self._replayed(self._recorded[kind], leaves)
            return self._first(forward, leaves, structure, kind)

        return whole

    def drop(self) -> None:
        """Forget all graphs, and with them the memory that they hold. Call it before weights move to another place."""
        self._recorded.clear()
        self._recorder.begin_anew()

    def _replayed(self, recorded: Recorded, leaves: Sequence[Any]) -> Any:
        self._check_weights()
        torch._foreach_copy_(recorded.inputs, _tensors(leaves))
        recorded.replay()
        return tree_map_only(Tensor, Tensor.clone, recorded.output)

    def _first(self, forward: Forward, leaves: Sequence[Any], structure: Any, kind: Any) -> Any:
        """The module's own output, after a recording was made and has computed the same."""
        if self._recorded:
            self._check_weights()
        self._addresses = self._addresses_now()
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments, named = tree_unflatten(fixed, structure)
        computed = forward(*arguments, **named)
        try:
            recorded = Recorded(_tensors(fixed), *self._recorder.record(lambda: forward(*arguments, **named)))
        except RuntimeError as error:
            raise RuntimeError(
                "rollout.cuda_graphs: this model's forward pass cannot be recorded, as it waits for the GPU or copies "
                f"from the CPU: set it to false ({error})"
            ) from error
        recorded.replay()
        if not _same_bits(computed, recorded.output):
            raise RuntimeError(
                "rollout.cuda_graphs: the replay of a CUDA graph is not what the model computes, so the rollout would "
                "sample another policy than the trainer's: set it to false for this model"
            )
        while len(self._recorded) >= KEPT:
            self._recorded.popitem(last=False)
        self._recorded[kind] = recorded
        return computed

    def _check_weights(self) -> None:
        if self._addresses != self._addresses_now():
            raise RuntimeError(
                "the model's weights lie elsewhere than when its CUDA graphs were made, which would compute with what "
                "is left in the old place: call drop() before they move"
            )

    def _addresses_now(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]


class CudaRecorder:
    """Records as a CUDA graph. All graphs of one recorder share their memory: they run one at a time.

    Raises:
        ValueError: the device is no GPU.
    """

    def __init__(self, device: torch.device | str):
        if torch.device(device).type != "cuda":
            raise ValueError(
                f"rollout.cuda_graphs is true, but the rollout's device is {device}: set it to false, or "
                "trainer.device to cuda"
            )
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def begin_anew(self) -> None:
        """See `Recorder`. A pool that no graph refers to any more takes no new ones."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Any]) -> tuple[Replay, Any]:
        """See `Recorder`.

        Raises:
            RuntimeError: an operation waits for the GPU or copies from the CPU.
        """
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            function()  # so that libraries have their handles and workspaces of this stream
        now.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads of the process ask of the driver meanwhile is no part of it.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = function()
        return graph.replay, output


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _kind(leaf: Any) -> Any:
    """What a graph is bound to of an input; a tensor's values are not."""
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _same_bits(one: Any, other: Any) -> bool:
    """Are two outputs equal, NaN to NaN?"""
    pairs = zip(_tensors(tree_flatten(one)[0]), _tensors(tree_flatten(other)[0]), strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)
