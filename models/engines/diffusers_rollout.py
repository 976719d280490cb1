"""Sampling in this process with the diffusers modules: the engine for CPUs and the oracle for the faster one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.base import DiffusionModelBase, DiffusionModelConfig
from models.engines.canary import Canary, canary_velocity
from models.engines.sampling import sample
from models.engines.trajectories import RolloutRequest, Trajectories
from models.engines.weights import load_exported, load_trainable, make_trainable, trainable
from models.schedulers import FlowMatchSDEDiscreteScheduler

if TYPE_CHECKING:
    from models.config import DiffusionPipelineConfig


class DiffusersRolloutEngine:
    """Holds one copy of the denoiser and the decoder, and samples whole requests.

    Args:
        model_config: which model, and how it is sampled by default.
        device: where it lives.
    """

    def __init__(self, model_config: DiffusionModelConfig, device: str = "cpu"):
        self.model_config, self.device = model_config, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.transformer = self.adapter.load_transformer(model_config, model_config.dtype).to(device).eval()
        make_trainable(self.adapter, self.transformer, model_config)
        # The trainer keeps LoRA weights in fp32 for its optimiser and computes with them in the model's format.
        for parameter in trainable(self.transformer).values():
            parameter.data = parameter.data.to(model_config.dtype)
        self.vae = self.adapter.load_vae(model_config).to(device)
        self._schedulers: dict[DiffusionPipelineConfig, FlowMatchSDEDiscreteScheduler] = {}

    def generate(
        self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None
    ) -> tuple[Tensor, Trajectories | None]:
        """Sample one request.

        Args:
            request: what to sample.
            pipeline: how, if not as in the training rollout (validation).

        Returns:
            (pictures [B, H, W, 3] uint8 on the CPU, trajectories or None for an ODE).
        """
        latents, trajectories = self.sample_latents(request, pipeline)
        return self.decode(latents, pipeline), trajectories

    def sample_latents(
        self, request: RolloutRequest, pipeline: "DiffusionPipelineConfig | None" = None
    ) -> tuple[Tensor, Trajectories | None]:
        """As `generate`, with the finished latents [B, ...] fp32, on the engine's device, in place of the pictures."""
        config = self._config(pipeline)
        return sample(self.adapter, self.transformer, self._scheduler(config), config, request, self.device)

    @torch.no_grad()
    def decode(self, latents: Tensor, pipeline: "DiffusionPipelineConfig | None" = None) -> Tensor:
        """Finished latents [B, ...] to pictures [B, H, W, 3], uint8, on the CPU."""
        return self.adapter.decode(self.vae, self._config(pipeline), latents).cpu()

    def _config(self, pipeline: "DiffusionPipelineConfig | None") -> DiffusionModelConfig:
        return self.model_config if pipeline is None else replace(self.model_config, pipeline=pipeline)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the trainer's weights (names as `models.engines.weights.trainable` gives them)."""
        load_trainable(self.transformer, weights)

    def load_exported(self, folder: Path) -> None:
        """Take weights from a folder that a run exported."""
        load_exported(self.adapter, self.transformer, self.model_config, folder)

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What this copy of the model predicts for the canary, fp32 on the CPU."""
        return canary_velocity(self.adapter, self.transformer, self.model_config, canary, self.device)

    def _scheduler(self, config: DiffusionModelConfig):
        if config.pipeline not in self._schedulers:
            scheduler = self.adapter.build_scheduler(config)
            self.adapter.set_timesteps(scheduler, config, self.device)
            self._schedulers[config.pipeline] = scheduler
        return self._schedulers[config.pipeline]
