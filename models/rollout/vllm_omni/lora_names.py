# SPDX-License-Identifier: Apache-2.0
"""LoRA weights under vLLM-Omni's names: for the rollout from memory, for a server from a folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.rollout.vllm_omni.pipeline import RolloutPipeline
from models.weights.trainable import ADAPTER_NAME, LORA_FILE


def lora_tensors(pipeline: type[RolloutPipeline], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trainer's LoRA weights (names as `models.weights.trainable` gives them) as vLLM-Omni names them: the same
    tensors, A [rank, in] and B [out, rank]."""
    tensors = {}
    for name, tensor in weights.items():
        module, found, matrix = name.partition(".lora_")
        if not found:
            raise ValueError(f"{name} is no matrix of a LoRA")
        kind = matrix.removesuffix(".weight").removesuffix(f".{ADAPTER_NAME}")
        tensors[f"base_model.model.transformer.{pipeline.lora_module(module)}.lora_{kind}.weight"] = tensor
    return tensors


def write_peft_folder(pipeline: type[RolloutPipeline], exported: Path, folder: Path) -> None:
    """Turn LoRA weights that a run exported for diffusers into the folder that a vLLM-Omni server loads.

    Args:
        pipeline: of the model's family, for the names of its modules.
        exported: folder with pytorch_lora_weights.safetensors.
        folder: is created; must not exist.

    Raises:
        FileNotFoundError: no such weights.
        ValueError: the file is not as a run writes it.
    """
    if not (exported / LORA_FILE).is_file():
        raise FileNotFoundError(f"{exported} holds no {LORA_FILE}: give a folder that a LoRA run exported")
    try:
        with safe_open(exported / LORA_FILE, framework="pt") as file:
            weights = {name.removeprefix("transformer."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            trained = json.loads((file.metadata() or {})["lora_adapter_metadata"])
        tensors = lora_tensors(pipeline, weights)
        config = {
            "peft_type": "LORA",
            "r": trained["transformer.r"],
            "lora_alpha": trained["transformer.lora_alpha"],
            "target_modules": sorted(pipeline.lora_module(target) for target in trained["transformer.target_modules"]),
        }
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{exported / LORA_FILE} is not as a LoRA run exports it ({error}): give a folder that one exported"
        ) from error
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
