# SPDX-License-Identifier: Apache-2.0
"""The words model as a data stage: its prompts, its pre-training, and its score on words that it has never seen."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from models.words_stable_diffusion_3.render import make_prompts, word_of
from models.words_stable_diffusion_3.settings import WordsSettings
from tasks.data.base_model import ProgressBars
from tasks.data.prompts import COLUMNS, Prompt, prompt_uid
from tasks.rewards import get_reward

OCR_OPTIONS: dict[str, Any] = {"upscale": 1, "rec_image_shape": (3, 48, 192)}
"""Of the reward, for a picture that is one line of 64 x 256 pixels; the recipes give the same."""


def words_prompt_table(settings: WordsSettings) -> pd.DataFrame:
    """The prompt table of the settings' words, with the columns of `build_prompt_table`."""
    counts = {"test": settings.n_test, "train": settings.n_train, "pretrain": settings.n_pretrain}
    splits = [split for split, count in counts.items() for _ in range(count)]
    rows = [
        (prompt_uid(prompt), prompt, split, word_of(prompt), json.dumps({}), f"seed {settings.seed}:{number}")
        for number, (prompt, split) in enumerate(zip(make_prompts(settings), splits, strict=True))
    ]
    return pd.DataFrame(rows, columns=COLUMNS, dtype="str")


def train_words_model(
    prompts: Sequence[Prompt], settings: WordsSettings, folder: Path, *, device: str, processes: int
) -> dict[str, float]:
    """Train on `prompts`, none of which is held out, and save the pipeline in `folder`, its weights in bf16.

    Returns the last training loss of each part, as `vae_loss` and `transformer_loss`, and `watched_reward`, the last
    measurement of training.
    """
    import torch

    from models.words_stable_diffusion_3.pretrain import pretrain

    by_text = {prompt.prompt: prompt for prompt in prompts}
    bars, rewards = ProgressBars(), []
    with ocr_processes(processes) as read:

        def measure(pictures: np.ndarray, texts: list[str]) -> float:
            rewards.append(float(np.mean(read(pictures, [by_text[text] for text in texts])[0])))
            return rewards[-1]

        pipeline = pretrain(list(by_text), settings, device, bars, measure)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.vae.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    losses = {f"{stage}_loss": round(loss, 6) for stage, loss in bars.losses.items()}
    return losses | {"watched_reward": round(rewards[-1], 6)}


def score_words_model(
    folder: Path,
    prompts: Sequence[Prompt],
    settings: WordsSettings,
    *,
    device: str,
    processes: int,
    sampling_steps: int,
    images_per_prompt: int,
    seed: int,
) -> dict[str, float]:
    """Mean OCR reward and share of exact readings, drawn by the standard pipeline as any user of `folder` would.

    Returns `held_out_reward`, `held_out_exact` and `held_out_images`.
    """
    import torch
    from diffusers import StableDiffusion3Pipeline

    from models.words_stable_diffusion_3.build import T5_TOKENS

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)
    scores: list[float] = []
    exact: list[int] = []
    with ocr_processes(processes) as read:
        for repeat in range(images_per_prompt):
            pictures = pipeline(
                [prompt.prompt for prompt in prompts],
                height=settings.height,
                width=settings.width,
                num_inference_steps=sampling_steps,
                guidance_scale=1.0,
                max_sequence_length=T5_TOKENS,
                generator=torch.Generator().manual_seed(seed + repeat),
            ).images
            found = read(np.stack([np.asarray(picture) for picture in pictures]), prompts)
            scores += found[0]
            exact += found[1]
    return {
        "held_out_reward": round(float(np.mean(scores)), 6),
        "held_out_exact": round(float(np.mean(exact)), 6),
        "held_out_images": len(scores),
    }


@contextmanager
def ocr_processes(count: int) -> Iterator[Any]:
    """A function from uint8 pictures [N, height, width, 3] and prompts to (scores, exact), with `count` readers."""
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_load_reward) as pool:

        def read(pictures: np.ndarray, prompts: Sequence[Prompt]) -> tuple[list[float], list[int]]:
            edges = np.linspace(0, len(prompts), 1 + min(len(prompts), 4 * count)).astype(int)
            parts = [(pictures[a:b], prompts[a:b]) for a, b in pairwise(edges)]
            results = list(pool.map(_read, *zip(*parts, strict=True)))
            return [s for scores, _ in results for s in scores], [e for _, exact in results for e in exact]

        yield read


_reward: Any = None
"""Of a reading process."""


def _load_reward() -> None:
    global _reward
    _reward = get_reward("ocr", **OCR_OPTIONS)


def _read(pictures: np.ndarray, prompts: Sequence[Prompt]) -> tuple[list[float], list[int]]:
    result = _reward(pictures, prompts)
    return result.scores.tolist(), list(result.details["exact"])
