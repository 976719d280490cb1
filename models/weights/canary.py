# SPDX-License-Identifier: Apache-2.0
"""The proof after a weight sync: equal weights on both sides, and from a fixed input one velocity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.families.velocity import halves_field
from models.samples.trajectories import PromptTable
from models.schedulers.noise_keys import INITIAL_NOISE, NoiseKey, draw
from models.weights.trainable import WeightSyncError


@dataclass(frozen=True)
class Canary:
    """A fixed input of the denoiser.

    Attributes:
        prompts: a few real prompts, P of them.
        rows: samples of a batch, each with noise of its own; None is P.
        timesteps: how many of the run's schedule, from its first to its last; one alone is the middle one. A batch's
            rows are dealt out among them.
        one_pass: as in `predict_halves`: how the rollout asks for the two halves of the guidance.
    """

    prompts: PromptTable
    rows: int | None = None
    timesteps: int = 1
    one_pass: bool = True


@dataclass(frozen=True)
class CanaryLimits:
    """How far a rollout's velocity may be from the trainer's.

    Attributes:
        tolerance: see `check_canary`.
        missing_share: see `check_change`.
    """

    tolerance: float = 0.0
    missing_share: float = 0.75


class Agreement(NamedTuple):
    """How well two velocities agree.

    Attributes:
        difference: |rollout - trainer| / |trainer|.
        change: of the trainer's own since the last sync, |trainer - last| / |trainer|; None at the first.
        missing: the share of that change which the rollout's lacks; None at the first, and where nothing changed.
    """

    difference: float
    change: float | None = None
    missing: float | None = None

    @classmethod
    def worst(cls, agreements: Sequence["Agreement"]) -> "Agreement":
        """The largest of each over several workers."""
        difference, change, missing = zip(*agreements, strict=True)
        return cls(max(difference), _largest(change), _largest(missing))


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class CanaryLayout:
    """How S timesteps and P prompts are dealt out to batches of one size.

    They are as few as show every prompt at every timestep; where they are smaller than P, as many as they have rows.

    Attributes:
        prompt, step: of each row, [batches, rows].
    """

    prompt: Tensor
    step: Tensor

    @classmethod
    def of(cls, prompts: int, rows: int, steps: int) -> "CanaryLayout":
        """Rows go through the prompts, and after each round of them to the next timestep."""
        shown = min(prompts, rows)
        batches = -(-steps * shown // rows)
        row = torch.arange(batches * rows).view(batches, rows)
        return cls(row % shown, row // shown % steps)

    def by_step(self, velocities: Tensor, steps: int) -> Tensor:
        """Velocities [batches rows, ...] as [S, n, ...]. A timestep that has fewer than n rows is filled up with
        zeros, which are in no norm and no product of two velocities."""
        of_step = [velocities[self.step.flatten() == number] for number in range(steps)]
        return torch.nn.utils.rnn.pad_sequence(of_step, batch_first=True)


def canary_batch(
    adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, canary: Canary, device: torch.device | str
) -> tuple[PromptTable, Tensor, Tensor]:
    """The canary's prompts, which of them each row of a batch has [rows], and the rows' noise [rows, ...]."""
    prompts, count = canary.prompts.to(device), len(canary.prompts.prompt_embeds)
    index = torch.arange(canary.rows or count, device=device) % count
    return prompts, index, _noise(adapter, model_config, range(len(index)), device)


def _noise(
    adapter: type[DiffusionModelBase],
    model_config: DiffusionModelConfig,
    rows: Sequence[int],
    device: torch.device | str,
) -> Tensor:
    keys = [NoiseKey(0, 0, "canary", row) for row in rows]
    return draw(keys, INITIAL_NOISE, adapter.latent_shape(model_config), device)


@torch.no_grad()
def canary_velocity(
    adapter: type[DiffusionModelBase],
    module: nn.Module,
    model_config: DiffusionModelConfig,
    canary: Canary,
    device: torch.device | str,
) -> Tensor:
    """The network's outputs for the canary at its S timesteps, [S, n, ...], fp32 on the CPU, n the most rows that a
    timestep has (`CanaryLayout`); with guidance [S, 2 n, ...], those of the negative prompt last: guidance would
    multiply the difference that rounding makes between two engines."""
    prompts, timesteps = canary.prompts.to(device), _timesteps(adapter, model_config, canary.timesteps)
    count = len(prompts.prompt_embeds)
    layout = CanaryLayout.of(count, canary.rows or count, len(timesteps))
    outputs: list[list[Tensor]] = []
    for number, (prompt, step) in enumerate(zip(layout.prompt, layout.step, strict=True)):
        halves_of = halves_field(adapter, module, model_config, prompts, prompt.to(device), canary.one_pass)
        rows = range(number * len(prompt), (number + 1) * len(prompt))
        halves = halves_of(_noise(adapter, model_config, rows, device), timesteps[step].to(device))
        outputs.append([half.float() for half in halves if half is not None])
    by_step = [layout.by_step(torch.cat(of_half).cpu(), len(timesteps)) for of_half in zip(*outputs, strict=True)]
    return torch.cat(by_step, dim=1)


def _timesteps(adapter: type[DiffusionModelBase], model_config: DiffusionModelConfig, count: int) -> Tensor:
    """Of the run's own schedule, as the network is fed them; [count], or all where it has fewer."""
    there = adapter.build_scheduler(model_config).timesteps
    if count == 1:
        return there[len(there) // 2 :][:1]
    return there[torch.linspace(0, len(there) - 1, min(count, len(there))).round().long()]


def relative_difference(one: Tensor, other: Tensor) -> float:
    """|other - one| / |one| of velocities [S, n, ...], at the timestep where it is largest; not finite where one of
    them is not, and 0 where both are 0, as those of a network whose last layer is new."""
    rows, others = one.reshape(len(one), -1), other.reshape(len(one), -1)
    apart = (others - rows).norm(dim=1)
    return torch.where(apart == 0, 0.0, apart / rows.norm(dim=1)).max().item()


def check_canary(trainer: Tensor, rollout: Tensor, version: int, tolerance: float) -> float:
    """Relative difference |rollout - trainer| / |trainer| of the two velocities.

    Args:
        trainer, rollout: [S, n, ...], velocities of the two sides.
        version: policy version, for the message.
        tolerance: largest difference allowed; 0 demands equal bits.

    Raises:
        WeightSyncError: they differ by more, or are not finite.
    """
    difference = relative_difference(trainer, rollout)
    if math.isnan(difference):
        whose = "trainer's" if not trainer.isfinite().all() else "rollout actor's"
        raise WeightSyncError(
            f"after the weight sync of policy version {version} the {whose} velocity is not finite: look at the update "
            "before it, or at the weights that the run began with"
        )
    if not difference <= tolerance:
        raise WeightSyncError(
            f"after the weight sync of policy version {version} a rollout actor's velocity differs from the "
            f"trainer's by {difference:.3g} (relative), allowed {tolerance:.3g}: it would sample another policy"
        )
    return difference


def missing_share(last: Tensor, trainer: Tensor, rollout: Tensor) -> float | None:
    """The share of the trainer's last change that a rollout's velocity lacks: <e, c> / <c, c>.

    c = trainer - last, e = trainer - rollout. It is 0 where the rollout computes as the trainer does, and 1 with the
    weights of the last sync or of any before, since all lack the last change. Where every velocity has rounding of its
    own, of size r in units of the exact change, it is r^2 / (1 + 2 r^2) and (1 + r^2) / (1 + 2 r^2): both go to 1/2
    where rounding is larger than the change, so a limit well above 1/2 does not refuse the right weights.

    Args:
        last: [S, n, ...], the trainer's velocity at the last sync.
        trainer, rollout: [S, n, ...], of the two sides now.

    Returns:
        the share; None where there is no change.
    """
    change, lack = (trainer - last).double().flatten(), (trainer - rollout).double().flatten()
    size = change.dot(change)
    return None if size == 0 else (lack.dot(change) / size).item()


def check_change(
    last: Tensor, trainer: Tensor, rollout: Tensor, version: int, limit: float
) -> tuple[float, float | None]:
    """(relative change of the trainer's velocity since the last sync, `missing_share`).

    Args:
        last, trainer, rollout: [S, n, ...], as `missing_share`.
        version: policy version, for the message.
        limit: largest share allowed.

    Raises:
        WeightSyncError: more of the change is missing.
    """
    moved, missing = relative_difference(trainer, last), missing_share(last, trainer, rollout)
    if missing is not None and missing > limit:
        raise WeightSyncError(
            f"after the weight sync of policy version {version} a rollout actor's velocity lacks {missing:.3g} of the "
            f"trainer's change since the sync before ({moved:.3g}, relative), allowed {limit:.3g}: it still samples "
            "with older weights"
        )
    return moved, missing


def check_velocity(
    trainer: Tensor, rollout: Tensor, last: Tensor | None, version: int, limits: CanaryLimits
) -> Agreement:
    """`check_canary`, and `check_change` where there was a sync before; velocities are [S, n, ...]."""
    difference = check_canary(trainer, rollout, version, limits.tolerance)
    if last is None:
        return Agreement(difference)
    return Agreement(difference, *check_change(last, trainer, rollout, version, limits.missing_share))
