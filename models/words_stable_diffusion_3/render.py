# SPDX-License-Identifier: Apache-2.0
"""Pseudo-words, the prompts that ask for them, and the pictures of these, drawn with Pillow's built-in font."""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from models.words_stable_diffusion_3.settings import WordsSettings

CONSONANTS, VOWELS = "bcdfghklmnprstvz", "aeiou"
LENGTHS = (4, 7)
INKS = {
    "black": (20, 20, 20),
    "crimson": (200, 30, 30),
    "blue": (30, 50, 190),
    "green": (20, 120, 40),
    "purple": (120, 30, 140),
    "brown": (110, 60, 20),
}
PAPERS = {"white": (245, 245, 245), "yellow": (250, 235, 140), "pink": (250, 205, 215), "grey": (205, 205, 205)}
PREPOSITIONS = ("in", "on")
MARGIN = 3
"""Pixels of paper left and right of a word."""
CHUNK = 500


def make_prompts(settings: WordsSettings) -> list[str]:
    """As many different prompts as the settings' splits have together, and no word in two of them."""
    rng = random.Random(f"words/{settings.seed}")
    words: dict[str, None] = {}
    while len(words) < settings.n_test + settings.n_train + settings.n_pretrain:
        words.setdefault(make_word(rng))
    # There are too few short words: the last ones found are long.
    mixed = rng.sample([*words], len(words))
    return [f"the word {word} in {rng.choice([*INKS])} on {rng.choice([*PAPERS])}" for word in mixed]


def make_word(rng: random.Random) -> str:
    """Four to seven letters, consonants and vowels in turn.

    None begins like a preposition of the prompt: T5's tokenizer would take that for the preposition.
    """
    while True:
        first, second = (CONSONANTS, VOWELS) if rng.random() < 0.7 else (VOWELS, CONSONANTS)
        letters = range(rng.randint(*LENGTHS))
        word = "".join(rng.choice(second if place % 2 else first) for place in letters)
        if not word.startswith(PREPOSITIONS):
            return word


def word_of(prompt: str) -> str:
    """The word that a picture of `prompt` shows."""
    return prompt.split()[2]


def render_picture(prompt: str, settings: WordsSettings) -> np.ndarray:
    """Draw the word of `prompt` in its ink on its paper, somewhere inside the frame; uint8 [height, width, 3].

    Font size and place are drawn by the settings' seed and the prompt.
    """
    _, _, word, _, ink, _, paper = prompt.split()
    rng = random.Random(f"{settings.seed}/{prompt}")
    picture = Image.new("RGB", (settings.width, settings.height), PAPERS[paper])
    draw = ImageDraw.Draw(picture)
    size = rng.choice(settings.font_sizes)
    while True:
        font = _font(size)
        left, top, right, bottom = draw.textbbox((0, 0), word, font=font)
        if right - left <= settings.width - 2 * MARGIN:
            break
        size -= 2
    x = rng.randint(MARGIN, int(settings.width - MARGIN - (right - left))) - left
    y = rng.randint(2, max(2, int(settings.height - 2 - (bottom - top)))) - top
    draw.text((x, y), word, font=font, fill=INKS[ink])
    return np.asarray(picture)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def render_pictures(prompts: list[str], settings: WordsSettings, processes: int) -> np.ndarray:
    """A picture of each prompt, uint8 [prompts, height, width, 3]."""
    pictures = np.empty((len(prompts), settings.height, settings.width, 3), np.uint8)
    start = 0
    for part in _parts(prompts, settings, processes):
        pictures[start : start + len(part)] = part
        start += len(part)
    return pictures


def _parts(prompts: list[str], settings: WordsSettings, processes: int) -> Iterator[np.ndarray]:
    chunks = [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]
    if processes == 1 or len(chunks) == 1:
        yield from (_render_chunk(settings, chunk) for chunk in chunks)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_render_chunk, settings), chunks)


def _render_chunk(settings: WordsSettings, prompts: list[str]) -> np.ndarray:
    return np.stack([render_picture(prompt, settings) for prompt in prompts])
