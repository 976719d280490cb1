# SPDX-License-Identifier: Apache-2.0
"""Entry points `vllm.platform_plugins` and `vllm_omni.platform_plugins`: on which platform does a process run?

Both engines ask in every process they start, before they import a model.
"""


def vllm_platform() -> str | None:
    """vLLM's own CPU platform where there is no GPU; None leaves the choice to vLLM."""
    return None if _has_gpu() else "vllm.platforms.cpu.CpuPlatform"


def vllm_omni_platform() -> str | None:
    """This project's CPU platform where there is no GPU; None leaves the choice to vLLM-Omni."""
    return None if _has_gpu() else "models.rollout.vllm_omni.cpu_platform.CpuOmniPlatform"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
