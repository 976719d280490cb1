# SPDX-License-Identifier: Apache-2.0
"""What one velocity of a denoiser costs: the real module is run on the meta device, where tensors have no data.

So the numbers follow the code of every family, its guidance and its LoRA, and no weights are needed. They are exact
but for attention, which stands for a fused kernel: it keeps queries, keys, values, output and one number a row, and
its score matrix never exists. Nothing else is fused, as without torch.compile.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from models.families.base import TEXT, DiffusionModelBase, DiffusionModelConfig
from models.families.latents import component_config, to_uint8
from models.runtime.float8 import layers_for_float8
from models.weights.trainable import kept_in_fp32, meta_module, trainable

if TYPE_CHECKING:
    from models.samples.trajectories import PromptTable


@dataclass(frozen=True)
class PassCost:
    """The velocity of some samples, guidance included.

    Attributes:
        samples: how many.
        parameters: of the denoiser, without LoRA.
        frozen: of them, those that are not trained.
        trained: parameters that are trained, LoRA's or all.
        blocks: parameters of the largest repeated block, LoRA's included and float8's left out, and of all of them.
        trained_blocks: trained parameters of the block with the most of them, and of all blocks.
        frozen_blocks: parameters of the largest block and of all, as a reference or teacher has them: LoRA's left out
            and float8's included.
        sampling_flops: operations of a forward without gradient.
        training_flops: operations of forward and backward, what is computed again in the backward left out.
        recomputed_flops: operations that gradient checkpointing adds.
        sampling_bytes: most memory that a forward without gradient holds at a time, weights left out.
        saved_bytes: what a forward leaves behind for its backward.
        training_bytes: most memory that forward and backward hold at a time; weights and their gradients left out.
        float8: of `frozen`, parameters that `model.frozen_dtype` keeps in float8; and rows of their matrices, each of
            which has a scale.
    """

    samples: int
    parameters: int
    frozen: int
    trained: int
    blocks: tuple[int, int]
    trained_blocks: tuple[int, int]
    frozen_blocks: tuple[int, int]
    sampling_flops: float
    training_flops: float
    recomputed_flops: float
    sampling_bytes: int
    saved_bytes: int
    training_bytes: int
    float8: tuple[int, int] = (0, 0)


def pass_cost(
    model_config: DiffusionModelConfig,
    prompts: "PromptTable",
    samples: int = 1,
    checkpointing: bool = False,
    constant_half: bool = False,
) -> PassCost:
    """Run the model on the meta device.

    Args:
        model_config: the folder's config files are read; its dtype is the format of the weights and activations.
        prompts: one prompt, of the length that is asked about, and the negative prompt where there is guidance.
        samples: how many are computed together; the time that this takes does not depend on it.
        checkpointing: activations are computed again in the backward.
        constant_half: the update computes guidance's half without the prompt without gradient.
    """
    adapter = DiffusionModelBase.get_class(model_config)
    module = meta_transformer(adapter, model_config)
    repeated = adapter.transformer_blocks(module)
    float8 = [_in_float8(block, model_config) for block in repeated]
    whole = [sum(p.numel() for p in block.parameters()) for block in repeated]
    blocks = [size - rounded for size, (rounded, _) in zip(whole, float8, strict=True)]
    learning = [sum(p.numel() for p in trainable(block).values()) for block in repeated]
    lora = model_config.trains_lora
    frozen = [size - trained for size, trained in zip(whole, learning, strict=True)] if lora else whole
    velocity = _velocity(adapter, module, model_config, prompts, samples, constant_half)
    attention = _FusedAttention()
    with torch.no_grad():
        sampling = _measured(velocity, module, attention)
    if checkpointing:
        module.enable_gradient_checkpointing(attention.checkpoint)
    training = _measured(velocity, module, attention, backward=True)
    trained, every = (sum(p.numel() for p in ps) for ps in (trainable(module).values(), module.parameters()))
    return PassCost(
        samples=samples,
        parameters=every - trained if lora else every,
        frozen=every - trained,
        trained=trained,
        blocks=(max(blocks), sum(blocks)),
        trained_blocks=(max(learning), sum(learning)),
        frozen_blocks=(max(frozen), sum(frozen)),
        sampling_flops=sampling.flops,
        training_flops=training.flops,
        recomputed_flops=training.recomputed,
        sampling_bytes=sampling.peak,
        saved_bytes=training.after_forward,
        training_bytes=training.peak,
        float8=(sum(rounded for rounded, _ in float8), sum(rows for _, rows in float8)),
    )


def _in_float8(block: nn.Module, model_config: DiffusionModelConfig) -> tuple[int, int]:
    """Parameters of the block's matrices that are kept in float8, and the rows of these."""
    if model_config.model.frozen_dtype is None:
        return 0, 0
    matrices = [layer.weight for _, layer in layers_for_float8(block)]
    return sum(matrix.numel() for matrix in matrices), sum(len(matrix) for matrix in matrices)


def meta_transformer(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig) -> Any:
    """The denoiser as rollout and trainer compute with it, on the meta device."""
    module: Any = meta_module(adapter, model_config)
    kept = kept_in_fp32(module)
    for name, parameter in module.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(model_config.dtype)
    for parameter in trainable(module).values():  # gradients of weights are accounted for where they are sharded
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    return module.train()


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def decoding_bytes(model_config: DiffusionModelConfig, samples: int) -> tuple[int, int]:
    """(parameters of the VAE in bytes, most memory that decoding so many samples holds at a time besides)."""
    import diffusers

    adapter = DiffusionModelBase.get_class(model_config)
    config = component_config(model_config.path, "vae")
    with torch.device("meta"):
        vae: Any = getattr(diffusers, config["_class_name"]).from_config(config)
    nn.Module.to(vae.eval(), model_config.dtype)  # diffusers' own warns of weights to be kept in fp32, be there none
    latents = torch.empty(samples, *adapter.latent_shape(model_config), device="meta")
    with torch.no_grad():
        measured = _measured(lambda: to_uint8(adapter.decode(vae, model_config, latents)), vae, _FusedAttention())
    return sum(p.numel() * p.element_size() for p in vae.parameters()), measured.peak


