"""Importing this module registers every model family that ships with the project."""

import models.flux
import models.qwen_image
import models.stable_diffusion_3
import models.wan
import models.z_image

__all__ = ["models"]
