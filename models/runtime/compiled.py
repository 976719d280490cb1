# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a denoiser, block by block, and of an image decoder."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from models.families.base import DiffusionModelBase

VARIANTS = 512
"""Most compilations of one block's code: they differ in shape, gradient, adapters on or off, kind of block. Z-Image's
blocks of image, text and both share theirs, and 512 tokens are 16 lengths of text: two forms each for each number of
rows. Beyond this torch would end the run."""

SAME_EVERYWHERE: dict[str, Any] = {"deterministic": True}
"""Inductor's options. It may not choose by a stopwatch how a kernel adds up its rows, or whether a matrix is padded:
rollout and trainer compile in a process each, and would choose differently; of equal latents, a run made again would
read other pictures. (Set in torch's configuration instead, it is gone after the first compilation.)"""

COMPILED_DECODER = "AutoencoderKL"
"""Class of diffusers whose decoder is compiled: one that decodes a picture at once. What it keeps of a GPU's memory is
counted by this, too."""

Forward = Callable[..., Any]


def compile_blocks(adapter: type[DiffusionModelBase], module: nn.Module) -> None:
    """Compile the forward of each repeated block, in place, so that it computes the same with and without gradient.

    Blocks of one kind share their code, so it compiles once for all of them. The forward is replaced and not the
    module: names stay, and FSDP's hooks stay outside of the graph.

    A graph without gradient would be compiled apart from the update's, fuse other operations and so round bf16 in
    other places: the ratio of a sample's first update would not be 1. `OneGraph` has the update's graph serve both.
    """
    from models.runtime.held_rows import HOLD_ROWS, hold_marked_rows

    hold_marked_rows()
    options, graph = SAME_EVERYWHERE | HOLD_ROWS, OneGraph()
    for block in adapter.transformer_blocks(module):
        _name_weights_as_sharded(block)
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, options=options)
        block.forward = graph.of_block(_for_any_text(adapter, block.forward, compiled))
    module.forward = graph.of_whole(module)


def _name_weights_as_sharded(block: nn.Module) -> None:
    """Have torch's compiler name a block's weights as it names those that FSDP holds.

    What it found out of a graph with gradient is kept on the disk under these names, once a backward pass is compiled.
    So the rollout, which computes none, finds the trainer's, and need not trace each graph anew in every process. These
    are attributes that `fully_shard` sets; without them, as in another version of torch, it is traced anew.
    """
    for part in block.modules():
        known: Any = part
        known._is_fsdp_managed_module = known._fsdp_use_orig_params = True


def _for_any_text(adapter: type[DiffusionModelBase], forward: Forward, compiled: Forward) -> Forward:
    """The compiled forward of a block, in which a text's length is a variable.

    Else each length that a prompt has would be compiled, in the rollout and in the trainer, until torch's limit ends
    the run. torch could find out by itself that a length varies, but each process only once it has met a second, and so
    rollout and trainer would compute by different code until then.
    """
    inputs = inspect.signature(forward)

    def call(*arguments: Any, **named: Any) -> Any:
        for tensor, dimension in adapter.lengths_of_text(inputs.bind(*arguments, **named).arguments):
            if tensor.shape[dimension] > 1:  # a length of one is code of its own, as torch has it
                torch._dynamo.mark_dynamic(tensor, dimension)
        _raise_limits()
        return compiled(*arguments, **named)

    return call


def _raise_limits() -> None:
    """Allow this thread so many compilations of one block's code: each thread has torch's configuration of its own."""
    if not hasattr(_of_thread, "raised"):
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * VARIANTS)
        _of_thread.raised = True


_of_thread = threading.local()


class OneGraph:
    """Lets a module that is called without gradient run the code that was compiled for calls with gradient.

    Such a call computes in grad mode, and each block's output is cut off from what made it: the activations that a
    backward pass would need are freed block by block, and what the next block is given requires a gradient exactly
    where it does in the update, which is what the compiled code is chosen by.
    """

    def __init__(self) -> None:
        self._cuts = False

    def of_whole(self, module: nn.Module) -> Forward:
        """The module's forward; its output has no gradient where it was called without."""
        forward = module.forward

        def whole(*arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return forward(*arguments, **named)
            with self._cutting(module), torch.enable_grad():
                output = forward(*arguments, **named)
            return tree_map_only(Tensor, Tensor.detach, output)

        return whole

    @contextmanager
    def _cutting(self, module: Any) -> Iterator[None]:
        """Cut blocks off; and since there is no backward pass, nothing is kept to compute one of them again."""
        recomputes = getattr(module, "gradient_checkpointing", False)  # diffusers'
        self._cuts, module.gradient_checkpointing = True, False
        try:
            yield
        finally:
            self._cuts, module.gradient_checkpointing = False, recomputes

    def of_block(self, forward: Forward) -> Forward:
        """A block's forward."""

        def block(*arguments: Any, **named: Any) -> Any:
            output = forward(*arguments, **named)
            return tree_map_only(Tensor, _cut, output) if self._cuts else output

        return block


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def compile_decoder(vae: nn.Module) -> None:
    """Compile an image VAE's decoder, in place, with its channels last in memory as its convolutions want them.

    Others stay as they are: those of video walk through the frames with a cache, and cost little beside the denoiser.
    """
    import diffusers

    if isinstance(vae, getattr(diffusers, COMPILED_DECODER)):
        decoder: Any = vae.decoder.to(memory_format=torch.channels_last)
        decoder.forward = torch.compile(decoder.forward, dynamic=False, options=SAME_EVERYWHERE)
