# SPDX-License-Identifier: Apache-2.0
"""The public loop: its held-out prompts are drawn with its moving average, of which its training knows nothing, its
learning rate falls as the recipe's does, and a group starts from the same noise where it is to."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks import public_training
from benchmarks.public_training import PUBLISHED, PublicTraining, settings_of
from models.config.actor import EmaConfig, OptimConfig
from tasks.config.recipes import load_recipe
from tasks.config.tree import TrainConfig
from tasks.data.prompts import COLUMNS, Prompt

SETTINGS = replace(PUBLISHED, optim=OptimConfig(lr=0.05), updates=1, window=(0, 1, 1))
HELD_OUT = 3


class Readers:
    """A reward in this process, the mean brightness, which keeps the pictures that it was given."""

    def __init__(self, config: TrainConfig):
        self.seen: list[np.ndarray] = []

    def submit(self, pictures: np.ndarray, prompts: Sequence[Prompt]) -> list[Future[np.ndarray]]:
        """The scores of pictures, uint8 [N, height, width, 3]."""
        self.seen.append(pictures)
        answer: Future[np.ndarray] = Future()
        answer.set_result(pictures.mean((1, 2, 3), dtype=np.float32) / 255)
        return [answer]


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The recipe for a model of a few thousand weights; its reward is `Readers`."""
    monkeypatch.setattr(public_training, "Readers", Readers)
    splits = ["train"] * 4 + ["test"] * HELD_OUT
    rows = [(f"{i}", f"a {i}", split, "a", "{}", "here") for i, split in enumerate(splits)]
    pd.DataFrame(rows, columns=COLUMNS, dtype="str").to_parquet(tmp_path / "prompts.parquet")
    pipeline = {"height": 64, "width": 64, "max_sequence_length": 8}
    rollout = {"n": 2, "val_kwargs": {"n": 1}, "micro_batch_size": 4, "cuda_graphs": False, "pipeline": pipeline}
    model = {"path": str(tiny_folder("stable_diffusion_3")), "dtype": "float32", "compile": False, "lora_rank": 4}
    actor = {"ppo_mini_batch_size": 2, "fsdp_config": {"param_dtype": "float32"}}
    return load_recipe(public_training.RECIPE).with_changes(
        {
            "actor_rollout_ref": {"model": model, "rollout": rollout, "actor": actor},
            "data": {"prompts": str(tmp_path / "prompts.parquet"), "train_batch_size": 2},
            "trainer": {"device": "cpu"},
        }
    )


def loop_of(config: TrainConfig, average: bool) -> PublicTraining:
    """One whose average moves either way, and counts or does not."""
    ema = EmaConfig(enable=average, decay=0.9, update_interval=1)
    return PublicTraining(config, replace(SETTINGS, ema=ema))


def weights(loop: PublicTraining) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in loop.parameters]


def averaged(loop: PublicTraining) -> list[Tensor]:
    return [weight.clone() for weight in loop.average.shadow.values()]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) > 0 and all(map(torch.equal, ours, theirs))


def drawn_with(loop: PublicTraining, values: Sequence[Tensor]) -> np.ndarray:
    """The held-out pictures, uint8 [N, height, width, 3], of a model that simply has these weights."""
    with torch.no_grad():
        for parameter, value in zip(loop.parameters, values, strict=True):
            parameter.copy_(value)
    torch.manual_seed(loop.seed + 1)
    return loop.sample(loop.held_out, ())[1]


@pytest.mark.parametrize("average", [True, False])
def test_held_out_pictures_are_the_averages_where_there_is_one_and_training_goes_on_from_the_weights(
    config: TrainConfig, average: bool
) -> None:
    loop: Any = loop_of(config, average)
    loop.iterate()
    loop.iterate()
    raw, mean = weights(loop), averaged(loop)
    loop.readers.seen.clear()
    found = loop.validate()
    (pictures,) = loop.readers.seen
    assert len(pictures) == HELD_OUT
    assert found == pytest.approx(pictures.mean() / 255, abs=1e-6)
    assert same(weights(loop), raw)
    loop.iterate()
    after, after_mean = weights(loop), averaged(loop)
    assert not same(after, raw)

    of_raw, of_mean = drawn_with(loop, raw), drawn_with(loop, mean)
    assert (of_raw != of_mean).any(), "the test cannot tell them apart"
    np.testing.assert_array_equal(pictures, of_mean if average else of_raw)

    never_measured = loop_of(config, average)
    for _ in range(3):
        never_measured.iterate()
    assert same(weights(never_measured), after)
    assert same(averaged(never_measured), after_mean)


def test_the_rate_falls_over_the_runs_steps_as_the_flows_does(config: TrainConfig) -> None:
    falling = {"lr": 0.1, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1}
    changed = config.with_changes(
        {
            "actor_rollout_ref": {"actor": {"optim": falling}},
            "data": {"train_batch_size": 4},
            "trainer": {"total_training_steps": 2},
        }
    )
    loop = PublicTraining(changed, settings_of("recipe", changed))
    rates = [loop.rate.get_last_lr()[0]]
    for _ in range(2):
        loop.iterate()
        rates.append(loop.rate.get_last_lr()[0])
    assert loop.optimizer_steps == 4
    # From 0 over one step of warm-up to .1, then half a cosine over the three that are left.
    np.testing.assert_allclose(rates, [0.0, 0.1 * (1 + np.cos(np.pi / 3)) / 2, 0.0], atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_starts_from_the_same_noise_where_it_is_to_and_what_is_held_out_never_does(
    config: TrainConfig, shared: bool
) -> None:
    loop = PublicTraining(config, replace(SETTINGS, same_noise=shared))
    first, second = loop.prompts[:2]
    rows = [first, second, first, second]
    starts = loop.sample(rows, [0])[0].latents[:, 0]
    assert torch.equal(starts[0], starts[2]) is shared
    assert torch.equal(starts[1], starts[3]) is shared
    assert not torch.equal(starts[0], starts[1])
    held_out = loop.sample(rows, ())[0].latents[:, 0]
    assert not torch.equal(held_out[0], held_out[2])
