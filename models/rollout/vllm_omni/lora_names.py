# SPDX-License-Identifier: Apache-2.0
"""LoRA weights under vLLM-Omni's names: for the rollout from memory, for a server from a folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.config.exported import LORA_FILE
from models.rollout.vllm_omni.pipeline import RolloutPipeline
from models.weights.trainable import ADAPTER_NAME


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
        tensors, wider = packed(lora_tensors(pipeline, weights), pipeline.lora_packs)
        targets = {pipeline.lora_module(target) for target in trained["transformer.target_modules"]}
        config = {
            "peft_type": "LORA",
            "r": wider * trained["transformer.r"],
            "lora_alpha": wider * trained["transformer.lora_alpha"],
            "target_modules": sorted({_packed_name(target, pipeline.lora_packs)[0] for target in targets}),
        }
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{exported / LORA_FILE} is not as a LoRA run exports it ({error}): give a folder that one exported"
        ) from error
    left_out = [name for name in pipeline.unserved if any(f".{name}.lora_" in f".{weight}" for weight in weights)]
    if left_out:
        raise ValueError(
            f"{exported} has LoRA weights of {left_out[0]}, which vLLM-Omni's server leaves out without a word: serve "
            "weights that were trained without it in model.target_modules"
        )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def packed(tensors: dict[str, Tensor], packs: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Tensor], int]:
    """(LoRA weights by the names of packed matrices, how many times the rank they have).

    Of matrices that are packed the A matrices come below each other, and each B beside zeros where the others' are: the
    product is the same. All others have zeros up to that rank, as a folder has one.

    Args:
        tensors: A [rank, in] and B [out, rank] of each module.
        packs: see `RolloutPipeline.lora_packs`.

    Raises:
        ValueError: one is of a convolution, or no LoRA's.
    """
    wider = max(map(len, packs.values()), default=1)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, matrix = name.partition(".lora_")
        if tensor.ndim != 2:
            raise ValueError(f"{name} is no matrix: vLLM-Omni has no LoRA of convolutions, and no DoRA")
        whole, number, count = _packed_name(module, packs)
        is_a = matrix == "A.weight"
        (rank, size), at = (tensor.shape if is_a else tensor.shape[::-1]), f"{whole}.lora_{matrix}"
        ranks, rows = slice(number * rank, (number + 1) * rank), slice(number * size, (number + 1) * size)
        if is_a:
            found.setdefault(at, tensor.new_zeros(wider * rank, size))[ranks] = tensor
        else:
            found.setdefault(at, tensor.new_zeros(count * size, wider * rank))[rows, ranks] = tensor
    return found, wider


def _packed_name(module: str, packs: Mapping[str, tuple[str, ...]]) -> tuple[str, int, int]:
    """(name of the matrix that a module is packed into or is itself, which part of it, of how many)."""
    above, dot, last = module.rpartition(".")
    for pack, names in packs.items():
        if last in names:
            return f"{above}{dot}{pack}", names.index(last), len(names)
    return module, 0, 1
