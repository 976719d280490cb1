"""Importing this module registers every model family that ships with the project."""

import models.qwen_image

__all__ = ["models"]
