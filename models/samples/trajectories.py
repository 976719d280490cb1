# SPDX-License-Identifier: Apache-2.0
"""What passes between rollout and update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from models.samples.pickled import PickledAsBytes
from models.schedulers.noise_keys import NoiseKey, copy_without_waiting

PICTURES, LATENTS = "pictures", "latents"
"""What an engine may be asked to leave of finished samples."""
FINITE = "finite"
"""What it always says of them: which hold no NaN and no infinity."""


@dataclass(frozen=True)
class PromptTable(PickledAsBytes):
    """Encoded prompts, one row a prompt and not one a sample: embeddings travel once.

    Attributes:
        prompt_embeds: [P, L, D].
        prompt_embeds_mask: [P, L], true at real tokens.
        negative_prompt_embeds: [N, L', D] or None without guidance; N is 1, for all prompts, or P, for each its own.
        negative_prompt_embeds_mask: [N, L'] or None.
        extras: what a family needs besides, by name: [P, ...] such as `pooled_prompt_embeds`, and [N, ...] where the
            name begins with `negative_`. Empty for most.
    """

    prompt_embeds: Tensor
    prompt_embeds_mask: Tensor
    negative_prompt_embeds: Tensor | None = None
    negative_prompt_embeds_mask: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "PromptTable":
        """A table from tensors by name, of the shapes above; what is no field of it is one of its extras [P, ...]."""
        own = {f.name for f in fields(cls)} - {"extras"}
        extras = {name: tensor for name, tensor in tensors.items() if name not in own}
        return cls(**{name: tensor for name, tensor in tensors.items() if name in own}, extras=extras)

    @property
    def lengths(self) -> tuple[int, int]:
        """(L, L'), L' = 0 without a negative prompt."""
        negative = self.negative_prompt_embeds
        return self.prompt_embeds.shape[1], 0 if negative is None else negative.shape[1]

    def expand(self, index: Tensor) -> dict[str, Any]:
        """Rows for samples, [B, ...] each: the table's fields, None where it has none, and its extras by their names.

        `index` [B] points into the P prompts.
        """
        negative, negative_mask = self.negative_prompt_embeds, self.negative_prompt_embeds_mask
        return {
            "prompt_embeds": self.prompt_embeds[index],
            "prompt_embeds_mask": self.prompt_embeds_mask[index],
            "negative_prompt_embeds": None if negative is None else _of_all_or_each(negative, index),
            "negative_prompt_embeds_mask": None if negative_mask is None else _of_all_or_each(negative_mask, index),
        } | {
            name: _of_all_or_each(tensor, index) if name.startswith("negative_") else tensor[index]
            for name, tensor in self.extras.items()
        }

    def to(self, device: torch.device | str, waiting: bool = True) -> "PromptTable":
        """The same table on another device; without `waiting` the CPU goes on before a GPU has come to it."""
        copy = Tensor.to if waiting else copy_without_waiting
        return self._changed(lambda tensor: copy(tensor, device))

    def zeroed(self) -> "PromptTable":
        """A table like this one, of which each embedding is 0."""
        return self._changed(lambda tensor: torch.zeros_like(tensor) if tensor.is_floating_point() else tensor)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "PromptTable":
        """A table of what `change` makes of each tensor."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        own, extras = ({name: change(tensor) for name, tensor in of.items()} for of in (present, self.extras))
        return replace(self, **own, extras=extras)

    @staticmethod
    def join(tables: Sequence["PromptTable"]) -> "PromptTable":
        """The prompts of several tables one after the other, padded to the longest; the negative prompt of all, or
        each prompt's own where the tables have several."""
        if len(tables) == 1:
            return tables[0]
        names, given = ["prompt_embeds", "prompt_embeds_mask"], [table._negatives() for table in tables]
        first, *others = given
        shared = all(len(tensor) == 1 for tensor in first.values()) and all(_equal(first, other) for other in others)
        joined = {name: _stacked([getattr(table, name) for table in tables]) for name in names}
        joined |= {
            name: torch.cat([table.extras[name] for table in tables])
            for name in tables[0].extras
            if not name.startswith("negative_")
        }
        if not shared:
            each = [table._negative_of_each(part) for table, part in zip(tables, given, strict=True)]
            first = {name: _stacked([part[name] for part in each]) for name in first}
        return PromptTable.of(joined | first)

    def _negatives(self) -> dict[str, Tensor]:
        """What there is of negative prompts, by the names of `of`."""
        own = {name: getattr(self, name) for name in ("negative_prompt_embeds", "negative_prompt_embeds_mask")}
        extras = {name: tensor for name, tensor in self.extras.items() if name.startswith("negative_")}
        return {name: tensor for name, tensor in own.items() if tensor is not None} | extras

    def _negative_of_each(self, negatives: Mapping[str, Tensor]) -> dict[str, Tensor]:
        every = torch.arange(len(self.prompt_embeds))
        return {name: _of_all_or_each(tensor, every) for name, tensor in negatives.items()}


def _of_all_or_each(rows: Tensor, index: Tensor) -> Tensor:
    """[1, ...], which is everyone's, or [P, ...], a row a prompt, as rows for samples [B, ...]."""
    return rows.expand(len(index), *rows.shape[1:]) if len(rows) == 1 else rows[index]


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """[P, L, ...] of several tables, padded to the longest; what has no tokens, [P, D], has one length."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([_padded(part, longest) for part in parts])


def _padded(tokens: Tensor, length: int) -> Tensor:
    """[P, L, ...] with zeros (for a mask: false) up to [P, length, ...]."""
    filling = tokens.new_zeros(tokens.shape[0], length - tokens.shape[1], *tokens.shape[2:])
    return torch.cat([tokens, filling], 1)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a run wants of each batch besides its samples.

    Attributes:
        record_means: also record each window step's mean, for losses that compare means.
        record_unconditional: also record the half of the guidance without the prompt at each window step, for an update
            that takes it as given.
        record_finished: keep the finished latents, for losses that noise them again; the window must be empty.
        outputs: PICTURES, LATENTS or both, for the rewards; decoding can cost as much as a step of denoising.
    """

    record_means: bool = False
    record_unconditional: bool = False
    record_finished: bool = False
    outputs: frozenset[str] = frozenset({PICTURES})


PICTURES_ALONE = Recording()


@dataclass(frozen=True)
class RolloutRequest(Recording):
    """One batch to sample; it is never split or merged, so that its arithmetic is the same wherever it runs.

    Attributes:
        keys: B noise keys, one a sample.
        prompts: the prompts they use.
        prompt_index: [B], each sample's row in `prompts`.
        window: stochastic steps, ascending; empty samples the ODE.
    """

    keys: tuple[NoiseKey, ...]
    prompts: PromptTable
    prompt_index: Tensor
    window: tuple[int, ...]

    def filled_up(self, rows: int) -> "RolloutRequest":
        """A batch of so many rows, no fewer than B: these samples, and then the same again as often as it takes."""
        order = [row % len(self.keys) for row in range(rows)]
        return replace(self, keys=tuple(self.keys[row] for row in order), prompt_index=self.prompt_index[order])

    def check_window(self, noise_level: float) -> None:
        """Raise ValueError for a window where nothing is stochastic: at noise level 0, or where the ODE is recorded."""
        if self.window and self.record_finished:
            raise ValueError("finished latents are recorded for the ODE: leave the window empty")
        if self.window and noise_level == 0:
            raise ValueError("a window of stochastic steps needs algo.noise_level above 0; leave it empty for the ODE")


@dataclass(frozen=True)
class Samples(PickledAsBytes):
    """B samples with their noise keys and prompts; every tensor but the prompt table's has a row for each.

    Attributes:
        keys: noise key of each sample.
        prompts: the prompts.
        prompt_index: [B], row of each sample's prompt.
    """

    keys: tuple[NoiseKey, ...]
    prompts: PromptTable
    prompt_index: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, index: Tensor) -> Self:
        """The samples at `index` [b], with the whole prompt table."""
        kept = {name: tensor[index] for name, tensor in self._samplewise().items()}
        return replace(self, keys=tuple(self.keys[i] for i in index.tolist()), **kept)

    def to(self, device: torch.device | str, waiting: bool = True) -> Self:
        """The same samples on another device; `waiting` as `PromptTable.to` has it."""
        copy = Tensor.to if waiting else copy_without_waiting
        moved: dict[str, Any] = {name: copy(tensor, device) for name, tensor in self._samplewise().items()}
        return replace(self, prompts=self.prompts.to(device, waiting), **moved)

    def _samplewise(self) -> dict[str, Any]:
        """The tensors with a row for each sample."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class FinishedLatents(Samples):
    """B finished samples, fp32, on the CPU: what the losses of the forward process noise again.

    Attributes:
        latents: [B, ...], x0.
        advantages: [B], once the loss has chosen what to train on.
    """

    latents: Tensor
    advantages: Tensor | None = None

    def scored(self, order: Tensor, advantages: Tensor) -> "FinishedLatents":
        """The samples at `order`, with their advantages out of `advantages` [B]."""
        return replace(self.rows(order), advantages=advantages[order])

    @staticmethod
    def join(parts: Sequence["FinishedLatents"]) -> "FinishedLatents":
        """All samples of the parts in one batch."""
        starts = torch.tensor([0, *(len(part.prompts.prompt_embeds) for part in parts[:-1])]).cumsum(0)
        return FinishedLatents(
            keys=tuple(key for part in parts for key in part.keys),
            prompts=PromptTable.join([part.prompts for part in parts]),
            prompt_index=torch.cat([part.prompt_index + start for part, start in zip(parts, starts, strict=True)]),
            latents=torch.cat([part.latents for part in parts]),
        )


@dataclass(frozen=True)
class Trajectories(Samples):
    """B sampled paths, restricted to the window's W steps; fp32, on the CPU.

    A latent is stored once, also where it is both the end of one step and the start of the next. A consecutive
    window has W+1 of them; each gap in it adds one.

    Attributes:
        window: the W steps, ascending.
        latents: [B, W + runs, ...]: for each run of consecutive steps x before each of them, and x after the last.
        timesteps: [B, W].
        log_probs: [B, W], of the policy that sampled; after `DiffusersFSDPEngine.rescored` of the trainer's.
        means: [B, W, ...], means of the steps under the same policy; None where no loss asks for them.
        unconditional: [B, W, ...], what the network said without the prompt, under the same policy and in the network's
            number format; None where guidance is off or the update computes it.
        is_weights: [B, W], weight of each step in the loss; NaN leaves the step out. None weighs all alike.
    """

    window: tuple[int, ...]
    latents: Tensor
    timesteps: Tensor
    log_probs: Tensor
    means: Tensor | None = None
    unconditional: Tensor | None = None
    is_weights: Tensor | None = None

    @property
    def steps(self) -> int:
        """W."""
        return len(self.window)

    def step(self, number: int) -> "Trajectories":
        """The window's step `number` alone, as a window of one: latents [B, 2, ...], the rest [B, 1, ...]."""
        gaps = sum(after != before + 1 for before, after in pairwise(self.window[: number + 1]))
        at = number + gaps
        one = slice(number, number + 1)
        rest = {name: tensor[:, one] for name, tensor in self._samplewise().items() if name not in _NOT_STEPWISE}
        return replace(self, window=self.window[one], latents=self.latents[:, at : at + 2], **rest)

    def passes(self, together: int) -> list["Trajectories"]:
        """The window's steps, `together` of them at a time (at its end what is left), as rows of windows of one: all
        samples at one step after the other, [together * B, ...]. `window` names the first of these steps."""
        steps = [self.step(number) for number in range(self.steps)]
        return [_as_rows(steps[at : at + together]) for at in range(0, len(steps), together)]


def _as_rows(steps: Sequence[Trajectories]) -> Trajectories:
    """Windows of one step of the same samples, one after the other."""
    first, *others = steps
    if not others:
        return first
    names = first._samplewise()
    joined: dict[str, Any] = {name: torch.cat([getattr(step, name) for step in steps]) for name in names}
    return replace(first, keys=first.keys * len(steps), **joined)


_NOT_STEPWISE = ("prompt_index", "latents")


@dataclass(frozen=True)
class Generated:
    """What an engine makes of a request, on the CPU.

    Attributes:
        pictures: [B, H, W, 3] uint8 (video [B, F, H, W, 3]); None unless the request's outputs name PICTURES.
        latents: finished latents [B, ...] fp32; None unless they name LATENTS.
        recorded: what the trainer needs: trajectories, finished latents, or None.
        finite: [B] bool: are the sample's finished latents, its log-probs and, as the VAE gave them, its pixels
            free of NaN and infinity? What there is none of is not asked.
    """

    pictures: Tensor | None
    latents: Tensor | None
    recorded: Trajectories | FinishedLatents | None
    finite: Tensor

    def first(self, count: int) -> "Generated":
        """The same of the first `count` samples alone."""
        pictures, latents = (None if given is None else given[:count] for given in (self.pictures, self.latents))
        recorded = None if self.recorded is None else self.recorded.rows(torch.arange(count))
        return Generated(pictures, latents, recorded, self.finite[:count])
