# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism: the ranks of a group hold a part of every sample's tokens each.

Between the layers a rank has its tokens and all heads; for attention the group exchanges them for all tokens and a part
of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). The exchange is diffusers'
`enable_parallelism`. Every rank of a group is given the same samples and sees the whole output, so it computes the same
loss. Its gradient is the part that went through its own tokens; the group's sum is the whole.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import transformer_config


def check_sequence_split(model_config: DiffusionModelConfig, size: int, text_tokens: int) -> None:
    """Raise where a model's sequences cannot be divided among `size` ranks; reads config files only.

    Args:
        text_tokens: of the embeddings, for families whose text is not padded here.

    Raises:
        ValueError: the family has no split attention, or heads or tokens do not divide.
    """
    if size == 1:
        return
    field = f"fsdp_config.ulysses_sequence_parallel_size is {size}"
    lengths = DiffusionModelBase.get_class(model_config).split_sequences(model_config, text_tokens)
    if not lengths:
        raise ValueError(f"{field}, but the attention of {model_config.architecture} cannot be split here: set it to 1")
    heads = transformer_config(model_config)["num_attention_heads"]
    if heads % size:
        raise ValueError(f"{field}, which does not divide the {heads} attention heads of {model_config.architecture}")
    for what, length in lengths.items():
        if length % size:
            raise ValueError(f"{field}, which does not divide the {length} tokens of {what}: {_REMEDIES[what]}")


_REMEDIES = {
    "a sample": "choose another rollout.pipeline height, width or num_frames",
    "a prompt": "encode the prompts with another max_sequence_length",
}


def sequence_mesh(device: str, size: int) -> DeviceMesh:
    """All ranks as (data, sequence), with the names that diffusers looks for; `size` consecutive ones are a group."""
    shape, names = (dist.get_world_size() // size, 1, size), ("data", "ring", "ulysses")
    return init_device_mesh(device, shape, mesh_dim_names=names)


def split_sequences(adapter: type[DiffusionModelBase], module: Any, mesh: DeviceMesh) -> None:
    """Let a denoiser divide its sequences among the ranks of each group of a `sequence_mesh`.

    Call it before the module is sharded; every rank makes the call.
    """
    from diffusers import ContextParallelConfig

    size = mesh["ulysses"].size()
    module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size, mesh=mesh))

    def pad(module: nn.Module, arguments: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return arguments, adapter.padded_text(inputs, size)

    module.register_forward_pre_hook(pad, with_kwargs=True)
