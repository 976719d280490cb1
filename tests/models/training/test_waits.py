# SPDX-License-Identifier: Apache-2.0
"""The CPU asks a GPU for pass after pass of an update, and step after step of a rollout, and waits for none: a wait in
each leaves the GPU idle until the next one's kernels arrive. `meta` stands for the GPU: nothing can be read from it."""

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
from models.rollout.sampling import Denoising
from models.samples.trajectories import RolloutRequest
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch, micro_batch_of
from models.training.noised import noise_latents
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import FAMILIES, embeddings_of

DEVICE = "meta"
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
NAMES = ("stable_diffusion_3", "flux", "wan")
READING = ("qwen_image", "z_image")
"""Their denoisers are given texts without padding, or told that there is none, so their adapters read the masks."""
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


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


def test_a_step_of_the_rollout_waits_for_nothing(tiny_folder: Callable[[str], Path]) -> None:
    """Its noise comes from the CPU, while the GPU computes the velocity."""
    config = model_config(tiny_folder("stable_diffusion_3"), guidance_scale=4.5)
    adapter = FAMILIES["stable_diffusion_3"].adapter
    scheduler: Any = adapter.build_scheduler(config)
    scheduler.timesteps = scheduler.timesteps.to(DEVICE)
    request = RolloutRequest(noise_keys(2, 2), embeddings_of(config, (5, 3), 4), torch.tensor([0, 0, 1, 1]), (0, 1))
    latents = torch.empty(4, *adapter.latent_shape(config), device=DEVICE)
    denoising = Denoising(scheduler, config, request, latents)
    denoising.advance(torch.empty_like(latents), None)
    with no_wait():
        for _ in range(2):  # one with noise, one without
            denoising.advance(torch.empty_like(latents), None)
    assert denoising.step == 3


class Reads(TorchDispatchMode):
    """Counts what is read of tensors, on any device, to make the denoiser's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += (by_mask or func in READS) and any(
            frame.name == "prepare_model_inputs" for frame in extract_stack()
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", READING)
def test_masks_are_read_once_a_batch_and_once_a_micro_batch(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """And not at every step or in every pass, of which each has several forward passes."""
    family = FAMILIES[name]
    config = model_config(tiny_folder(name), lora_rank=4, **family.guided)
    prompts, index = embeddings_of(config, (5, 3), 4), torch.tensor([0, 0, 1, 1])
    request = RolloutRequest(noise_keys(2, 2), prompts, index, (0, 1, 2))
    rollout = DiffusersRolloutEngine(config)
    trainer = DiffusersFSDPEngine(config, actor_config(use_kl_loss=True, kl_loss_coef=0.1))
    trainer.initialize()
    of_a_mask = {"qwen_image": 1, "z_image": 4}[name]  # whether any is padded, and where each row's tokens are
    with Reads() as reads:
        trajectories: Any = rollout.produce(request).recorded
    assert reads.count == 2 * of_a_mask  # with the prompt and without it
    with Reads() as reads:
        trainer.update_policy([ActorBatch([(trajectories, ADVANTAGES)], 4)])
    assert reads.count == 2 * of_a_mask
    with Reads() as reads:
        trainer.rescored(trajectories)
    assert reads.count == 2 * of_a_mask
