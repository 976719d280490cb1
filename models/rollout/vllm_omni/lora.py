# SPDX-License-Identifier: Apache-2.0
"""LoRA weights that reach vLLM-Omni from memory. Imports vllm."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm_omni.lora.request import LoRARequest

from models.families.base import DiffusionModelConfig
from models.rollout.vllm_omni.lora_names import lora_tensors
from models.rollout.vllm_omni.pipeline import RolloutPipeline

NAME = "policy"
NOWHERE = "/policy"
"""vLLM wants an absolute path; the pipeline's hook takes the tensors and never reads it."""


class TensorLoRARequest(LoRARequest, kw_only=True):  # type: ignore[call-arg]
    """A LoRA request with its weights; without them it names weights that are there already."""

    peft_config: dict[str, Any] | None = None
    lora_tensors: dict[str, Tensor] | None = None

    def name_only(self) -> "TensorLoRARequest":
        """The same request without the weights: what travels with every sample."""
        return TensorLoRARequest(lora_name=self.lora_name, lora_int_id=self.lora_int_id, lora_path=self.lora_path)


def lora_request(
    pipeline: type[RolloutPipeline],
    model_config: DiffusionModelConfig,
    targets: tuple[str, ...],
    weights: Mapping[str, Tensor],
    number: int,
) -> TensorLoRARequest:
    """The trainer's LoRA weights as vLLM-Omni takes them.

    Args:
        pipeline: the family's, for the names of its modules.
        targets: modules that have LoRA weights.
        weights: as `models.weights.trainable.trainable` names them; A [rank, in], B [out, rank].
        number: identifier, above 0; every set of weights needs its own.
    """
    tensors = lora_tensors(pipeline, weights)
    config = {
        "r": model_config.model.lora_rank,
        "lora_alpha": model_config.model.lora_alpha,
        "target_modules": [pipeline.lora_module(target) for target in targets],
    }
    return TensorLoRARequest(
        lora_name=NAME, lora_int_id=number, lora_path=NOWHERE, peft_config=config, lora_tensors=tensors
    )
