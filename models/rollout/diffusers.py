# SPDX-License-Identifier: Apache-2.0
"""Sampling in this process with the diffusers modules: the engine for CPUs and the oracle for the faster one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.sampling import Sampler
from models.runtime.attention import choose_attention
from models.runtime.compiled import compile_blocks, compile_decoder
from models.runtime.cuda_graphs import CudaGraphs, CudaRecorder
from models.runtime.products import choose_products
from models.weights.canary import Canary, canary_velocity
from models.weights.host_copies import HostCopies
from models.weights.trainable import TrainableLoad, load_exported, load_trainable, make_trainable, trainable


class DiffusersRolloutEngine(Sampler):
    """Holds one copy of the denoiser and the decoder, and samples whole requests.

    Args:
        model_config: which model, and how it is sampled by default.
        device: where it lives.
        cuda_graphs: replay the denoiser as CUDA graphs.
        batch_size: samples of a whole batch, to which a validation's smaller ones are filled up where code is compiled
            or recorded: that is done for each number of samples anew, and takes longer than to draw some twice.

    Raises:
        ValueError: CUDA graphs are asked for where the device is no GPU.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        device: str = "cpu",
        cuda_graphs: bool = False,
        batch_size: int | None = None,
    ):
        recorder = CudaRecorder(device) if cuda_graphs else None
        adapter = DiffusionModelBase.get_class(model_config)
        self.transformer = adapter.load_transformer(model_config, model_config.dtype).to(device).eval()
        choose_attention(adapter, self.transformer, device, model_config.dtype)
        make_trainable(adapter, self.transformer, model_config)
        # The trainer keeps LoRA weights in fp32 for its optimiser and computes with them in the model's format.
        # Full weights are in the formats that diffusers loads, some of a bf16 model in fp32.
        for parameter in trainable(self.transformer).values() if model_config.trains_lora else ():
            parameter.data = parameter.data.to(model_config.dtype)
        choose_products(adapter, self.transformer, model_config, device)
        vae = adapter.load_vae(model_config).to(device)
        if model_config.model.compile:
            compile_blocks(adapter, self.transformer)
            compile_decoder(vae)
        counts_rows = model_config.model.compile or cuda_graphs
        self.graphs = CudaGraphs(self.transformer, recorder) if recorder else None
        self._host = HostCopies([self.transformer, vae], trainable(self.transformer).values())
        super().__init__(adapter, self.transformer, vae, model_config, device, (batch_size or 0) if counts_rows else 0)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the trainer's weights (names and shapes as `models.weights.trainable.trainable` gives them)."""
        load_trainable(self.transformer, weights)

    def begin_load(self) -> TrainableLoad:
        """Take the trainer's weights piece by piece."""
        return TrainableLoad(self.transformer)

    def load_exported(self, folder: Path) -> None:
        """Take weights from a folder that a run exported."""
        load_exported(self.adapter, self.transformer, self.model_config, folder)

    def held_weights(self) -> Mapping[str, Tensor]:
        """The trained weights as they are in the module now, each of its parameter's shape."""
        return trainable(self.transformer)

    def canary_velocity(self, canary: Canary) -> Tensor:
        """What this copy of the model predicts for the canary, [S, n, ...] fp32 on the CPU (`canary_velocity`)."""
        return canary_velocity(self.adapter, self.transformer, self.model_config, canary, self.device)

    def sleep(self, with_policy: bool = True) -> None:
        """Move the weights off the GPU; `with_policy` as `RolloutEngine.sleep` has it."""
        if self.graphs is not None:  # they hold memory, and the addresses of weights that go now
            torch.cuda.synchronize(self.device)
            self.graphs.drop()
        if torch.device(self.device).type != "cpu":
            self._host.leave(with_trained=with_policy)
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back."""
        self._host.come_back(self.device)
