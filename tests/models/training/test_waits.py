# SPDX-License-Identifier: Apache-2.0
"""The CPU asks a GPU for pass after pass of an update and waits for none: a wait in each leaves the GPU idle until the
next one's kernels arrive. The device `meta` stands for the GPU, as nothing can be read from it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import extract_stack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.config.actor import ForwardProcessConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import RolloutRequest
from models.training.micro_batches import micro_batch_of
from models.training.noised import noise_latents
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import FAMILIES, embeddings_of

DEVICE = "meta"
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
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


def engine_and_samples(name: str, folder: Path, recorded: dict[str, Any], **settings: Any) -> tuple[PlainEngine, Any]:
    """A trainer on the device, with guidance and a KL to the weights without LoRA, and samples on the CPU."""
    family = FAMILIES[name]
    height, width = family.sizes[0]
    config = model_config(folder, lora_rank=4, height=height, width=width, **family.guided)
    engine = PlainEngine(config, actor_config(use_kl_loss=True, kl_loss_coef=0.1, **settings))
    engine.initialize()
    prompts, index = embeddings_of(config, (5, 3), 4), torch.tensor([0, 0, 1, 1])
    request = RolloutRequest(noise_keys(2, 2), prompts, index, **recorded)
    produced = DiffusersRolloutEngine(config).produce(request).recorded
    engine.module.to(DEVICE)
    engine.scheduler.timesteps = engine.scheduler.timesteps.to(DEVICE)
    return engine, produced


def compute_two_passes(engine: PlainEngine, samples: Any) -> None:
    """The first copies what is copied once, the second has to wait for nothing."""
    first, second = (samples.step(number) for number in (0, 1))
    engine.forward_step(micro_batch_of(first, ADVANTAGES, DEVICE)[0], engine.loss_fn)
    with no_wait():
        micro_batch, counted = micro_batch_of(second, ADVANTAGES, DEVICE)
        loss, _ = engine.forward_step(micro_batch, engine.loss_fn)
    assert counted == 4
    assert loss.device.type == DEVICE


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_over_sampled_steps_waits_for_nothing(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """Reading a number would raise here."""
    engine, samples = engine_and_samples(name, tiny_folder(name), {"window": (0, 1)})
    compute_two_passes(engine, samples.to(DEVICE))


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_over_noised_samples_waits_for_nothing(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """With a loss that compares two velocities."""
    recorded = {"window": (), "record_finished": True}
    engine, samples = engine_and_samples(name, tiny_folder(name), recorded, loss_mode="diffusion_nft")
    chosen = replace(samples, advantages=ADVANTAGES)
    noised = noise_latents(chosen, engine.scheduler.sigmas, ForwardProcessConfig(num_train_timesteps=2), paired=False)
    velocities = {"old_velocity": torch.zeros_like(noised.noise), "ref_velocity": torch.zeros_like(noised.noise)}
    compute_two_passes(engine, replace(noised, **velocities).to(DEVICE))
