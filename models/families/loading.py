# SPDX-License-Identifier: Apache-2.0
"""Components of a model's folder, loaded whole: what their files lack is an error, and never drawn at random."""

import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

COUNTS = ".num_batches_tracked"
"""Of batch norms, which only training reads: files may lack it."""


def load_whole(kind: Any, path: str | Path, component: str, dtype: torch.dtype) -> nn.Module:
    """A component by its class in diffusers or transformers.

    Raises:
        ValueError: the files lack some of its weights, for which both libraries draw others and say so in the log.
    """
    module, found = kind.from_pretrained(str(path), subfolder=component, dtype=dtype, output_loading_info=True)
    missing = sorted(lacking(module, found))
    if missing:
        raise ValueError(
            f"{Path(path) / component} lacks {len(missing)} of the weights of {type(module).__name__}, the first of "
            f"them {', '.join(missing[:3])}: fetch the folder again, or give a model whose files belong together"
        )
    return module


def lacking(module: nn.Module, found: Mapping[str, Any]) -> set[str]:
    """Names of the weights that a module's files lack, by the `output_loading_info` of either library."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}  # transformers': read under another name
    return {name for name in found["missing_keys"] if name not in tied and not name.endswith(COUNTS)}


def load_network(path: str | Path, component: str, dtype: torch.dtype, built_by: str | None = None) -> nn.Module:
    """Transformer or VAE by the class that its config names; errors as `load_whole`.

    Args:
        path: folder in diffusers format.
        component: folder in it.
        dtype: number format of the weights.
        built_by: folder with another config.json than the one beside the weights.
    """
    diffusers = importlib.import_module("diffusers")
    if built_by is not None:
        with _joined(Path(path) / component, Path(built_by)) as joined:
            module = load_network(joined, component, dtype)
        if isinstance(module, diffusers.ModelMixin):
            module.register_to_config(_name_or_path=str(path))  # the joined folder is gone
        return module
    named = read_json(Path(path) / component / "config.json").get("_class_name", "")
    kind = getattr(diffusers, named, None)
    if kind is None:  # of a library that diffusers knows how to ask
        return diffusers.AutoModel.from_pretrained(str(path), subfolder=component, dtype=dtype)
    return load_whole(kind, path, component, dtype)


@contextmanager
def _joined(weights: Path, config: Path) -> Iterator[Path]:
    """During the block a folder with a component of these weights, built by this config, for libraries that look for
    both in one place."""
    with tempfile.TemporaryDirectory() as made:
        component = Path(made) / weights.name
        component.mkdir()
        for file in weights.iterdir():
            if file.name != "config.json":
                (component / file.name).symlink_to(file.resolve())
        (component / "config.json").symlink_to((config / "config.json").resolve())
        yield Path(made)


def load_text_encoders(path: str | Path, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The text encoders of transformers that model_index.json names, by their component; errors as `load_whole`.

    A language model among them computes no logits: a pipeline reads its hidden states, and logits over 150,000 tokens
    of the vocabulary take .15 GB a prompt of 512 tokens in bf16.
    """
    kinds = text_encoder_classes(path).items()
    encoders: dict[str, Any] = {name: load_whole(kind, path, name, dtype) for name, kind in kinds}
    for encoder in encoders.values():
        if encoder.get_output_embeddings() is not None:
            encoder.set_output_embeddings(nn.Identity())
    return encoders


def text_encoder_classes(path: str | Path) -> dict[str, Any]:
    """Component -> class in transformers of the text encoders that model_index.json names.

    Raises:
        ValueError: the installed transformers does not have one, or the folder was saved without one.
    """
    transformers = importlib.import_module("transformers")
    index = read_json(Path(path) / "model_index.json")
    absent = [name for name, kind in index.items() if name.startswith("text_encoder") and kind == [None, None]]
    if absent:
        raise ValueError(
            f"model_index.json of {path} leaves out {', '.join(absent)}, without which its prompts cannot be encoded: "
            "give the whole model"
        )
    named = {
        name: kind[1]
        for name, kind in index.items()
        if name.startswith("text_encoder") and isinstance(kind, list) and kind[0] == "transformers"
    }
    for name, kind in named.items():
        if not hasattr(transformers, kind):
            raise ValueError(
                f"model_index.json of {path} gives {name} the class {kind}, which transformers "
                f"{transformers.__version__} does not have: install one that has it"
            )
    return {name: getattr(transformers, kind) for name, kind in named.items()}


def read_json(file: Path) -> dict[str, Any]:
    """A config file as it is now: a folder that was made anew must not be loaded by the config of the one before."""
    return json.loads(file.read_text())
