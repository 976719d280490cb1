# SPDX-License-Identifier: Apache-2.0
"""What an optimiser step trains on, and how its metrics are averaged."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from models.algorithms.losses import IS_WEIGHTS, OLD_MEAN
from models.families.base import UNCONDITIONAL
from models.samples.trajectories import Samples, Trajectories
from models.training.noised import NoisedLatents

if TYPE_CHECKING:
    from tensordict import TensorDict

S = TypeVar("S", bound=Samples, covariant=True)
COUNTED = "counted"
"""Which samples [B] of a micro-batch count, where not all do: the others are computed with them and in no mean."""


@dataclass(frozen=True)
class ActorBatch(Generic[S]):
    """What one rank trains on in one optimiser step.

    Attributes:
        parts: this rank's samples, each batch with its advantages [B]: trajectories or finished latents as they were
            sampled, or trajectories or noised latents as micro-batches. A NaN advantage (a missing reward) leaves the
            sample out, a NaN in the trajectories' `is_weights` that step of it.
        global_count: samples of the mini-batch that count, over all ranks; one of which only some steps count is that
            part of a sample. Losses of the forward process choose, and count, for themselves.
    """

    parts: Sequence[tuple[S, Tensor]]
    global_count: float

    def cut(self, size: int) -> "ActorBatch[S]":
        """The same as micro-batches of at most `size` samples; what is smaller is never merged: a merged batch is
        padded and blocked differently, and would not replay its log-probs to the last bit."""
        pieces: list[tuple[S, Tensor]] = []
        for samples, advantages in self.parts:
            if len(samples) <= size:  # to copy it would take as long as to send it to the GPU
                pieces.append((samples, advantages))
                continue
            for index in torch.arange(len(samples)).split(size):
                pieces.append((samples.rows(index), advantages[index]))
        return ActorBatch(pieces, self.global_count)

    @property
    def records_unconditional(self) -> bool:
        """Do the samples bring the half of the guidance without the prompt?"""
        return any(isinstance(s, Trajectories) and s.unconditional is not None for s, _ in self.parts)


def micro_batches_of(
    samples: Trajectories | NoisedLatents, advantages: Tensor, together: int, device: torch.device | str
) -> Iterator[tuple["TensorDict", int, bool]]:
    """The inputs of each forward pass over the samples, of windows of one step or of single levels: what
    `micro_batch_of` gives, and whether it is the last. All have the same rows of the prompts, which are taken once.

    Args:
        samples: on `device`.
        advantages: [B], on the CPU, NaN where a sample does not count.
        together: of a window's steps are rows of one pass; noised latents have theirs as rows already.
    """
    passes: Sequence[Trajectories | NoisedLatents]
    if isinstance(samples, NoisedLatents):
        passes = [samples.step(level) for level in range(samples.steps)]
    else:
        passes = samples.passes(together)
    texts: dict[int, dict[str, Any]] = {}
    for number, rows in enumerate(passes):
        if len(rows) not in texts:  # the last pass may have fewer
            texts[len(rows)] = rows.prompts.expand(rows.prompt_index)
        micro_batch, counted = micro_batch_of(rows, advantages, device, texts[len(rows)])
        yield micro_batch, counted, number == len(passes) - 1


def micro_batch_of(
    samples: Trajectories | NoisedLatents,
    advantages: Tensor,
    device: torch.device | str,
    text: Mapping[str, Any] | None = None,
) -> tuple["TensorDict", int]:
    """Inputs of one forward pass, each of whose rows is a sample at a timestep, and how many of its rows count.

    Where only some do, the others stay in it and COUNTED says which do: a batch of another size would be rounded
    otherwise than the one that was sampled, and be compiled anew.

    Args:
        samples: rows of one step or level, on `device`.
        advantages: [B] of the samples that the rows are of, all B at one step after the other; on the CPU, NaN where
            a sample does not count.
        text: the samples' rows of their prompt table (`PromptTable.expand`), where another pass has them already.
    """
    from tensordict import TensorDict  # here: it imports torch's compiler, and whoever hands batches over needs it not

    tensors: dict[str, Tensor | None]
    advantages = advantages.repeat(len(samples) // len(advantages))
    if isinstance(samples, NoisedLatents):
        counted = ~advantages.isnan()
        number = int(counted.sum())
        tensors = {"clean_latents": samples.latents, **samples.levelwise()}
    else:
        counted = which_count(samples, advantages)
        number = int(counted.sum())
        if number == 0:  # every rank must take part in the collectives: one sample is computed, and weighted 0
            samples, advantages, counted, text = samples.rows(torch.tensor([0])), advantages[:1], counted[:1], None
        samples, text = _computable(samples, counted, text)
        weights = samples.is_weights
        tensors = {
            "latents": samples.latents,
            "timesteps": samples.timesteps,
            "old_log_probs": samples.log_probs,
            OLD_MEAN: samples.means,
            UNCONDITIONAL: samples.unconditional,
            IS_WEIGHTS: None if weights is None else weights.nan_to_num(0.0),
        }
    # Copies that the CPU does not wait for: it hands over the next pass while the GPU computes this one.
    tensors[COUNTED] = counted.to(device, non_blocking=True) if 0 < number < len(counted) else None
    tensors["advantages"] = advantages.nan_to_num(0.0).to(device, non_blocking=True)
    tensors |= samples.prompts.expand(samples.prompt_index) if text is None else text
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return TensorDict(present, batch_size=[len(advantages)]), number


def which_count(trajectories: Trajectories, advantages: Tensor) -> Tensor:
    """Which samples [B] count in a window of one step, on the CPU: neither reward nor weight is missing.

    Args:
        trajectories: B samples of one step.
        advantages: [B], NaN where the reward is missing.
    """
    counted = ~advantages.isnan()
    if trajectories.is_weights is not None:
        counted = counted & ~trajectories.is_weights[:, 0].isnan().cpu()
    return counted


def _computable(
    trajectories: Trajectories, counted: Tensor, text: Mapping[str, Any] | None
) -> tuple[Trajectories, Mapping[str, Any] | None]:
    """The same samples and rows of their prompts, but zeros in those that do not count and overflowed as they were
    sampled, be it by their text: 0 times what is not finite is NaN, and would be in the gradient of all."""
    if counted.all():
        return trajectories, text
    spoilt = ~(counted.to(trajectories.log_probs.device, non_blocking=True) | trajectories.log_probs[:, 0].isfinite())

    def cleared(tensor: Any) -> Any:
        if tensor is None or not tensor.is_floating_point() or tensor.stride(0) == 0:
            return tensor  # of a negative prompt that all share a copy might round otherwise
        return tensor.masked_fill(spoilt.view(-1, *[1] * (tensor.ndim - 1)), 0.0)

    names = ("latents", "log_probs", "means", "unconditional")
    rows = trajectories.prompts.expand(trajectories.prompt_index) if text is None else text
    kept: dict[str, Any] = {name: cleared(getattr(trajectories, name)) for name in names}
    return replace(trajectories, **kept), {name: cleared(tensor) for name, tensor in rows.items()}


class WeightedMetrics:
    """Averages of metrics over samples; names ending in /max keep the largest value.

    What a GPU has computed stays there until `combined`: to read a number is to wait for all that was asked of it, and
    meanwhile nothing new is.
    """

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[Any, float]]] = defaultdict(list)

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Numbers that stand for `weight` samples; with none they say nothing and are left out."""
        if weight:
            for name, value in metrics.items():
                kept = value.detach() if isinstance(value, Tensor) else float(value)
                self.entries[name].append((kept, weight))

    def join(self, other: "WeightedMetrics") -> None:
        """Take another's numbers too."""
        for name, entries in other.entries.items():
            self.entries[name] += entries

    def combined(self) -> dict[str, float]:
        """Name -> average or maximum."""
        values = iter(_read([value for entries in self.entries.values() for value, _ in entries]))
        read = {name: [(next(values), weight) for _, weight in entries] for name, entries in self.entries.items()}
        return {
            name: max(value for value, _ in entries)
            if name.endswith("/max")
            else sum(value * weight for value, weight in entries) / sum(weight for _, weight in entries)
            for name, entries in read.items()
        }


