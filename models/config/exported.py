# SPDX-License-Identifier: Apache-2.0
"""The folders of a model and of an export: what their files are called, and that they can be written into.

It imports neither torch nor pydantic.
"""

import os
import stat
from pathlib import Path

TRANSFORMER = "transformer"
"""Folder of the denoiser in diffusers format."""
LORA_FILE = "pytorch_lora_weights.safetensors"
"""Of an export of LoRA weights, as diffusers reads it."""


def check_holds_weights(folder: Path, given: str) -> None:
    """It is a folder that a run exported, by the names in it.

    Args:
        given: how the error begins: "weights is runs/one/weights".

    Raises:
        ValueError: it is none.
    """
    if not ((folder / LORA_FILE).is_file() or (folder / TRANSFORMER / "config.json").is_file()):
        raise ValueError(
            f"{given}, which holds neither {LORA_FILE} nor transformer/: give the folder that a run exported, "
            "runs/<run name>/weights"
        )


def let_owner_write(folder: Path) -> None:
    """Into a folder and those in it, as far as they are this user's: a copy of a read-only model is read-only, too, and
    nothing goes from such a one."""
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(found.st_mode | stat.S_IRWXU)
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            let_owner_write(inner)
