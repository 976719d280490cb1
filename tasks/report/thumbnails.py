# SPDX-License-Identifier: Apache-2.0
"""Small copies of pictures, of at most so many bytes, for a page that carries them inside."""

import base64
from io import BytesIO

from PIL import Image

FRAME_BYTES, FRAME_WIDTH = 96 * 1024, 1200
"""Of a grid."""
SAMPLE_BYTES, SAMPLE_WIDTH = 10 * 1024, 256
"""Of one picture."""
SHARPEST = 96
"""A smaller picture is enlarged by a whole number, up to about this width: its pixels stay visible."""


def thumbnail(picture: Image.Image, most_bytes: int, most_width: int) -> str:
    """The picture as a data URI (WebP) of at most `most_bytes` before coding: less exact, then smaller."""
    small = picture.convert("RGB")
    small.thumbnail((most_width, 8 * most_width))
    while True:
        for quality in (75, 50, 25):
            buffer = BytesIO()
            small.save(buffer, "WEBP", quality=quality, method=0)
            if buffer.tell() <= most_bytes or max(small.size) <= 8:
                return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        small = small.resize((max(small.width * 2 // 3, 1), max(small.height * 2 // 3, 1)), Image.Resampling.LANCZOS)


def of_grid(grid: Image.Image) -> str:
    """A grid's small copy."""
    return thumbnail(grid, FRAME_BYTES, FRAME_WIDTH)


def of_sample(picture: Image.Image) -> str:
    """One picture's small copy; a tiny one is enlarged."""
    times = max(SHARPEST // picture.width, 1)
    larger = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    return thumbnail(larger, SAMPLE_BYTES, SAMPLE_WIDTH)
