# SPDX-License-Identifier: Apache-2.0
"""Which weights a folder's safetensors files hold, by their headers, and whether the files are whole."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "*.safetensors.index.json"


def stored_shapes(folder: Path, given: str) -> dict[str, list[int]]:
    """Name -> shape of the weights in a folder's safetensors files, variants (`*.fp16.safetensors`) left out.

    Args:
        folder: of one component; its headers are read, whatever its size.
        given: how the error begins: "weights is runs/one/weights".

    Raises:
        ValueError: a file is cut off or is none, such as what git-lfs leaves, or one that the index lists is missing.
    """
    for index in (file for file in folder.glob(INDEX) if file.name.count(".") == INDEX.count(".")):
        listed = {*json.loads(index.read_text())["weight_map"].values()}
        missing = sorted(name for name in listed if not (folder / name).is_file())
        if missing:
            raise ValueError(
                f"{given}, whose {folder.name}/{missing[0]} is missing, which {index.name} lists: fetch or export it "
                "again"
            )
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.count(".") == 1:
            shapes |= file_shapes(file, given)
    return shapes


def file_shapes(file: Path, given: str) -> dict[str, list[int]]:
    """The same of one file, errors too."""
    try:
        with safe_open(file, "pt") as stored:
            return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{given}, whose {file.parent.name}/{file.name} cannot be read ({error}): fetch or export it again"
        ) from error
