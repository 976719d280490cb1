# SPDX-License-Identifier: Apache-2.0
"""What passes between the driver and the processes of a run, by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
import torch

from models.errors import DoubleflowError
from models.samples.trajectories import FinishedLatents
from models.schedulers.noise_keys import NoiseKey
from models.weights.canary import Canary, CanaryLimits

R = TypeVar("R", bound=NamedTuple)


class SampleMismatch(DoubleflowError, RuntimeError):
    """The samples that reached a trainer rank are not those that its advantages belong to."""


def ask(reply: type[R], method: Any, *arguments: Any) -> R:
    """Call an actor's method that returns a `reply`, a named tuple of this module; here with a reference in each field,
    so that nothing of it comes to the driver but what is asked for."""
    return reply(*method.options(num_returns=len(reply._fields)).remote(*arguments))


class RolloutReply(NamedTuple):
    """What a rollout worker made of one batch.

    Attributes:
        recorded: what the request asks to be recorded, `Trajectories` or `FinishedLatents`.
        pictures: uint8 numpy [B, H, W, 3] ([B, F, H, W, 3] of video), None where none were asked for.
        latents: fp32 numpy [B, ...], likewise.
        seconds: that sampling took; 0 where it was read from a file.
    """

    recorded: Any
    pictures: Any
    latents: Any
    seconds: Any


class Rescored(NamedTuple):
    """What a trainer rank says of one batch of trajectories.

    Attributes:
        log_probs: (its own, the rollout's), fp32 [m, W] each, under the present weights.
        means: [m, W, ...], or None where they were not asked for.
    """

    log_probs: Any
    means: Any


class GatheredWeights(NamedTuple):
    """A trainer rank's weights as a whole, for Ray's object store.

    Attributes:
        tensors: by name; empty on all ranks but 0.
        proof: what a worker must find out of them.
        size: bytes.
    """

    tensors: Any
    proof: Any
    size: Any


class SentWeights(NamedTuple):
    """Weights that a trainer rank sent directly.

    Attributes:
        proof: what a worker must find out of them.
        amount: (buckets, bytes).
    """

    proof: Any
    amount: Any


@dataclass(frozen=True)
class PolicyWeights:
    """Weights that samples are to come from. A worker that was started again finds its way back to them.

    Attributes:
        number: counts the weights of this run; a worker that holds the number has nothing to do.
        tensors: reference to the trainer's weights, in a list so that Ray hands on the reference; or none.
        buckets: so many came to the worker directly, see `tasks.actors.weight_transport`; where they did not, or not
            all of them, it takes `tensors`.
        folder: where a run exported them, if they are not a trainer's.
        canary: the input from which the worker must repeat the trainer's answer; None asks for no proof.
        proofs: references to the trainer's `Proof` of these weights and, after the first sync, of those before.
        version, limits: see `check_velocity`.
    """

    number: int
    tensors: tuple[ray.ObjectRef, ...] = ()
    buckets: int = 0
    folder: Path | None = None
    canary: Canary | None = None
    proofs: tuple[ray.ObjectRef, ...] = ()
    version: int = 0
    limits: CanaryLimits = field(default_factory=CanaryLimits)


@dataclass(frozen=True)
class RankBatch:
    """One batch of samples, as a trainer rank learns from it.

    Attributes:
        samples: trajectories or finished latents; of what was sampled a reference.
        keys: of its samples, in the order of the advantages.
        advantages: [B], NaN where a sample is left out.
        old: the trainer's own scores; None where the rollout's are the old ones.
    """

    samples: ray.ObjectRef | FinishedLatents
    keys: tuple[NoiseKey, ...]
    advantages: np.ndarray
    old: "OldBatch | None"


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's share of one optimiser step.

    Attributes:
        parts: its batches.
        global_count: samples that count, over all ranks; see `ActorBatch`.
    """

    parts: tuple[RankBatch, ...]
    global_count: float


@dataclass(frozen=True)
class OldBatch:
    """The trainer's own scores of one batch, before the first optimiser step.

    Attributes:
        log_probs: [m, W].
        is_weights: [m, W] or None; see `models.algorithms.Correction`.
        means: reference to [m, W, ...], or to None where the loss does not ask for means.
    """

    log_probs: torch.Tensor
    is_weights: torch.Tensor | None
    means: ray.ObjectRef
