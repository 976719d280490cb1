# SPDX-License-Identifier: Apache-2.0
"""Each family's pipeline of vLLM-Omni: which transformer class it runs, and what differs in calling it."""

from types import MappingProxyType
from typing import Any

from torch import nn

from models.rollout.vllm_omni.pipeline import RolloutPipeline
from models.rollout.vllm_omni.registry import VllmOmniPipelineBase


@VllmOmniPipelineBase.register("FluxPipeline")
class FluxRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix, and does not tell vLLM-Omni's LoRA manager so."""

    lora_packs = MappingProxyType(
        {"to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
    )

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel

        return FluxTransformer2DModel


@VllmOmniPipelineBase.register("Flux2KleinPipeline")
class Flux2KleinRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.flux2_klein.flux2_klein_transformer import Flux2Transformer2DModel

        return Flux2Transformer2DModel


@VllmOmniPipelineBase.register("QwenImagePipeline")
class QwenImageRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix and wants the length of the text."""

    unserved = ("img_in",)

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

        return QwenImageTransformer2DModel

    def build_transformer(self, od_config: Any) -> nn.Module:
        """Another part of it holds `img_in` too, and would go on with the layer in whose place LoRA's is put."""
        transformer: Any = super().build_transformer(od_config)
        rope = transformer.image_rope_prepare
        del rope.img_in
        rope.__dict__["img_in"] = lambda tokens: transformer.img_in(tokens)
        return transformer

    def denoise(self, **inputs: Any) -> Any:
        # diffusers takes the text's positions from the padded width; the mask's length would turn other tokens.
        batch, width, _ = inputs["encoder_hidden_states"].shape
        return self.transformer(**inputs, txt_seq_lens=[width] * batch)

    @classmethod
    def lora_module(cls, name: str) -> str:
        return name.replace("to_out.0", "to_out")


@VllmOmniPipelineBase.register("StableDiffusion3Pipeline")
class StableDiffusion3Rollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

        return SD3Transformer2DModel


@VllmOmniPipelineBase.register("WanPipeline")
class WanRollout(RolloutPipeline):
    """Its transformer packs q, k and v of the self-attention into one matrix."""

    blank_shape = (1, 3, 1, 1, 1)

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

        return WanTransformer3DModel

    @classmethod
    def lora_module(cls, name: str) -> str:
        for theirs, own in (("to_out.0", "to_out"), ("ffn.net.0", "ffn.net_0"), ("ffn.net.2", "ffn.net_2")):
            name = name.replace(theirs, own)
        return name


@VllmOmniPipelineBase.register("ZImagePipeline")
class ZImageRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix, and two of the feed-forward's."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel

        return ZImageTransformer2DModel

    def denoise(self, **inputs: Any) -> Any:
        inputs.pop("return_dict")  # it always returns a tuple
        return self.transformer(**inputs)
