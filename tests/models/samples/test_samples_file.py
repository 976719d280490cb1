# SPDX-License-Identifier: Apache-2.0
"""What is kept of a rollout is read back as it was, to the last bit and with its type."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from models.samples.file import read_samples, write_samples
from models.samples.trajectories import FinishedLatents, PromptTable, Samples, Trajectories
from models.schedulers.noise_keys import NoiseKey

KEYS = (NoiseKey(3, 7, "a", 0), NoiseKey(3, 7, "a", 1), NoiseKey(3, 7, "b", 0))
ROWS = torch.tensor([0, 0, 1])


def table(guided: bool) -> PromptTable:
    """Of two prompts, as a family has it that needs more than their embeddings."""
    tensors = {"prompt_embeds": torch.randn(2, 5, 8).bfloat16(), "prompt_embeds_mask": torch.rand(2, 5) > 0.5}
    tensors["pooled_prompt_embeds"] = torch.randn(2, 4)
    if guided:
        tensors |= {"negative_prompt_embeds": torch.randn(1, 6, 8), "negative_pooled_prompt_embeds": torch.randn(1, 4)}
        tensors["negative_prompt_embeds_mask"] = torch.ones(1, 6, dtype=torch.bool)
    return PromptTable.of(tensors)


def trajectories(means: bool) -> Trajectories:
    """Timesteps as an engine makes them: one row, seen three times."""
    latents = torch.randn(3, 4, 6, 2)
    latents[0, 0, 0, 0] = torch.nan
    timesteps, log_probs = torch.tensor([[900.0, 700.0, 300.0]]).expand(3, 3), torch.randn(3, 3)
    mean = latents[:, :3] if means else None  # a view of the latents' storage
    return Trajectories(KEYS, table(guided=not means), ROWS, (0, 1, 4), latents, timesteps, log_probs, mean)


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), field.name
        elif isinstance(other, PromptTable):
            assert_same(one, other)
        elif field.name == "extras":
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in other)
        else:
            assert one == other, field.name


@pytest.mark.parametrize(
    "samples",
    [trajectories(True), trajectories(False), FinishedLatents(KEYS, table(True), ROWS, torch.randn(3, 6, 2))],
    ids=["with means", "guided, without means", "finished"],
)
def test_samples_come_back_as_they_were(tmp_path: Path, samples: Samples) -> None:
    pictures = torch.randint(0, 255, (3, 8, 8, 3), dtype=torch.uint8)
    file = tmp_path / "batch.safetensors"
    write_samples(file, samples, {"pictures": pictures})
    found, outputs = read_samples(file)
    assert_same(found, samples)
    assert outputs.keys() == {"pictures"}
    assert torch.equal(outputs["pictures"], pictures)