def _velocity(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: DiffusionModelConfig,
    prompts: "PromptTable",
    samples: int,
    constant_half: bool,
) -> Callable[[], Tensor]:
    index = torch.zeros(samples, dtype=torch.long)
    text, held = prompts.to("meta").expand(index), prompts.expand(index)
    text |= {name: held[name] for name in TEXT if name.endswith("mask")}  # these are read
    latents = torch.empty(samples, *adapter.latent_shape(model_config), device="meta")
    timestep = torch.empty(samples, device="meta")

    def velocity() -> Tensor:
        inputs = adapter.model_inputs(module, model_config, latents, timestep, text)
        if not (constant_half and inputs[1] is not None and torch.is_grad_enabled()):
            return adapter.predict_velocity(module, model_config, *inputs)
        with torch.no_grad():
            unconditional = adapter.denoise(module, inputs[1])
        return adapter.predict_velocity(module, model_config, *inputs, unconditional)

    return velocity


@dataclass(frozen=True)
class _Measured:
    flops: float
    recomputed: float
    peak: int
    after_forward: int


def _measured(
    compute: Callable[[], Tensor], module: nn.Module, attention: "_FusedAttention", backward: bool = False
) -> _Measured:
    """Operations and memory of `compute`, and of its backward; the module's own tensors do not count."""
    count = attention.count = _Count()
    ledger = _Ledger(module, count)
    with ledger, attention:
        output = compute()
        after = ledger.live
        if backward:
            output.sum().backward()
    return _Measured(count.flops, count.recomputed, ledger.peak, after)


@dataclass
class _Count:
    """Operations: those that gradient checkpointing computes again in the backward stand apart."""

    flops: float = 0.0
    recomputed: float = 0.0
    again: bool = False

    def add(self, flops: float) -> None:
        """So many more."""
        if self.again:
            self.recomputed += flops
        else:
            self.flops += flops


class KnownResults(TorchDispatchMode):
    """Results on the meta device: what a block has asked, the next one need not, nor another pass of this process.

    A tensor there is its shape, strides and format. torch finds those of a result in Python, in up to a millisecond for
    each operation; a model's blocks repeat the same few dozen.
    """

    _found: ClassVar[dict[Any, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.result(func, args, kwargs or {})

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), _described(args), _described(kwargs))
        if key in self._found:
            made = tuple(known and _empty(*known) for known in self._found[key])
            return made if len(made) > 1 else made[0]
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple) else (result,)
        tensors = [tensor for tensor in made if tensor is not None]  # of a backward only what was asked for
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        own = {id(t.untyped_storage()) for t in tensors if t.is_meta} - given  # _unsafe_view's schema does not say so
        if len(own) == len(tensors):
            self._found[key] = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in made)
        return result


class _Ledger(KnownResults):
    """Adds up the storages that are alive, as an allocator without rounding would, and operations by torch's formulas.

    `FlopCounterMode` itself would keep alive what gradient checkpointing frees.
    """

    def __init__(self, module: nn.Module, count: _Count):
        super().__init__()
        self.live = self.peak = 0
        self.count = count
        self._known = WeakIdKeyDictionary()
        for tensor in (*module.parameters(), *module.buffers()):
            self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self.result(func, args, kwargs or {})
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count.add(formula(*args, **(kwargs or {}), out_val=result))
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._enter(tensor.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = True
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, size: int) -> None:
        self.live -= size


def _empty(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@cache
def _makes_tensors(func: Any) -> bool:
    """Does the operation give new tensors alone, which share no memory with what it was given?"""
    schema = func._schema
    tensors = bool(schema.returns) and all(str(value.type) == "Tensor" for value in schema.returns)
    return tensors and not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _described(value: Any) -> Any:
    """All that a result on the meta device depends on, as a key; a type belongs to it, since True == 1 == 1.0."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.storage_offset()
    if isinstance(value, list | tuple):
        return tuple(_described(entry) for entry in value)
    if isinstance(value, dict):
        return tuple((name, _described(entry)) for name, entry in value.items())
    return type(value), value


class _FusedAttention(TorchFunctionMode):
    """Puts the memory and the operations of a fused kernel in the place of attention's own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = _Count()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3] if len(args) >= 3 else [(kwargs or {})[n] for n in ("query", "key", "value")]
            return _Attention.apply(query, key, value, self)
        return func(*args, **(kwargs or {}))

    def checkpoint(self, block: nn.Module, *args: Any) -> Any:
        """As diffusers checkpoints a block; in the backward torch has switched function modes off."""
        return checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self._again()))

    @contextmanager
    def _again(self) -> Iterator[None]:
        """What a block computes here it has computed before."""
        self.count.again = True
        try:
            with self:
                yield
        finally:
            self.count.again = False


class _Attention(torch.autograd.Function):
    """Shapes of a fused attention; its backward needs no second score matrix in the count of operations."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mode: _FusedAttention) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums)
        ctx.mode, ctx.flops = mode, 2.0 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        mode.count.add(ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.mode.count.add(2 * ctx.flops)
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
