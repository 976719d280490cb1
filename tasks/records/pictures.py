# SPDX-License-Identifier: Apache-2.0
"""Grids of pictures, for people to look at."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP, PAPER, INK = 4, (90, 90, 90), (240, 240, 240)
LETTERS = 0.03
"""Size of a title's letters, of the width of what it stands on."""
WIDEST_GRID = 16
"""Columns; the pictures of a larger group go on in the next row."""


def still(picture: np.ndarray) -> np.ndarray:
    """The middle frame [H, W, 3] of a video [F, H, W, 3]; a picture as it is."""
    return picture[len(picture) // 2] if picture.ndim == 4 else picture


def grid(pictures: np.ndarray, columns: int = 8, width: int = 1200) -> Image.Image:
    """Pictures [N, H, W, 3] uint8 side by side, about `width` pixels in all: small ones magnified by a whole number.

    Of videos [N, F, H, W, 3] a still of each is shown.
    """
    pictures = np.stack([still(picture) for picture in pictures])
    _, height, picture_width, _ = pictures.shape
    columns = min(columns, len(pictures))
    room = max(width // columns - GAP, 1)
    tile_width = room // picture_width * picture_width or room
    tile_height = max(round(height * tile_width / picture_width), 1)
    resample = Image.Resampling.NEAREST if tile_width >= picture_width else Image.Resampling.LANCZOS
    cell = (tile_width + GAP, tile_height + GAP)
    sheet = Image.new("RGB", (columns * cell[0], math.ceil(len(pictures) / columns) * cell[1]), PAPER)
    for number, picture in enumerate(pictures):
        tile = Image.fromarray(picture).resize((tile_width, tile_height), resample)
        row, column = divmod(number, columns)
        sheet.paste(tile, (column * cell[0] + GAP // 2, row * cell[1] + GAP // 2))
    return sheet


def titled(sheets: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Sheets under one another, each with its title in letters that can still be read where the page is shown at a
    third of its width."""
    width = max(sheet.width for _, sheet in sheets)
    size = max(10, width * LETTERS)
    font, band = ImageFont.load_default(size), round(size * 1.7)
    page, top = Image.new("RGB", (width, sum(sheet.height + band for _, sheet in sheets)), PAPER), 0
    for title, sheet in sheets:
        ImageDraw.Draw(page).text((GAP, top + band // 2), title, fill=INK, font=font, anchor="lm")
        page.paste(sheet, (0, top + band))
        top += sheet.height + band
    return page
