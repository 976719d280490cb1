# SPDX-License-Identifier: Apache-2.0
"""Which weights are trained, under which names they travel, and how they are written for others to load."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Set, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.config.exported import LORA_FILE, TRANSFORMER, check_holds_weights, let_owner_write
from models.errors import DoubleflowError
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.latents import filled_config, transformer_config
from models.weights.stored import file_shapes, opened, stored_shapes

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ABSENT = object()
"""Of a config that lacks a field, which null would not tell from one that has it."""
ADAPTER_NAME = "default"
LORA_INIT_SEED = 20250505
LORA_SETTINGS = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}
"""What a LoRA was trained with: peft's name, as an export has it -> the model's setting."""
OTHER_SCALES = ("use_rslora", "alpha_pattern")
"""Settings of peft's, none of which is one here, by which the same matrices add something else."""
WEIGHT_FILES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf")
VARIANT = re.compile(r"\.(fp16|bf16|fp8)[.-]")
"""In the names of a component's files in another number format than the one that is loaded."""


class WeightSyncError(DoubleflowError, RuntimeError):
    """Rollout and trainer do not hold the same weights."""


def make_trainable(adapter: type[DiffusionModelBase], module: nn.Module, model_config: DiffusionModelConfig) -> None:
    """Freeze everything but what the config trains: LoRA weights, or all of the transformer.

    LoRA's A matrices start from a fixed seed, so that every rank and every rollout actor begins with the same ones.

    Raises:
        ValueError: a LoRA target names no module of this model.
    """
    module.requires_grad_(not model_config.trains_lora)
    if not model_config.trains_lora:
        return
    from peft import LoraConfig  # here: seconds of work, for LoRA alone and where a model is

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
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU: no GPU's generator is begun, or touched
        torch.default_generator.manual_seed(LORA_INIT_SEED)
        module.add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    config.target_modules = set(targets)  # of 20 and more peft has made shorter ones, which an export would say
    widen_trained(module)


