# SPDX-License-Identifier: Apache-2.0
"""Rollout by vLLM-Omni. Only `cpu_platform`, `cpu_worker`, `worker` and `lora` import vllm, which takes 10 s."""
