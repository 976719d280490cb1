# SPDX-License-Identifier: Apache-2.0
"""What the trainer can ask of a vLLM-Omni worker, by `collective_rpc`. Loaded by path in the worker's process."""

import ctypes
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm_omni.diffusion.distributed.parallel_state import get_world_group
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from models.rollout.vllm_omni.pipeline import RolloutPipeline
from models.samples.trajectories import PromptTable
from models.weights.buckets import Slot, open_handle, unpack
from models.weights.canary import Canary, canary_velocity

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies."""


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker class; with tensor parallelism every rank's."""

    def re_init_pipeline(self: Any, custom_pipeline_args: dict[str, Any]) -> None:
        """Build the rollout's pipeline."""
        if self.od_config.num_gpus > 1:
            # vLLM-Omni asks for SIGTERM, which Python handles only once a collective returns that waits for the dead.
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        super().re_init_pipeline(custom_pipeline_args)

    def put_prompts(self: Any, table: str, prompts: PromptTable) -> bool:
        """Keep a prompt table on the device under its digest."""
        pipeline = self.model_runner.pipeline
        pipeline.prompt_tables[table] = prompts.to(pipeline.device)
        return True

    def drop_prompts(self: Any, table: str) -> bool:
        """Forget a prompt table; whether it was there."""
        return self.model_runner.pipeline.prompt_tables.pop(table, None) is not None

    def load_named_weights(self: Any, weights: dict[str, Tensor]) -> list[str]:
        """Copy all transformer weights, by diffusers' names and in its shapes; names of the worker's own that none of
        them was for."""
        named = ((f"transformer.{name}", tensor.to(self.device)) for name, tensor in weights.items())
        pipeline = self.model_runner.pipeline
        with torch.no_grad():
            loaded = pipeline.load_weights(named)
        return [name for name, _ in pipeline.transformer.named_parameters() if f"transformer.{name}" not in loaded]

    def load_shared_weights(self: Any, slots: tuple[Slot, ...], handle: bytes) -> list[str]:
        """`load_named_weights` of a bucket in memory that this machine's processes share."""
        return self.load_named_weights(unpack(slots, open_handle(handle)))

    @torch.no_grad()
    def rollout_canary(self: Any, canary: Canary, lora_request: Any) -> list[Tensor]:
        """See `models.weights.canary.canary_velocity`; with the LoRA weights of the request, if there is one. What each
        rank computes, [S, n, ...]."""
        pipeline: RolloutPipeline = self.model_runner.pipeline
        self.lora_manager.set_active_adapter(lora_request)
        sampler = pipeline.sampler
        with (
            set_forward_context(vllm_config=self.vllm_config, omni_diffusion_config=self.od_config),
            set_current_vllm_config(self.vllm_config),
        ):
            own = canary_velocity(sampler.adapter, sampler.module, sampler.model_config, canary, sampler.device)
        world = get_world_group()
        velocities: list[Any] = [None] * world.world_size
        dist.all_gather_object(velocities, own, group=world.cpu_group)
        return velocities
