# SPDX-License-Identifier: Apache-2.0
"""OCR on a GPU reads what it reads on a CPU.

Skipped without CUDA, and where onnxruntime is one for CPUs. On a GPU machine: `pip uninstall onnxruntime`, `pip install
onnxruntime-gpu`, `python -m pytest tests/gpu/test_rewards_on_cuda.py`, a few seconds.
"""

import random

import numpy as np
import pytest
import torch
from onnxruntime import get_available_providers

from models.tiny_qwen_image.render import render_picture
from models.tiny_qwen_image.settings import TinySettings
from tasks.data.prompts import Prompt
from tasks.rewards import get_reward
from tasks.rewards.rapid_ocr import CUDA, LINES_A_PASS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
    pytest.mark.skipif(CUDA not in get_available_providers(), reason="needs onnxruntime-gpu"),
]


@pytest.mark.parametrize("detect", [False, True])
def test_ocr_reads_what_it_reads_on_a_cpu(detect: bool) -> None:
    """More pictures than a pass of the recogniser takes, some of them noisy."""
    count = 8 if detect else LINES_A_PASS["cuda"] + 5
    rng = random.Random(0)
    images = np.stack([render_picture(f"{n:03d}", TinySettings(), rng) for n in range(count)])
    noise = np.random.default_rng(0).normal(0, 12, images.shape)
    images = (images + noise).round().clip(0, 255).astype(np.uint8)
    prompts = [Prompt(str(n), "p", f"{n:03d}", {}, "here:1") for n in range(count)]
    options = {"detect": detect, "upscale": 8 if detect else 2}
    here, there = (get_reward("ocr", device=device, **options) for device in ("cpu", "cuda"))
    assert there.version == f"{here.version} on CUDA"
    texts = there(images, prompts).details["text"]
    assert texts == here(images, prompts).details["text"]
    assert len(set(texts)) > count // 2
