"""Stable Diffusion 3 and 3.5: unpacked latents, pooled text, standard guidance in one pass."""

from models.stable_diffusion_3.adapter import StableDiffusion3
from models.stable_diffusion_3.rollout import StableDiffusion3Rollout

__all__ = ["StableDiffusion3", "StableDiffusion3Rollout"]
