# SPDX-License-Identifier: Apache-2.0
"""Which weights a folder's safetensors files hold, by their headers, and whether the files are whole."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "*.safetensors.index.json"
HEADERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""A format's name in the headers of safetensors."""


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
    return _shapes_of_all(weight_files(folder), given)


def read_shapes(folder: Path, stem: str, given: str, index_first: bool) -> dict[str, list[int]]:
    """Name -> shape of the weights that a library reads of a folder, be there others; empty where it has no safetensors
    files of their name. Errors as `stored_shapes`.

    Args:
        stem: of the files' names: diffusers' is "diffusion_pytorch_model", transformers' "model".
        index_first: where there are both, the shards that the index lists are read, and not the single file.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    files = [single] if single.is_file() else []
    if index.is_file() and (index_first or not files):
        files = [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    return _shapes_of_all(files, given)


def _shapes_of_all(files: Iterable[Path], given: str) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in files:
        shapes |= file_shapes(file, given)
    return shapes


def variant_alone(folder: Path) -> str | None:
    """A file of a component that has its weights as a variant (`*.fp16.safetensors`) and no others, which no library
    reads that is not asked for it; None where there is none."""
    kinds = ("*.safetensors", "*.bin")
    files = sorted(file for kind in kinds for file in folder.glob(kind))
    return files[0].name if files and all(map(_is_variant, files)) else None


def _is_variant(file: Path) -> bool:
    """Is it of another number format than what a library reads by itself?"""
    return file.name.count(".") > 1


def weight_files(folder: Path) -> list[Path]:
    """A component's safetensors files in the order of their names, variants left out."""
    return [file for file in sorted(folder.glob("*.safetensors")) if not _is_variant(file)]


def is_stored_in(folder: Path, dtype: torch.dtype) -> bool:
    """Is there no weight in a component's safetensors files that `dtype` would round? False where it has none."""
    seen = set[str]()
    for file in weight_files(folder):
        with safe_open(file, "pt") as stored:
            seen |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    return bool(seen) and seen <= {HEADERS.get(dtype)}


def file_shapes(file: Path, given: str) -> dict[str, list[int]]:
    """The same of one file, errors too."""
    with opened(file, given) as stored:
        return {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118


@contextmanager
def opened(file: Path, given: str) -> Iterator[Any]:
    """During the block a safetensors file for reading torch tensors; errors as `stored_shapes`."""
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(
            f"{given}, whose {file.parent.name}/{file.name} cannot be read ({error}): fetch or export it again"
        ) from error
