# SPDX-License-Identifier: Apache-2.0
"""What the files of a model and of an export are called. It imports neither torch nor pydantic."""

from pathlib import Path

TRANSFORMER = "transformer"
"""Folder of the denoiser in diffusers format."""
LORA_FILE = "pytorch_lora_weights.safetensors"
"""Of an export of LoRA weights, as diffusers reads it."""


def holds_weights(folder: Path) -> bool:
    """Is it a folder that a run exported, by the names in it?"""
    return (folder / LORA_FILE).is_file() or (folder / TRANSFORMER / "config.json").is_file()
