# SPDX-License-Identifier: Apache-2.0
"""Which model, and how it is sampled and trained: what an adapter sees of the configuration."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.config.exported import TRANSFORMER

if TYPE_CHECKING:
    from models.config.algo import DiffusionRolloutAlgoConfig
    from models.config.model import ModelConfig
    from models.config.pipeline import DiffusionPipelineConfig


@dataclass(frozen=True)
class DiffusionModelConfig:
    """What an adapter sees of the configuration.

    Attributes:
        path: folder in diffusers format.
        architecture: `_class_name` of its model_index.json.
        algorithm: second half of the registry key.
        pipeline: how a picture is sampled.
        algo: how a sample explores.
        model: which weights are trained.
    """

    path: str
    architecture: str
    algorithm: str
    pipeline: "DiffusionPipelineConfig"
    algo: "DiffusionRolloutAlgoConfig"
    model: "ModelConfig"

    @classmethod
    def load(
        cls, model: "ModelConfig", pipeline: "DiffusionPipelineConfig", algo: "DiffusionRolloutAlgoConfig"
    ) -> "DiffusionModelConfig":
        """Reads the architecture from the model's folder; `read_architecture` and `check_denoiser` say the errors."""
        check_denoiser(model)
        return cls(model.path, read_architecture(model.path), model.algorithm, pipeline, algo, model)

    @property
    def external_lib(self) -> str | None:
        """Modules that register families, separated by commas."""
        return getattr(self.model, "external_lib", None)

    @property
    def local_path(self) -> str:
        """`path`, under the reference system's name for a copy on this machine: a path is one already."""
        return self.path

    @property
    def transformer_subfolder(self) -> str:
        """Folder of the denoiser's weights within `path`."""
        return self.model.transformer_subfolder

    @property
    def config_path(self) -> str:
        """Folder of the denoiser's config file."""
        return self.model.config_path or str(Path(self.path) / self.transformer_subfolder)

    def of_folder(self, path: str | Path) -> "DiffusionModelConfig":
        """The same with another folder's denoiser, an export's or a teacher's, which is where diffusers has it."""
        model = self.model.model_copy(update={"transformer_subfolder": TRANSFORMER, "config_path": None})
        return replace(self, path=str(path), model=model)

    @property
    def trains_lora(self) -> bool:
        """Are LoRA weights trained, and not all of the transformer's?"""
        return self.model.trains_lora

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the denoiser's forward."""
        return getattr(torch, self.model.dtype)


def check_denoiser(model: "ModelConfig") -> None:
    """The denoiser's weights and its config.json are where the settings say, if they say so.

    Raises:
        FileNotFoundError: they are not.
    """
    weights, built_by = Path(model.path) / model.transformer_subfolder, model.config_path
    if model.transformer_subfolder != TRANSFORMER and not weights.is_dir():
        raise FileNotFoundError(
            f"model.transformer_subfolder is {model.transformer_subfolder}, but {weights} is no folder: name the one "
            f"of {model.path} that has the denoiser's weights"
        )
    where = f"model.config_path is {built_by}"
    if built_by is None and model.transformer_subfolder != TRANSFORMER:
        where, built_by = f"model.transformer_subfolder is {model.transformer_subfolder}", str(weights)
    if built_by is not None and not (Path(built_by) / "config.json").is_file():
        raise FileNotFoundError(
            f"{where}, but {Path(built_by) / 'config.json'} does not exist: let model.config_path be the folder "
            "with the denoiser's config.json"
        )


def read_architecture(path: str | Path) -> str:
    """`_class_name` of the folder's model_index.json.

    Raises:
        FileNotFoundError: the folder is not in diffusers format.
        ValueError: model_index.json names no class.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise FileNotFoundError(f"{index} does not exist: model.path must be a folder in diffusers format")
    name = json.loads(index.read_text()).get("_class_name")
    if not name:
        raise ValueError(f"{index} has no _class_name, so the pipeline's architecture is unknown")
    return name
