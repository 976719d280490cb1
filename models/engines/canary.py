"""The proof after a weight sync: one fixed input must give one velocity on both sides."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.base import DiffusionModelBase, DiffusionModelConfig
from models.engines.sampling import halves_field
from models.engines.trajectories import PromptTable
from models.engines.weights import WeightSyncError
from models.schedulers.noise_keys import INITIAL_NOISE, NoiseKey, draw


@dataclass(frozen=True)
class Canary:
    """A fixed input of the denoiser.

    Attributes:
        prompts: a few real prompts, P of them.
        timestep: one timestep of the schedule, as the network is fed it.
    """

    prompts: PromptTable
    timestep: float = 500.0


@torch.no_grad()
def canary_velocity(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: DiffusionModelConfig,
    canary: Canary,
    device: torch.device | str,
) -> Tensor:
    """The network's output for the canary, [P, ...], fp32 on the CPU; with guidance [2P, ...], that of the negative
    prompt last: guidance would multiply the difference that rounding makes between two engines."""
    prompts = canary.prompts.to(device)
    index = torch.arange(len(prompts.prompt_embeds), device=device)
    keys = [NoiseKey(0, 0, "canary", i) for i in index.tolist()]
    latents = draw(keys, INITIAL_NOISE, adapter.latent_shape(model_config), device)
    halves = halves_field(adapter, module, model_config, prompts, index)(
        latents, torch.tensor(canary.timestep, device=device)
    )
    return torch.cat([half for half in halves if half is not None]).float().cpu()


def relative_difference(one: Tensor, other: Tensor) -> float:
    """|other - one| / |one|; not finite where one of them is not."""
    return ((other - one).norm() / one.norm()).item()


def check_canary(trainer: Tensor, rollout: Tensor, version: int, tolerance: float) -> float:
    """Relative difference |rollout - trainer| / |trainer| of the two velocities.

    Args:
        trainer, rollout: velocities of the two sides.
        version: policy version, for the message.
        tolerance: largest difference allowed; 0 demands equal bits.

    Raises:
        WeightSyncError: they differ by more, or are not finite.
    """
    difference = relative_difference(trainer, rollout)
    if not difference <= tolerance:  # also catches NaN
        raise WeightSyncError(
            f"after the weight sync of policy version {version} a rollout actor's velocity differs from the "
            f"trainer's by {difference:.3g} (relative), allowed {tolerance:.3g}: it would sample another policy"
        )
    return difference
