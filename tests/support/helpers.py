# SPDX-License-Identifier: Apache-2.0
"""Builders for the tests: a tiny model folder, configs from flat keywords, requests, and gloo ranks as processes."""

import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pydantic import BaseModel
from torch import Tensor

from models.config.actor import DiffusionActorConfig, DiffusionLossConfig, EmaConfig, FSDPConfig, OptimConfig
from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelConfig
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers import NoiseKey
from models.tiny_qwen_image.build import build_pipeline
from models.tiny_qwen_image.settings import TinySettings
from models.training.engine import TrainingEngine
from tests.support.forked import CONTEXT

TEXT_DIM = 32
PROMPTS = ["the number 472", "a red sign that says hello", "hi"]


def edit_config(file: Path, **fields: Any) -> None:
    """Give fields that a model's config file has other values."""
    config = json.loads(file.read_text())
    assert fields.keys() <= config.keys()
    file.write_text(json.dumps(config | fields))


def save_tiny_model(folder: Path, layers: int = 2) -> Path:
    """Save an untrained tiny pipeline in which no weight is zero and the latent statistics are not trivial.

    The modulations are large, so that prompt, timestep and guidance all show in the picture.
    """
    settings = TinySettings(text_dim=TEXT_DIM, text_layers=1, layers=layers, heads=2)
    pipeline = build_pipeline(PROMPTS, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.3, generator=generator)
    pipeline.vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.3, 0.7, 1.1, 0.9])
    pipeline.save_pretrained(folder)
    return folder


def model_config(path: str | Path, **overrides: Any) -> DiffusionModelConfig:
    """A small picture (16 x 24 pixels, 24 tokens) in 4 steps; `overrides` are fields of any of the three sections."""
    values = {"height": 16, "width": 24, "num_inference_steps": 4, "path": str(path)} | overrides
    sections = [
        _take(section, values) for section in (ModelConfig, DiffusionPipelineConfig, DiffusionRolloutAlgoConfig)
    ]
    assert not values, f"no section has {sorted(values)}"
    return DiffusionModelConfig.load(*sections)


def actor_config(**overrides: Any) -> DiffusionActorConfig:
    """Actor settings from flat keywords; `overrides` are fields of the actor or of any of its sections.

    AdamW's eps is large here: with 1e-8 a weight whose gradient is rounding noise moves by a full learning rate,
    and comparing two engines' weights would compare that noise.
    """
    values = {"ppo_micro_batch_size_per_gpu": 4, "clip_ratio": 0.2, "lr": 1e-2, "eps": 1e-3} | overrides
    sections = {
        "diffusion_loss": _take(DiffusionLossConfig, values),
        "optim": _take(OptimConfig, values),
        "ema": _take(EmaConfig, values),
        "fsdp_config": _take(FSDPConfig, values),
    }
    return DiffusionActorConfig(**values, **sections)


def _take(section: type[BaseModel], values: dict[str, Any]) -> Any:
    """An instance of `section` from its own fields, which are removed from `values`."""
    return section(**{name: values.pop(name) for name in section.model_fields if name in values})


def prompt_table(lengths: Sequence[int] = (5, 3, 7), negative_length: int | None = None, seed: int = 0) -> PromptTable:
    """Random embeddings of prompts with these token counts, padded to the longest; optionally a negative prompt."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    embeds = torch.randn(len(lengths), longest, TEXT_DIM, generator=generator) * mask[..., None]
    if negative_length is None:
        return PromptTable(embeds, mask)
    negative = torch.randn(1, negative_length, TEXT_DIM, generator=generator)
    return PromptTable(embeds, mask, negative, torch.ones(1, negative_length, dtype=torch.bool))


def noise_keys(prompts: int, samples: int, seed: int = 0, iteration: int = 0) -> tuple[NoiseKey, ...]:
    """Keys of `samples` samples for each of `prompts` prompts, prompt by prompt."""
    return tuple(NoiseKey(seed, iteration, f"prompt-{p}", i) for p in range(prompts) for i in range(samples))


def rollout_request(
    samples: int = 2,
    lengths: Sequence[int] = (5, 3),
    window: Sequence[int] = (0, 1, 2),
    negative_length: int | None = None,
    iteration: int = 0,
    **recorded: bool,
) -> RolloutRequest:
    """`samples` samples for each prompt; the prompts have `lengths` tokens; `recorded` are fields
    of the request."""
    index = torch.arange(len(lengths)).repeat_interleave(samples)
    keys = noise_keys(len(lengths), samples, iteration=iteration)
    return RolloutRequest(keys, prompt_table(lengths, negative_length), index, tuple(window), **recorded)


def wait_until_saved(engine: TrainingEngine) -> None:
    """Return when the checkpoint that the engine writes in the background is complete."""
    while not engine.saving_finished():
        time.sleep(0.01)


@contextmanager
def single_rank() -> Iterator[None]:
    """A gloo group with this process as its only rank, destroyed at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gloo_world(
    function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Run function(rank, *arguments) on that many new gloo processes; returns what each rank returned.

    `function` must be importable (a module's own). Ranks meet in a file and not at a port, which another process
    could take in between. With device "cuda" each rank has a GPU, and NCCL beside gloo.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (world_size, str(folder), device, function, arguments)
    # Beside a GPU no forks: an import of the process that forks has looked at the driver, and they may not any more.
    method = "spawn" if torch.cuda.is_available() else CONTEXT.get_start_method()
    mp.start_processes(_rank_main, arguments, nprocs=world_size, start_method=method)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, folder: str, device: str, function: Callable[..., Any], arguments: tuple
) -> None:
    gc.freeze()  # a collection would copy every page that is shared with the other forks
    warnings.simplefilter("ignore")  # they would stand between pytest's own lines, which tells those of its process
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *arguments), f"{folder}/rank{rank}.pt")
    except BaseException as error:  # torch's CheckpointException is no Exception, and torch would swallow its message
        raise RuntimeError(f"rank {rank}: {error}") from error
    finally:
        dist.destroy_process_group()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of weights by name, which both have; NaN, which no bound holds for, where a weight of one of them is."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name] - other[name]).abs().max() for name in one]).max().item()


def passes_of_updates_alike(engines: Sequence[Any], batches: Callable[[], Sequence[Any]]) -> list[int]:
    """Two updates by each of two trainers, whose metrics and weights must be the same but for rounding.

    Returns how many forward passes of its model each has made.
    """
    passes = [0] * len(engines)
    for number, engine in enumerate(engines):

        def counting(*_: Any, number: int = number) -> None:
            passes[number] += 1

        engine.module.register_forward_pre_hook(counting)
    for _ in range(2):
        one, other = (engine.update_policy(batches()) for engine in engines)
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
        assert largest_difference(*(engine.gather_weights() for engine in engines)) < 3e-6
    return passes
