"""What the trainer can ask of a vLLM-Omni worker, by `collective_rpc`. Loaded by path in the worker's process."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from models.engines.canary import Canary, canary_velocity
from models.engines.trajectories import PromptTable
from models.engines.vllm_omni.pipeline import RolloutPipeline


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker class."""

    def put_prompts(self: Any, table: str, prompts: PromptTable) -> bool:
        """Keep a prompt table on the device under its digest."""
        pipeline = self.model_runner.pipeline
        pipeline.prompt_tables[table] = prompts.to(pipeline.device)
        return True

    def drop_prompts(self: Any, table: str) -> bool:
        """Forget a prompt table; whether it was there."""
        return self.model_runner.pipeline.prompt_tables.pop(table, None) is not None

    def load_named_weights(self: Any, weights: dict[str, Tensor]) -> list[str]:
        """Copy all transformer weights, by diffusers' names; names of the worker's own that none of them was for."""
        named = ((f"transformer.{name}", tensor.to(self.device)) for name, tensor in weights.items())
        pipeline = self.model_runner.pipeline
        with torch.no_grad():
            loaded = pipeline.load_weights(named)
        return [name for name, _ in pipeline.transformer.named_parameters() if f"transformer.{name}" not in loaded]

    @torch.no_grad()
    def rollout_canary(self: Any, canary: Canary, lora_request: Any) -> Tensor:
        """See `models.engines.canary.canary_velocity`; with the LoRA weights of the request, if there is one."""
        pipeline: RolloutPipeline = self.model_runner.pipeline
        self.lora_manager.set_active_adapter(lora_request)
        sampler = pipeline.sampler
        with (
            set_forward_context(vllm_config=self.vllm_config, omni_diffusion_config=self.od_config),
            set_current_vllm_config(self.vllm_config),
        ):
            return canary_velocity(sampler.adapter, sampler.module, sampler.model_config, canary, sampler.device)
