# SPDX-License-Identifier: Apache-2.0
"""Exported LoRA weights as a vLLM-Omni server loads them: `python -m flows.lora_for_server WEIGHTS OUT`."""

from pathlib import Path
from typing import Annotated

import typer

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.exported import LORA_FILE
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families import load_families
from models.families.base import DiffusionModelBase, DiffusionModelConfig, read_architecture
from models.rollout.vllm_omni import families  # noqa: F401  registers the project's own pipelines
from models.rollout.vllm_omni.lora_names import write_peft_folder
from models.rollout.vllm_omni.registry import VllmOmniPipelineBase
from models.weights.trainable import check_lora_fits, with_lora_of
from tasks.cli.terminal import Debug, in_a_sentence, run_command
from tasks.config.errors import ConfigError
from tasks.run.early import as_config_errors, check_folder
from tasks.system.files import put_in_place


def main(
    weights: Annotated[Path, typer.Argument(help="Folder that a LoRA run exported.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[Path, typer.Option(help="Base model, in diffusers format.")] = Path("data/base_model"),
    debug: Debug = False,
) -> None:
    """Write a PEFT folder: what a request's `lora` may name as its `path`."""
    with in_a_sentence(debug):
        convert(weights, out, model)
        typer.echo(f"{out}: LoRA weights for a vLLM-Omni server of {model}")


def convert(weights: Path, out: Path, model: Path) -> None:
    """The same, without a word.

    Raises:
        ConfigError: one of them is not what it should be, or the weights are of another model.
    """
    if out.exists():
        raise ConfigError(f"OUT is {out}, which is there already: give a folder that is to be made")
    check_folder(out, "OUT")
    if not (model / "model_index.json").is_file():
        raise ConfigError(f"--model is {model}, which is no folder in diffusers format: give the run's base model")
    load_families()
    with as_config_errors():
        architecture = read_architecture(model)
        pipeline = VllmOmniPipelineBase.get_class(architecture, "flow_grpo")
        if pipeline is None:
            raise ConfigError(f"--model is {model}, a {architecture}, for which there is no vLLM-Omni pipeline here")
        with put_in_place(out) as aside:
            write_peft_folder(pipeline, weights, aside)
            _check_fits(weights / LORA_FILE, model)


def _check_fits(file: Path, model: Path) -> None:
    """Raises ValueError where the LoRA was trained of another model: a server would leave out what it does not find."""
    given = f"WEIGHTS is {file.parent}"
    base = DiffusionModelConfig.load(
        ModelConfig(path=str(model)), DiffusionPipelineConfig(), DiffusionRolloutAlgoConfig()
    )
    config = with_lora_of(base, file, given)
    check_lora_fits(DiffusionModelBase.get_class(config), config, file, given)


if __name__ == "__main__":
    run_command(main)
