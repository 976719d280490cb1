# SPDX-License-Identifier: Apache-2.0
"""The base model as a data stage: pre-train the tiny Qwen-Image model and measure it on prompts it has never seen."""

from collections.abc import Sequence
from pathlib import Path
from time import time

import numpy as np
from tqdm import tqdm

from models.tiny_qwen_image.settings import TinySettings
from tasks.data.prompts import DatasetError, Prompt
from tasks.rewards import get_reward


def train_base_model(
    prompts: Sequence[Prompt], held_out: Sequence[Prompt], settings: TinySettings, folder: Path
) -> dict[str, float]:
    """Train on every prompt that is not held out and save the pipeline in `folder`, in the diffusers format.

    Returns the last training loss of each part, as `vae_loss` and `transformer_loss`.
    """
    from models.tiny_qwen_image.pretrain import pretrain

    unseen = {prompt.uid for prompt in held_out}
    train = [prompt.prompt for prompt in prompts if prompt.uid not in unseen]
    if not train:
        raise DatasetError("the prompt table holds test prompts only; lower prompts.n_test to leave some to train on")
    bars = ProgressBars()
    pipeline = pretrain(train, [prompt.prompt for prompt in prompts], settings, bars)
    pipeline.save_pretrained(folder)
    return {f"{stage}_loss": round(loss, 6) for stage, loss in bars.losses.items()}


def score_base_model(
    folder: Path,
    prompts: Sequence[Prompt],
    settings: TinySettings,
    *,
    sampling_steps: int,
    images_per_prompt: int,
    seed: int,
) -> dict[str, float]:
    """Mean OCR reward and share of exact readings, drawn by the standard pipeline as any user of `folder` would.

    Returns `held_out_reward`, `held_out_exact` and `held_out_images`: numbers that do not change from run to run.
    """
    import torch
    from diffusers import QwenImagePipeline

    torch.set_num_threads(settings.threads)
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    reward = get_reward("ocr")
    scores, exact = [], []
    for repeat in range(images_per_prompt):
        pictures = pipeline(
            [prompt.prompt for prompt in prompts],
            height=settings.height,
            width=settings.width,
            num_inference_steps=sampling_steps,
            true_cfg_scale=1.0,
            generator=torch.Generator().manual_seed(seed + repeat),
        ).images
        result = reward(np.stack([np.asarray(picture) for picture in pictures]), prompts)
        scores.extend(result.scores.tolist())
        exact.extend(result.details["exact"])
    return {
        "held_out_reward": round(float(np.mean(scores)), 6),
        "held_out_exact": round(float(np.mean(exact)), 6),
        "held_out_images": len(scores),
    }


class ProgressBars:
    """A tqdm bar for each part of the training, one after the other; `losses` keeps the last loss of each."""

    def __init__(self) -> None:
        """Begin without a bar: the first report makes it."""
        self.losses: dict[str, float] = {}
        self._bar: tqdm | None = None
        self._since = time()

    def __call__(self, stage: str, done: int, total: int, numbers: dict[str, float]) -> None:
        """Step `done` of `total` of `stage`, with the numbers to show, among them its loss."""
        if self._bar is None:
            self._bar = tqdm(desc=stage, total=total, unit="step", mininterval=0, smoothing=0)
            # The first report comes after many steps; the rate and the time left count from where they began.
            self._bar.start_t = self._since
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update(done - self._bar.n)
        self.losses[stage] = numbers["loss"]
        if done == total:
            self._bar.close()
            self._bar = None
            self._since = time()
