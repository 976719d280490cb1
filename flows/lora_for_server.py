# SPDX-License-Identifier: Apache-2.0
"""Exported LoRA weights as a vLLM-Omni server loads them: `python -m flows.lora_for_server WEIGHTS OUT`."""

from pathlib import Path
from typing import Annotated

import typer

from models.families import load_families
from models.families.base import read_architecture
from models.rollout.vllm_omni import families  # noqa: F401  registers the project's own pipelines
from models.rollout.vllm_omni.lora_names import write_peft_folder
from models.rollout.vllm_omni.registry import VllmOmniPipelineBase

app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def main(
    weights: Annotated[Path, typer.Argument(help="Folder that a LoRA run exported.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[Path, typer.Option(help="Base model, in diffusers format.")] = Path("data/base_model"),
) -> None:
    """Write a PEFT folder: what a request's `lora` may name as its `path`."""
    load_families()
    architecture = read_architecture(model)
    pipeline = VllmOmniPipelineBase.get_class(architecture, "flow_grpo")
    if pipeline is None:
        raise typer.BadParameter(f"{model} is a {architecture}, for which there is no vLLM-Omni pipeline here")
    write_peft_folder(pipeline, weights, out)
    typer.echo(f"{out}: LoRA weights for a vLLM-Omni server of {model}")


if __name__ == "__main__":
    app()
