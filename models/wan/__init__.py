"""Wan 2.1 and 2.2 with one denoiser (TI2V-5B and the like): video from text."""

from models.wan.adapter import Wan
from models.wan.rollout import WanRollout

__all__ = ["Wan", "WanRollout"]
