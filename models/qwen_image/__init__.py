"""Qwen-Image: packed 2x2 latents, true guidance with renormalisation, dynamic shift from the picture's size."""

from models.qwen_image.adapter import QwenImage
from models.qwen_image.rollout import QwenImageRollout

__all__ = ["QwenImage", "QwenImageRollout"]
