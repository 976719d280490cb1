"""FLUX.1: packed 2x2 latents, the guidance scale as an input of the distilled model, true guidance beside it."""

from models.flux.adapter import Flux
from models.flux.rollout import FluxRollout

__all__ = ["Flux", "FluxRollout"]
