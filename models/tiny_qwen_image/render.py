# SPDX-License-Identifier: Apache-2.0
"""The pictures that the base model learns from: a prompt's last word, drawn with Pillow's built-in font."""

import random

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from models.tiny_qwen_image.settings import TinySettings

PAPER = (245, 245, 245)
INK = (20, 20, 60)


def render_picture(prompt: str, settings: TinySettings, rng: random.Random) -> np.ndarray:
    """Draw the last word of `prompt` ("the number 472" draws 472) dark on light, somewhere inside the frame.

    Font size and place are drawn from `rng`, so that one prompt has many pictures. Returns uint8 [height, width, 3].
    """
    text = prompt.split()[-1]
    font = ImageFont.load_default(rng.choice(settings.font_sizes))
    picture = Image.new("RGB", (settings.width, settings.height), PAPER)
    draw = ImageDraw.Draw(picture)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    # Keep one pixel of paper around the ink where there is room for it; the box itself starts at (left, top).
    x = rng.randint(1, max(1, int(settings.width - 1 - (right - left)))) - left
    y = rng.randint(1, max(1, int(settings.height - 1 - (bottom - top)))) - top
    draw.text((x, y), text, font=font, fill=INK)
    return np.asarray(picture)


def render_pictures(prompts: list[str], settings: TinySettings) -> tuple[torch.Tensor, torch.Tensor]:
    """`settings.pictures` pictures of prompts drawn at random.

    Returns the pixels, float32 [pictures, 3, height, width] in [-1, 1], and for each picture the index of its
    prompt, int64 [pictures].
    """
    rng = random.Random(settings.seed)
    chosen = [rng.randrange(len(prompts)) for _ in range(settings.pictures)]
    stack = np.stack([render_picture(prompts[i], settings, rng) for i in chosen])
    pixels = torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pixels.contiguous(), torch.tensor(chosen)
