"""Wan in vLLM-Omni."""

from torch import nn

from models.base import VllmOmniPipelineBase
from models.engines.vllm_omni.pipeline import RolloutPipeline


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
