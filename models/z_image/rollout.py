"""Z-Image in vLLM-Omni."""

from typing import Any

from torch import nn

from models.base import VllmOmniPipelineBase
from models.engines.vllm_omni.pipeline import RolloutPipeline


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
