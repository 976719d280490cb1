"""Z-Image: one stream, captions of their own lengths, a clock that runs the other way, output of the other sign."""

from models.z_image.adapter import ZImage
from models.z_image.rollout import ZImageRollout

__all__ = ["ZImage", "ZImageRollout"]