def widen_trained(module: nn.Module) -> None:
    """Make what is trained fp32, in whatever format it was read."""
    for parameter in trainable(module).values():
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def kept_in_fp32(module: nn.Module) -> set[str]:
    """Names of the parameters and stored buffers that diffusers' `from_pretrained` keeps in fp32 in any model: its
    `_keep_in_fp32_modules` are parts of their names."""
    kept = {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
    # Without `keep_vars` each of them is detached, a call of DTensor's dispatch for a sharded one.
    return {name for name in module.state_dict(keep_vars=True) if kept & {*name.split(".")}} if kept else set()


def keep_formats(module: nn.Module, dtype: torch.dtype) -> None:
    """Round the stored buffers of a module that was loaded in fp32 as loading it in `dtype` does.

    FSDP computes with parameters in the model's format and leaves buffers as they are.
    """
    stored, kept = module.state_dict(), kept_in_fp32(module)
    for name, buffer in module.named_buffers():
        if name in stored and name not in kept and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of what is trained, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def load_trainable(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the module's trained parameters, of the same shapes, casting to their number format.

    Raises:
        WeightSyncError: the two sets of names differ, or are empty.
    """
    own = trainable(module)
    _check_names(own.keys() ^ weights.keys())
    check_some(own)
    _copy(own, weights)


def _check_names(different: Set[str]) -> None:
    if different:
        raise WeightSyncError(f"weights do not match the model: {len(different)} names differ: {sorted(different)[:3]}")


def check_some(weights: Sized) -> None:
    """Raise WeightSyncError where there are none."""
    if not len(weights):
        raise WeightSyncError("the model has no trained weights: nothing could be learnt, sent or kept")


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
        check_some(self._own)
        self._missing = set(self._own)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some of the weights, each of its parameter's shape."""
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
        weights: trained parameters by name and of the shapes of `trainable`.
        folder: is created; must not exist.
    """
    module: Any = adapter.load_transformer(model_config, model_config.dtype)
    make_trainable(adapter, module, model_config)
    load_trainable(module, weights)
    if model_config.trains_lora:
        save_lora(module, model_config, folder)
        return
    shutil.copytree(model_config.path, folder, ignore=_beside_the_pipeline(Path(model_config.path)))
    let_owner_write(folder)
    module.save_pretrained(folder / TRANSFORMER)


def save_lora(module: Any, model_config: DiffusionModelConfig, folder: Path) -> None:
    """Write a module's LoRA as diffusers users load it, see `export_weights`; the module's other weights are not read,
    and may have no data."""
    from peft.utils import get_peft_model_state_dict  # here: as in `make_trainable`

    folder.mkdir(parents=True)
    lora = get_peft_model_state_dict(module, adapter_name=ADAPTER_NAME)
    _pipeline_class(model_config).save_lora_weights(
        str(folder),
        transformer_lora_layers={name: tensor.contiguous() for name, tensor in lora.items()},
        transformer_lora_adapter_metadata=module.peft_config[ADAPTER_NAME].to_dict(),
    )


def _beside_the_pipeline(base: Path) -> Callable[[str, list[str]], set[str]]:
    """For `copytree`: what of a model's folder is not copied into an export of full weights.

    That is the transformer, and what a hub's folder has besides its components: other folders, single files of all
    weights, and components in other number formats, which together are larger than the model.
    """
    named = json.loads((base / "model_index.json").read_text())

    def left_out(folder: str, names: list[str]) -> set[str]:
        variants = {name for name in names if VARIANT.search(name)}
        if Path(folder) != base:
            return variants
        others = {name for name in names if ((base / name).is_dir() and name not in named) or name.startswith(".")}
        return {TRANSFORMER} | variants | others | {name for name in names if name.endswith(WEIGHT_FILES)}

    return left_out


def load_exported(
    adapter: type[DiffusionModelBase], module: nn.Module, model_config: DiffusionModelConfig, folder: Path
) -> None:
    """Copy weights that `export_weights` wrote into a module made by `make_trainable`; errors as `read_exported`."""
    load_trainable(module, read_exported(adapter, model_config, folder))


def read_exported(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, folder: Path
) -> dict[str, Tensor]:
    """Weights that `export_weights` wrote, under the names and in the shapes of `trainable`.

    Raises:
        FileNotFoundError: the folder holds neither LoRA weights nor a transformer, as the config would have it.
    """
    if not model_config.trains_lora:
        if not (folder / TRANSFORMER / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no transformer/: give a folder that a full-weights run exported")
        source = adapter.load_transformer(model_config.of_folder(folder), model_config.dtype)
        return {name: parameter.data for name, parameter in source.named_parameters()}
    if not (folder / LORA_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {LORA_FILE}: give a folder that a LoRA run exported")
    stored = load_file(folder / LORA_FILE)
    return {
        name.removeprefix("transformer.").replace(".weight", f".{ADAPTER_NAME}.weight"): tensor
        for name, tensor in stored.items()
    }


def check_initial_weights(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig) -> None:
    """`model.initial_weights`, where it is given, is an export of what this run trains; errors as `check_exported`."""
    folder = model_config.model.initial_weights
    if folder is not None:
        check_exported(adapter, model_config, Path(folder), f"model.initial_weights is {folder}")


def check_exported(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, folder: Path, given: str
) -> None:
    """The folder is an export of what this config trains; reads headers only.

    Args:
        given: how the error begins: "weights is runs/one/weights".

    Raises:
        ValueError: it holds no weights or damaged ones, or those of another kind, rank, scale, choice of modules or
            model.
    """
    model = model_config.model
    check_holds_weights(folder, given)
    lora, full = (folder / LORA_FILE).is_file(), (folder / TRANSFORMER / "config.json").is_file()
    if lora != model_config.trains_lora:
        held, wanted = ("LoRA weights", "0, which trains all") if lora else ("full weights", f"{model.lora_rank}")
        raise ValueError(
            f"{given}, which holds {held}, but model.lora_rank is {wanted}: give an export of the same kind"
        )
    if full:
        own, other = (_architecture(Path(path)) for path in (model_config.config_path, folder / TRANSFORMER))
        different = sorted(
            name for name in own.keys() | other.keys() if own.get(name, ABSENT) != other.get(name, ABSENT)
        )
        if different:
            raise ValueError(
                f"{given}, whose transformer differs from that of model.path {model_config.path} in "
                f"{', '.join(different)}: give weights of the same model"
            )
        _check_whole(adapter, model_config, folder, given)
        return
    _check_lora(adapter, model_config, folder / LORA_FILE, given)
    check_lora_fits(adapter, model_config, folder / LORA_FILE, given)


def _check_whole(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, folder: Path, given: str
) -> None:
    """The files hold all of the transformer's weights, each of its size: what loads them says so in a worker alone.
    Pickled files are left to diffusers."""
    if any((folder / TRANSFORMER).glob("*.bin")):
        return
    stored = stored_shapes(folder / TRANSFORMER, given)
    own = {name: list(weight.shape) for name, weight in trainable(meta_module(adapter, model_config)).items()}
    different = sorted(name for name in own if own[name] != stored.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{given}, whose transformer is not whole: {name} is {stored.get(name, 'not there')} and should be "
            f"{own[name]} ({len(different)} in all differ): fetch or export it again"
        )


def lora_settings(file: Path, given: str) -> dict[str, Any]:
    """What the header of a LoRA export says of its training by peft's names: `r`, `lora_alpha`, `target_modules`; empty
    where it says nothing. `given` and errors as in `stored_shapes`."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY  # here: seconds of work, for a LoRA export alone

    with opened(file, given) as stored:
        header = json.loads((stored.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
    return {name.removeprefix("transformer."): value for name, value in header.items()}


def with_lora_of(model_config: DiffusionModelConfig, file: Path, given: str) -> DiffusionModelConfig:
    """The same config, but with the LoRA that an export was trained with: its rank, scale and choice of modules.

    Args:
        given: as in `check_exported`.

    Raises:
        ValueError: the file cannot be read, or does not say them.
    """
    written = lora_settings(file, given)
    unknown = [name for name in OTHER_SCALES if written.get(name)]
    if unknown:
        raise ValueError(
            f"{given}, whose {LORA_FILE} was trained with {unknown[0]}, so that it is scaled by another number than "
            "lora_alpha / lora_rank: give one without"
        )
    for name in LORA_SETTINGS:
        if name not in written:
            raise ValueError(
                f"{given}, whose {LORA_FILE} does not say its {name}: give an export of this project, or write another "
                "tool's LoRA with its settings (docs/training.md, A LoRA of another tool)"
            )
    named = {setting: written[name] for name, setting in LORA_SETTINGS.items()}
    return replace(model_config, model=model_config.model.model_copy(update=named))


def check_lora_fits(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, file: Path, given: str
) -> None:
    """The file's LoRA has the matrices that this config trains, each of its size; reads headers only.

    Args:
        given: as in `check_exported`.

    Raises:
        ValueError: it was trained of another model.
    """
    try:
        trained = trainable(meta_module(adapter, model_config))
    except ValueError as error:
        raise ValueError(f"{given}, whose {LORA_FILE} is of another model than {model_config.path}: {error}") from error
    own = {name.replace(f".{ADAPTER_NAME}.", "."): list(weight.shape) for name, weight in trained.items()}
    other = {name.removeprefix("transformer."): shape for name, shape in file_shapes(file, given).items()}
    different = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{given}, whose {LORA_FILE} is of another model than {model_config.path}: {name} is "
            f"{other.get(name, 'not there')} and should be {own.get(name, 'not there')} ({len(different)} in all "
            "differ): give weights of the same model"
        )


def meta_module(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig) -> nn.Module:
    """The denoiser with what is trained of it, on the meta device, where tensors have no data."""
    import diffusers  # here: seconds of work, where a model is looked at

    config = transformer_config(model_config)
    with torch.device("meta"):
        module: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
        make_trainable(adapter, module, model_config)
    return module


def _architecture(folder: Path) -> dict[str, Any]:
    """What the transformer's config in this folder says of its weights, as json has it.

    An export's file has all fields of its class, a published one those that the class had when it was written.
    """
    config = json.loads(json.dumps(filled_config(folder / "config.json")))
    return {name: value for name, value in config.items() if name not in ("_name_or_path", "_diffusers_version")}


def _check_lora(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, file: Path, given: str) -> None:
    written, model = with_lora_of(model_config, file, given).model, model_config.model
    wanted = {
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": sorted({*(model.target_modules or adapter.lora_target_modules)}),
    }
    for setting, own in wanted.items():
        value = getattr(written, setting)
        other = sorted(value) if isinstance(value, list) else value
        if other != own:
            raise ValueError(
                f"{given}, which was trained with {setting} {other}, but model.{setting} is {own}: it would be "
                "another policy; set the same"
            )


def _pipeline_class(model_config: DiffusionModelConfig) -> type["DiffusionPipeline"]:
    import diffusers  # here: seconds of work, where weights are exported

    return getattr(diffusers, model_config.architecture)
