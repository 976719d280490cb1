"""Stable Diffusion 3 and 3.5 in vLLM-Omni."""

from torch import nn

from models.base import VllmOmniPipelineBase
from models.engines.vllm_omni.pipeline import RolloutPipeline


@VllmOmniPipelineBase.register("StableDiffusion3Pipeline")
class StableDiffusion3Rollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

        return SD3Transformer2DModel
