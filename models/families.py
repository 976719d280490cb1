"""Importing this module registers every model family that ships with the project."""

import models.qwen_image
import models.stable_diffusion_3

__all__ = ["models"]
