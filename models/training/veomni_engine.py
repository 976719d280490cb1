# SPDX-License-Identifier: Apache-2.0
"""A training engine on VeOmni: its FSDP2 sharding, optimiser and clipping around the same update.

VeOmni (github.com/ByteDance-Seed/VeOmni) is optional and imported where an engine is built. What it is asked for are
its functions `parallelize_model_fsdp2`, `build_optimizer` and `veomni_clip_grad_norm`; losses, copies of the weights,
schedule and checkpoints are those of `fsdp2`, and so are the numbers.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from models.families.base import DiffusionModelConfig
from models.training.engine import TRAINING_ENGINES
from models.training.fsdp import DiffusersFSDPEngine
from models.weights.trainable import kept_in_fp32

if TYPE_CHECKING:
    from models.config.actor import DiffusionActorConfig

META = torch.device("meta")


@TRAINING_ENGINES.register("veomni")
class VeOmniEngine(DiffusersFSDPEngine):
    """One rank of the trainer under VeOmni; arguments and contract are `TrainingEngine`'s."""

    library = "veomni"

    @classmethod
    def check_settings(cls, actor_config: "DiffusionActorConfig", model_config: DiffusionModelConfig) -> None:
        """Raise where a setting asks for what VeOmni's sharding cannot do.

        Raises:
            ValueError: it does; the message names the field.
        """
        settings = actor_config.fsdp_config
        if settings.ulysses_sequence_parallel_size > 1:
            raise ValueError(
                f"fsdp_config.ulysses_sequence_parallel_size is {settings.ulysses_sequence_parallel_size}, which "
                "actor.strategy veomni cannot do here: set it to 1, or take strategy fsdp2"
            )
        if model_config.trains_lora and not settings.shard_frozen:
            raise ValueError(
                "fsdp_config.shard_frozen is false, but VeOmni shards every weight: set it to true, or take "
                "actor.strategy fsdp2"
            )

        if model_config.model.frozen_dtype is not None:
            raise ValueError(
                f"model.frozen_dtype is {model_config.model.frozen_dtype}, but VeOmni shards every weight in fp32: "
                "leave it out, or take actor.strategy fsdp2"
            )

    def initialize(self) -> None:
        """Let VeOmni know the ranks; then as `fsdp2`.

        Raises:
            ValueError: a setting, or the device, is not VeOmni's.
        """
        from veomni.distributed.parallel_state import init_parallel_state
        from veomni.utils.device import get_device_type

        self.check_settings(self.actor_config, self.model_config)
        if get_device_type() != self.device:
            raise ValueError(
                f"trainer.device is {self.device}, but VeOmni computes on {get_device_type()}, which this machine has: "
                "set trainer.device to it, hide the GPUs (CUDA_VISIBLE_DEVICES), or take actor.strategy fsdp2"
            )
        init_parallel_state(dp_size=dist.get_world_size())
        super().initialize()

    @property
    def _keeps_frozen_whole(self) -> bool:
        """VeOmni shards every weight."""
        return False

    @property
    def _shares_in_one_group(self) -> bool:
        """It shards block by block."""
        return False

    def _shard(self, module: nn.Module) -> nn.Module:
        """Divide a whole module in host memory among the ranks' devices, with VeOmni's functions.

        VeOmni shards a module without values and lets the caller fill in the shards, as its own resume does.

        Raises:
            ValueError: some of a bf16 model's weights stay in fp32.
        """
        from veomni.arguments.arguments_types import MixedPrecisionConfig
        from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

        settings, own = self.actor_config.fsdp_config, self.model_config.model.dtype
        if own == self._policy_format == "bfloat16" and kept_in_fp32(module):
            raise ValueError(
                f"actor.strategy is veomni, but a bfloat16 {type(module).__name__} keeps some weights in float32, and "
                "VeOmni has one format for each block: take strategy fsdp2, or model.dtype float32"
            )
        precision = MixedPrecisionConfig(
            enable=True,
            param_dtype=self._policy_format,
            reduce_dtype=settings.reduce_dtype,
            cast_forward_inputs=self._widens,
        )
        buffers = dict(module.named_buffers())
        weights = _without_values(module)
        parallelize_model_fsdp2(
            module,
            enable_reshard_after_forward=settings.reshard_after_forward,
            mixed_precision=precision,
            basic_modules=sorted({type(block).__name__ for block in self.adapter.transformer_blocks(module)}),
            init_device="meta",
            should_skip_hf_weight_load=True,
            enable_fsdp_offload=settings.param_offload,
            fsdp_offload_pin_memory=self.device == "cuda",
        )
        _fill(module, weights)
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            module.get_submodule(owner)._buffers[own_name] = buffer.to(self.device)
        return module

    def _new_optimizer(self) -> torch.optim.AdamW:
        from veomni.optim import build_optimizer

        self._trained.held()  # the module holds them and not what a forward gathered
        settings: Any = self.actor_config.optim
        return build_optimizer(
            self.module,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def _clip_gradient(self) -> Tensor:
        from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm

        self._trained.held()
        return torch.tensor(veomni_clip_grad_norm(self.module, self.actor_config.optim.clip_grad))


def _without_values(module: nn.Module) -> dict[str, Tensor]:
    """Leave fp32 parameters without storage in the module's place of its own; name -> the values."""
    values = {name: parameter.data for name, parameter in module.named_parameters()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=META, dtype=torch.float32)
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return values


@torch.no_grad()
def _fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Give every rank its part of the values, which each of them has whole."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), f"VeOmni left {name} whole"
        whole = values.pop(name).to(parameter.dtype)
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