@dataclass
class UpdateRecord:
    """What the optimiser steps of one update have told so far.

    Attributes:
        metrics: of the steps that were taken.
        steps: taken or left out.
        counted: samples times timesteps of all of them.
        first_counted: of the first step.
        recorded: of the first step, where the half of the guidance without the prompt came with the samples.
        left_out: steps whose gradient was not finite.
        left_out_counted: samples times timesteps of those.
    """

    metrics: WeightedMetrics = field(default_factory=WeightedMetrics)
    steps: int = 0
    counted: int = 0
    first_counted: int = 0
    recorded: int = 0
    left_out: int = 0
    left_out_counted: int = 0

    def combined(self) -> dict[str, float]:
        """The metrics' averages, and beside them the counts."""
        return self.metrics.combined() | {
            "sample_steps": self.counted,
            "first_sample_steps": self.first_counted,
            "recorded_steps": self.recorded,
            "nonfinite_steps": self.left_out,
            "nonfinite_sample_steps": self.left_out_counted,
        }


def _read(values: Sequence[Any]) -> list[float]:
    """Numbers and scalar tensors as numbers, with one wait for each device and number format among them."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            kinds[value.device, value.dtype].append(place)
    read = list(values)
    for places in kinds.values():
        together = torch.stack([values[place].reshape(()) for place in places]).tolist()
        for place, number in zip(places, together, strict=True):
            read[place] = float(number)
    return read
