# SPDX-License-Identifier: Apache-2.0
"""How the network is asked for its velocity, with and without the prompt: by samplers, canaries and losses alike."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import PromptTable

if TYPE_CHECKING:
    Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


def velocity_field(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: DiffusionModelConfig,
    prompts: PromptTable,
    prompt_index: Tensor,
    one_pass: bool = True,
) -> "Velocity":
    """v(latents [B, ...], timestep scalar or [B]) of the model for fixed prompts, fp32; beside it the network's output
    without the prompt, where there is guidance. `one_pass` as in `predict_halves`."""
    halves = halves_field(adapter, module, model_config, prompts, prompt_index, one_pass)

    def velocity(latents: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor | None]:
        conditional, unconditional = halves(latents, timestep)
        return adapter.guide(model_config, conditional, unconditional), unconditional

    return velocity


def halves_field(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: DiffusionModelConfig,
    prompts: PromptTable,
    prompt_index: Tensor,
    one_pass: bool = True,
) -> "Velocity":
    """The network's outputs of latents [B, ...] at a timestep (scalar or [B]) with the prompt and, where there is
    guidance, without it. `one_pass` as in `predict_halves`."""
    text = prompts.expand(prompt_index)

    def halves(latents: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor | None]:
        # A path of one step: an adapter may index it as it does the trainer's. A timestep for each row lies in memory
        # as one for all of them does: a recording of the model (`CudaGraphs`) serves both.
        path, timesteps = latents[:, None], timestep.expand(len(latents)).contiguous()[:, None]
        inputs, negative = adapter.model_inputs(module, model_config, path, timesteps, text)
        return adapter.predict_halves(module, inputs, negative, one_pass)

    return halves
