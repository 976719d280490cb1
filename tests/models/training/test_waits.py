# SPDX-License-Identifier: Apache-2.0
"""The CPU asks a GPU for pass after pass of an update and waits for none: a wait in each leaves the GPU idle until the
next one's kernels arrive. The device `meta` stands for the GPU, as nothing can be read from it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_stack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import RolloutRequest
from models.training.micro_batches import micro_batch_of
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import FAMILIES, embeddings_of

DEVICE = "meta"
NAMES = ("stable_diffusion_3", "flux", "wan")
"""Qwen-Image's and Z-Image's adapters read in each pass how long the texts are: their pipelines pad by that, or not."""


class Waits(TorchDispatchMode):
    """Counts what makes the CPU wait for a GPU: numbers that are read from it, and copies from or to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        to = given.get("device")
        crosses = to is not None and isinstance(args[0], torch.Tensor) and torch.device(to).type != args[0].device.type
        if func is torch.ops.aten._to_copy.default and crosses and not given.get("non_blocking"):
            ours = [
                frame for frame in extract_stack() if "/models/" in frame.filename and "/tests/" not in frame.filename
            ]
            self.found[f"{ours[-1].filename}:{ours[-1].lineno} {ours[-1].line}"] += 1
        return func(*args, **given)


@contextmanager
def no_wait() -> Iterator[None]:
    with Waits() as waits:
        yield
    assert not waits.found


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_of_the_update_waits_for_nothing(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """With guidance and a KL to the weights without LoRA; reading a number would raise here."""
    family = FAMILIES[name]
    height, width = family.sizes[0]
    config = model_config(tiny_folder(name), lora_rank=4, height=height, width=width, **family.guided)
    engine = PlainEngine(config, actor_config(use_kl_loss=True, kl_loss_coef=0.1))
    engine.initialize()
    prompts, index = embeddings_of(config, (5, 3), 4), torch.tensor([0, 0, 1, 1])
    request = RolloutRequest(noise_keys(2, 2), prompts, index, (0, 1))
    produced: Any = DiffusersRolloutEngine(config).produce(request).recorded
    engine.module.to(DEVICE)
    engine.scheduler.timesteps = engine.scheduler.timesteps.to(DEVICE)
    on_device = produced.to(DEVICE)
    first, _ = micro_batch_of(on_device.step(0), torch.zeros(4), DEVICE)
    engine.forward_step(first, engine.loss_fn)  # what is copied once is there
    with no_wait():
        micro_batch, counted = micro_batch_of(on_device.step(1), torch.tensor([1.0, -0.8, 0.3, -1.5]), DEVICE)
        loss, _ = engine.forward_step(micro_batch, engine.loss_fn)
    assert counted == 4
    assert loss.device.type == DEVICE
