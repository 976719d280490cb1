# SPDX-License-Identifier: Apache-2.0
"""A CPU as a platform of vLLM-Omni, which ships none: its unmodified engine then runs in tests and on a laptop.

vLLM-Omni imports this module by the path that `plugin` gives, before anything of its own that asks for the platform:
so attention and worker are in a module of their own. Written for vLLM-Omni 0.30.
"""

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

PROCESSES = 8
"""What the machine is asked for: each process of tensor parallelism counts as a device."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """What the diffusion engine asks of a platform. A CPU has no caching allocator, so its memory figures are 0."""

    _omni_enum = OmniPlatformEnum.OOT

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(torch.ops._C, "silu_and_mul"):
            _define_activation()

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        return "models.rollout.vllm_omni.cpu_worker.CpuAttentionBackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "models.rollout.vllm_omni.cpu_worker.CpuDiffusionWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return PROCESSES

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0


def _define_activation() -> None:
    """silu(a) * b of [..., a, b], which vLLM's layers look up among its compiled operators when they are built.

    The wheels on PyPI are for CUDA, and their operators do not load here.
    """
    torch.library.define("_C::silu_and_mul", "(Tensor(a!) out, Tensor input) -> ()")

    @torch.library.impl("_C::silu_and_mul", "CPU")
    def silu_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
        gate, up = values.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)
