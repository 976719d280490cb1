# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.vllm_omni`: settings of vLLM-Omni."""

from typing import Literal

from pydantic import Field

from models.config.bounds import LONGEST_WAIT_S, MOST_PROCESSES
from models.config.section import Section


class VllmOmniConfig(Section):
    """The vLLM-Omni rollout engine; read when `rollout.name` is vllm_omni."""

    attention_backend: Literal["FLASH_ATTN", "TORCH_SDPA"] | None = Field(
        None, description="Attention kernels on a GPU; null is vLLM-Omni's choice. The CPU has one."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="GPUs that a worker spreads the transformer over, a process on each (docs/vllm-omni.md).",
    )
    enforce_eager: bool = Field(True, description="false compiles the transformer's blocks at the first request.")
    step_execution: bool = Field(
        False,
        description="Let a sample join those that are being denoised, instead of waiting until they are finished; each "
        "picture is then decoded alone.",
    )
    request_batch_max_wait_ms: float = Field(
        100.0,
        ge=0,
        le=1000 * LONGEST_WAIT_S,
        description="Longest wait for a batch to fill; a full one starts at once.",
    )
    request_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Longest time for one batch, or for one order to the engine; then the run fails.",
    )
