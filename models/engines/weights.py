"""Which weights are trained, under which names they travel, and how they are written for others to load."""

import shutil
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from models.base import DiffusionModelBase, DiffusionModelConfig
from models.errors import DoubleflowError

ADAPTER_NAME = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"
LORA_INIT_SEED = 20250505


class WeightSyncError(DoubleflowError, RuntimeError):
    """Rollout and trainer do not hold the same weights."""


def make_trainable(adapter: type[DiffusionModelBase], module: nn.Module, model_config: DiffusionModelConfig) -> None:
    """Freeze everything but what the config trains: LoRA weights, or all of the transformer.

    LoRA's A matrices start from a fixed seed, so that every rank and every rollout actor begins with the same ones.

    Raises:
        ValueError: a LoRA target names no module of this model.
    """
    module.requires_grad_(model_config.model.lora_rank == 0)
    if model_config.model.lora_rank == 0:
        return
    targets = list(model_config.model.target_modules or adapter.lora_target_modules)
    names = [name for name, _ in module.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        raise ValueError(f"model.target_modules names {unknown}, which {type(module).__name__} does not have")
    config = LoraConfig(
        r=model_config.model.lora_rank,
        lora_alpha=model_config.model.lora_alpha,
        init_lora_weights="gaussian",
        target_modules=targets,
    )
    with torch.random.fork_rng():
        torch.manual_seed(LORA_INIT_SEED)
        module.add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    for parameter in trainable(module).values():
        parameter.data = parameter.data.float()


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of what is trained, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def load_trainable(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the module's trained parameters, casting to their number format.

    Raises:
        WeightSyncError: the two sets of names differ.
    """
    own = trainable(module)
    _check_names(own.keys() ^ weights.keys())
    _copy(own, weights)


def _check_names(different: Set[str]) -> None:
    if different:
        raise WeightSyncError(f"weights do not match the model: {len(different)} names differ: {sorted(different)[:3]}")


def _copy(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    shapes = [name for name, tensor in weights.items() if own[name].shape != tensor.shape]
    if shapes:
        raise WeightSyncError(f"weights do not fit the model: {len(shapes)} shapes differ: {shapes[:3]}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


class TrainableLoad:
    """`load_trainable` piece by piece: every name must have come once `finish` is called; errors as there."""

    def __init__(self, module: nn.Module):
        self._own = trainable(module)
        self._missing = set(self._own)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some of the weights."""
        _check_names(weights.keys() - self._own.keys())
        _copy(self._own, weights)
        self._missing -= weights.keys()

    def finish(self) -> None:
        """All have come."""
        _check_names(self._missing)


def export_weights(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, weights: Mapping[str, Tensor], folder: Path
) -> None:
    """Write trained weights as diffusers users load them.

    LoRA: `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights(folder)`. Full weights: a whole pipeline
    folder, the trained transformer beside the base model's other components, for `from_pretrained(folder)`.

    Args:
        weights: trained parameters by name, as `trainable` names them.
        folder: is created; must not exist.
    """
    module: Any = adapter.load_transformer(model_config, model_config.dtype)
    make_trainable(adapter, module, model_config)
    load_trainable(module, weights)
    if model_config.model.lora_rank:
        folder.mkdir(parents=True)
        lora = get_peft_model_state_dict(module, adapter_name=ADAPTER_NAME)
        _pipeline_class(model_config).save_lora_weights(
            str(folder),
            transformer_lora_layers={name: tensor.contiguous() for name, tensor in lora.items()},
            transformer_lora_adapter_metadata=module.peft_config[ADAPTER_NAME].to_dict(),
        )
        return
    shutil.copytree(model_config.path, folder, ignore=shutil.ignore_patterns("transformer"))
    module.save_pretrained(folder / "transformer")


def load_exported(
    adapter: type[DiffusionModelBase], module: nn.Module, model_config: DiffusionModelConfig, folder: Path
) -> None:
    """Copy weights that `export_weights` wrote into a module made by `make_trainable`; errors as `read_exported`."""
    load_trainable(module, read_exported(adapter, model_config, folder))


def read_exported(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, folder: Path
) -> dict[str, Tensor]:
    """Weights that `export_weights` wrote, under the names of `trainable`.

    Raises:
        FileNotFoundError: the folder holds neither LoRA weights nor a transformer, as the config would have it.
    """
    if model_config.model.lora_rank == 0:
        if not (folder / "transformer" / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no transformer/: give a folder that a full-weights run exported")
        source = adapter.load_transformer(replace(model_config, path=str(folder)), model_config.dtype)
        return {name: parameter.data for name, parameter in source.named_parameters()}
    if not (folder / LORA_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {LORA_FILE}: give a folder that a LoRA run exported")
    stored = load_file(folder / LORA_FILE)
    return {
        name.removeprefix("transformer.").replace(".weight", f".{ADAPTER_NAME}.weight"): tensor
        for name, tensor in stored.items()
    }


def _pipeline_class(model_config: DiffusionModelConfig) -> type[DiffusionPipeline]:
    import diffusers

    return getattr(diffusers, model_config.architecture)
