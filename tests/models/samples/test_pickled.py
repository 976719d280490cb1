# SPDX-License-Identifier: Apache-2.0
"""Samples and prompts pass between processes as they lie in memory, and to the bit."""

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.samples.trajectories import FinishedLatents, PromptTable, Samples, Trajectories
from models.schedulers.noise_keys import NoiseKey

KEYS = (NoiseKey(1, 2, "a", 0), NoiseKey(1, 2, "b", 1))
TABLE = PromptTable(
    torch.randn(2, 300, 64).bfloat16(),
    torch.rand(2, 300) > 0.5,
    extras={"pooled_prompt_embeds": torch.randn(2, 64), "empty": torch.zeros(2, 0)},
)
PATHS = Trajectories(
    KEYS,
    TABLE,
    torch.tensor([0, 1]),
    window=(3, 4),
    latents=torch.randn(2, 3, 16, 32, 32),
    timesteps=torch.tensor([[0.1, 0.2]] * 2).double(),
    log_probs=torch.tensor([[float("nan"), -0.0]] * 2),
    unconditional=torch.randn(2, 2, 16, 32, 32).bfloat16(),
)
FINISHED = FinishedLatents(KEYS, TABLE, torch.tensor([0, 1]), torch.randn(2, 16, 32, 32))


def passed(value: Any) -> tuple[Any, int, list[pickle.PickleBuffer]]:
    """What another process gets, the bytes that were copied into the pickle, and what was left where it lies."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer) for buffer in buffers]  # read-only, as what lies in Ray's store
    return pickle.loads(pickled, buffers=shared), len(pickled), buffers


def tensors_of(value: Samples | PromptTable) -> dict[str, Tensor]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    found |= found.pop("extras", {})
    table = tensors_of(found.pop("prompts")) if "prompts" in found else {}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)} | table


@pytest.mark.parametrize("value", [PATHS, FINISHED, TABLE], ids=["trajectories", "finished", "prompts"])
def test_tensors_are_left_where_they_lie(value: Samples | PromptTable) -> None:
    _, copied, buffers = passed(value)
    assert copied < 4000
    assert sum(buffer.raw().nbytes for buffer in buffers) == sum(each.nbytes for each in tensors_of(value).values())


@pytest.mark.parametrize("value", [PATHS, FINISHED, TABLE], ids=["trajectories", "finished", "prompts"])
def test_another_process_gets_the_same_bits_in_memory_of_its_own(value: Samples | PromptTable) -> None:
    got, _, buffers = passed(value)
    assert type(got) is type(value)
    given, taken = tensors_of(value), tensors_of(got)
    assert list(taken) == list(given)
    for name, each in taken.items():
        assert each.dtype == given[name].dtype
        assert each.shape == given[name].shape
        assert each.stride() == given[name].stride()
        assert each.view(torch.uint8).equal(given[name].view(torch.uint8)), name
        each.zero_()
    assert any(bytes(buffer).strip(b"\0") for buffer in buffers)
    if isinstance(got, Samples):
        assert got.keys == KEYS
    if isinstance(got, Trajectories):
        assert got.window == (3, 4)
        assert got.means is None


def test_strides_that_matter_to_kernels_stay() -> None:
    turned = replace(FINISHED, latents=FINISHED.latents.to(memory_format=torch.channels_last))
    got, _, _ = passed(turned)
    assert got.latents.stride() == turned.latents.stride()
    assert got.latents.equal(turned.latents)
