# SPDX-License-Identifier: Apache-2.0
"""Attention and worker of the CPU platform; imported by the paths that `cpu_platform` gives."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuAttention(SDPAImpl):
    """vLLM-Omni's attention by torch; its own `forward` knows no out-of-tree platform."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    """What gives vLLM-Omni's attention layers `CpuAttention`."""

    @staticmethod
    def get_impl_cls() -> type:
        return CpuAttention


class CpuDiffusionWorker(DiffusionWorker):
    """A worker that can be told to sleep and wake, and has no memory to give back."""

    asleep = False

    def init_device(self) -> None:
        # vLLM's compiled CPU kernels repack a layer's weight and drop the original, after which no new weights can be
        # loaded; PyPI's wheels do not even have them. The plain matrix product keeps it.
        custom_ops._supports_onednn = False
        layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
        if self.od_config.num_gpus > 1:
            # A worker's process asks torch from which device it copies its answers; torch knows no accelerator here.
            torch.accelerator.current_accelerator = lambda check_available=False: self.device
        super().init_device()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return nullcontext()

    def sleep(self, level: int = 1) -> int:
        self.asleep = True
        return 0

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.asleep = False
        return True
