# SPDX-License-Identifier: Apache-2.0
"""A batch of samples as one safetensors file."""

import json
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.samples.trajectories import FinishedLatents, PromptTable, Samples, Trajectories
from models.schedulers.noise_keys import NoiseKey

KINDS: dict[str, type[Samples]] = {kind.__name__: kind for kind in (Trajectories, FinishedLatents)}
SAMPLES, PROMPTS, OUTPUTS = "samples/", "prompts/", "outputs/"
"""Beginnings of the tensors' names: the samples' own, their prompt table's, and what rewards look at."""


def write_samples(file: Path, samples: Samples, outputs: Mapping[str, Tensor]) -> None:
    """Write samples, and beside them tensors by name such as their pictures [B, H, W, 3]: of any shape and format.

    Raises:
        OSError: there is no room, or no such folder.
    """
    own = {field.name: getattr(samples, field.name) for field in fields(samples)}
    table = {field.name: getattr(samples.prompts, field.name) for field in fields(samples.prompts)}
    tensors = _named(SAMPLES, own) | _named(PROMPTS, table | table["extras"]) | _named(OUTPUTS, outputs)
    metadata = {"kind": type(samples).__name__, "keys": json.dumps([astuple(key) for key in samples.keys])}
    if isinstance(samples, Trajectories):
        metadata["window"] = json.dumps(samples.window)
    save_file(tensors, file, metadata)


def read_samples(file: Path) -> tuple[Samples, dict[str, Tensor]]:
    """What `write_samples` was given, bit for bit and in the same shapes."""
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  it is no mapping
        metadata = stored.metadata()
    plain: dict[str, Any] = {"keys": tuple(NoiseKey(*key) for key in json.loads(metadata["keys"]))}
    if "window" in metadata:
        plain["window"] = tuple(json.loads(metadata["window"]))
    prompts = PromptTable.of(_below(PROMPTS, tensors))
    return KINDS[metadata["kind"]](prompts=prompts, **plain, **_below(SAMPLES, tensors)), _below(OUTPUTS, tensors)


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors among them. Each becomes a copy: safetensors takes no views of one storage."""
    found = {f"{prefix}{name}": value for name, value in values.items() if isinstance(value, Tensor)}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
