# SPDX-License-Identifier: Apache-2.0
"""Whether the weights of a model's folder fit its configs: what loads them would say so in a worker.

Headers of files are compared with modules on the meta device, where tensors have no data. Said is what is certain to
fail; of what is left, such as quantised weights, pickled ones or classes that diffusers does not have, nothing.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.families.loading import COUNTS, lacking, read_json, text_encoder_classes
from models.weights.stored import read_shapes

CONFIG = "config.json"
Difference = tuple[list[int] | None, list[int]]
"""The shape that is stored, None where there is no such weight, and the one that the config asks for."""

log = logging.getLogger(__name__)


def check_network(path: str | Path, component: str, given: str, built_by: str | None = None) -> None:
    """The weights that `load_network` would load fit the config by which it would build them.

    Args:
        path, component, built_by: as in `load_network`.
        given: how the error begins: "model.path is models/one".

    Raises:
        ValueError: one is not there, or has another shape; or a file cannot be read, as in `stored_shapes`.
    """
    folder = Path(path) / component
    stored = read_shapes(folder, "diffusion_pytorch_model", given, index_first=True)
    if not stored:
        return
    file, diffusers = Path(built_by or folder) / CONFIG, importlib.import_module("diffusers")
    config = read_json(file)
    kind: Any = getattr(diffusers, config.get("_class_name", ""), None)
    if not _is_a(kind, diffusers.ModelMixin) or config.get("quantization_config") is not None:
        return

    def build() -> Any:
        with torch.device("meta"):
            return kind.from_config(config)

    module = _made(build, component)
    if module is None:
        return
    module._fix_state_dict_keys_on_load(stored)  # names of old files, as diffusers does when it loads them
    wanted = {name: list(weight.shape) for name, weight in module.state_dict().items()}
    different: dict[str, Difference] = {
        name: (stored.get(name), shape)
        for name, shape in wanted.items()
        if stored.get(name) != shape and not (name not in stored and name.endswith(COUNTS))
    }
    _check_none(different, f"{given}, whose {component} does not fit {component if built_by is None else built_by}")


def check_text_encoders(path: str | Path, given: str) -> None:
    """The weights that `load_text_encoders` would load fit the configs beside them; `given` and errors as in
    `check_network`, and where a config is one that its class refuses."""
    for component, kind in text_encoder_classes(path).items():
        _check_text_encoder(kind, Path(path) / component, given)


def _check_text_encoder(kind: Any, folder: Path, given: str) -> None:
    stored = read_shapes(folder, "model", given, index_first=False)
    if not stored or not _is_a(kind, importlib.import_module("transformers").PreTrainedModel):
        return
    config = _text_config(kind, folder, given)
    if any(getattr(config, name, None) is not None for name in ("quantization_config", "transformers_weights")):
        return

    def loaded() -> tuple[nn.Module, dict[str, Any]]:
        """What `load_whole` would find: transformers itself renames, joins and ties weights."""
        return kind.from_pretrained(
            None,
            config=config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in stored.items()},
            device_map={"": "meta"},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )

    with _quiet():
        made = _made(loaded, folder.name)
    if made is None:
        return
    module, found = made
    missing, others = lacking(module, found), {name: list(shape) for name, shape, _ in found["mismatched_keys"]}
    different: dict[str, Difference] = {
        name: (others.get(name), list(weight.shape))
        for name, weight in module.state_dict().items()
        if name in missing or name in others
    }
    _check_none(different, f"{given}, whose {folder.name} does not fit {folder.name}")


def _text_config(kind: Any, folder: Path, given: str) -> Any:
    try:
        return kind.config_class.from_pretrained(folder)
    except Exception as error:  # whatever its class says, it would say it to what loads the weights, too
        said = " ".join(str(error).split())
        raise ValueError(
            f"{given}, whose {folder.name}/{CONFIG} is none of a {kind.__name__} ({said}): give the {CONFIG} that "
            "these weights were saved with"
        ) from error


def _is_a(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _made(make: Callable[[], Any], component: str) -> Any:
    """What is made on the meta device; None where that cannot be, which does not say that it fails with data."""
    try:
        return make()
    except Exception as error:
        log.debug("whether the weights of %s fit its config is not known before they load: %r", component, error)
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """During the block transformers neither reports weights that do not fit nor shows how many it has loaded."""
    said = importlib.import_module("transformers.utils.logging")
    level = said.get_verbosity()
    hook = said.set_tqdm_hook(lambda _, given, named: said.EmptyTqdm(*given, **named))
    said.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        said.set_verbosity(level)
        said.set_tqdm_hook(hook)


def _check_none(different: Mapping[str, Difference], begins: str) -> None:
    """The first one is of the first layer that differs: names are in the module's order."""
    if not different:
        return
    name, (stored, wanted) = next(iter(different.items()))
    raise ValueError(
        f"{begins}/{CONFIG}: {name} is {'not there' if stored is None else stored} and should be {wanted} "
        f"({len(different)} in all differ): give the {CONFIG} that these weights were saved with, or weights of that "
        "config"
    )
