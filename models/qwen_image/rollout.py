"""Qwen-Image in vLLM-Omni."""

from typing import Any

from torch import nn

from models.base import VllmOmniPipelineBase
from models.engines.vllm_omni.pipeline import RolloutPipeline


@VllmOmniPipelineBase.register("QwenImagePipeline")
class QwenImageRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix and wants the length of the text."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

        return QwenImageTransformer2DModel

    def denoise(self, **inputs: Any) -> Any:
        # diffusers takes the text's positions from the padded width; the mask's length would turn other tokens.
        batch, width, _ = inputs["encoder_hidden_states"].shape
        return self.transformer(**inputs, txt_seq_lens=[width] * batch)

    @classmethod
    def lora_module(cls, name: str) -> str:
        return name.replace("to_out.0", "to_out")
