"""FLUX.1 in vLLM-Omni."""

from torch import nn

from models.base import VllmOmniPipelineBase
from models.engines.vllm_omni.pipeline import RolloutPipeline


@VllmOmniPipelineBase.register("FluxPipeline")
class FluxRollout(RolloutPipeline):
    """Its transformer packs q, k and v into one matrix."""

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel

        return FluxTransformer2DModel
