"""Grids of pictures, for people to look at."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

GAP, PAPER, INK = 4, (90, 90, 90), (240, 240, 240)


def grid(pictures: np.ndarray, columns: int = 8, width: int = 1200) -> Image.Image:
    """Pictures [N, H, W, 3] uint8 side by side, whole-number magnified to about `width` pixels in all.

    Of videos [N, F, H, W, 3] the middle frame is shown.
    """
    if pictures.ndim == 5:
        pictures = pictures[:, pictures.shape[1] // 2]
    _, height, picture_width, _ = pictures.shape
    columns = min(columns, len(pictures))
    scale = max(1, (width // columns - GAP) // picture_width)
    cell = (picture_width * scale + GAP, height * scale + GAP)
    sheet = Image.new("RGB", (columns * cell[0], math.ceil(len(pictures) / columns) * cell[1]), PAPER)
    for number, picture in enumerate(pictures):
        tile = Image.fromarray(picture).resize((picture_width * scale, height * scale), Image.Resampling.NEAREST)
        row, column = divmod(number, columns)
        sheet.paste(tile, (column * cell[0] + GAP // 2, row * cell[1] + GAP // 2))
    return sheet


def titled(sheets: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Sheets under one another, each with its title."""
    band = 24
    size = (max(sheet.width for _, sheet in sheets), sum(sheet.height + band for _, sheet in sheets))
    page, top = Image.new("RGB", size, PAPER), 0
    for title, sheet in sheets:
        ImageDraw.Draw(page).text((6, top + 5), title, fill=INK)
        page.paste(sheet, (0, top + band))
        top += sheet.height + band
    return page
