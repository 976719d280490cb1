# SPDX-License-Identifier: Apache-2.0
"""What passes between the driver and the processes of a run, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from models.errors import DoubleflowError
from models.samples.trajectories import FinishedLatents, Samples
from models.schedulers.noise_keys import NoiseKey
from models.training.engine import HeldWeights
from models.weights.buckets import HostBucket
from models.weights.canary import Agreement, CanaryLimits
from models.weights.digests import Digests

T = TypeVar("T")
Sent: TypeAlias = T | ray.ObjectRef
"""A field of a reply: the value where it is made and where it is got, a reference in the driver, see `ask`."""
R = TypeVar("R", bound=NamedTuple)


BUSY_SECONDS = "busy_seconds"
"""Among an update's metrics: what a rank spent on it, its early steps included."""


class SampleMismatch(DoubleflowError, RuntimeError):
    """The samples that reached a trainer rank are not those that its advantages belong to."""


def ask(reply: type[R], method: Any, *arguments: Any, **options: Any) -> R:
    """Call an actor's method that returns a `reply`, a named tuple of this module; here with a reference in each field,
    so that nothing of it comes to the driver but what is asked for. `options` are Ray's, of the call."""
    return reply(*method.options(num_returns=len(reply._fields), **options).remote(*arguments))


def reference(field: Sent[Any] | None) -> ray.ObjectRef:
    """A field of a reply that the driver has asked for."""
    assert isinstance(field, ray.ObjectRef), f"`ask` brings references, and this is a {type(field).__name__}"
    return field


class Address(NamedTuple):
    """Where the processes of a group meet.

    Attributes:
        host: of the process that waits there.
        port: on it.
    """

    host: str
    port: int


class RolloutReply(NamedTuple):
    """What a rollout worker made of one batch.

    Attributes:
        recorded: `Trajectories` or `FinishedLatents`, as the request asks; None where it asks for neither.
        pictures: uint8 [B, H, W, 3] ([B, F, H, W, 3] of video), None where none were asked for.
        latents: fp32 [B, ...], likewise.
        finite: bool [B], see `Generated`.
        seconds: that sampling took; 0 where it was read from a file.
    """

    recorded: Sent[Samples | None]
    pictures: Sent[np.ndarray | None]
    latents: Sent[np.ndarray | None]
    finite: Sent[np.ndarray]
    seconds: Sent[float]


class BothLogProbs(NamedTuple):
    """Log-probs of the same samples under two sets of weights, fp32 [m, W] each.

    Attributes:
        own: under the trainer's present weights.
        rollout: as the rollout recorded them.
    """

    own: torch.Tensor
    rollout: torch.Tensor


class Rescored(NamedTuple):
    """What a trainer rank says of one batch of trajectories.

    Attributes:
        log_probs: its own, and the rollout's beside them.
        means: [m, W, ...], or None where they were not asked for.
    """

    log_probs: Sent[BothLogProbs]
    means: Sent[torch.Tensor | None]


class Amount(NamedTuple):
    """How much was sent.

    Attributes:
        buckets: their number.
        size: of all of them, in bytes.
    """

    buckets: int
    size: int


class GatheredWeights(NamedTuple):
    """A trainer rank's weights as a whole, for Ray's object store.

    Attributes:
        tensors: in buckets; none on all ranks but 0.
        digests: of them, likewise.
        amount: of the weights.
        seconds: that it took.
    """

    tensors: Sent[list[HostBucket]]
    digests: Sent[Digests]
    amount: Sent[Amount]
    seconds: Sent[float]


class CopiedWeights(NamedTuple):
    """A trainer rank's weights once more, as a whole, for workers that have to be started again.

    Attributes:
        tensors: in buckets; none on all ranks but 0.
        amount: of them.
    """

    tensors: Sent[list[HostBucket]]
    amount: Sent[Amount]


@dataclass(frozen=True)
class HeldByTrainer:
    """Weights that the trainer holds for as long as samples are to come from them.

    Attributes:
        ranks: of the trainer.
        which: see `TrainingEngine.holding`.
    """

    ranks: tuple[ActorHandle, ...]
    which: HeldWeights


class SentWeights(NamedTuple):
    """Weights that a trainer rank sent directly.

    Attributes:
        digests: of them; empty on all ranks but 0.
        amount: of the weights.
        seconds: that it took.
    """

    digests: Sent[Digests]
    amount: Sent[Amount]
    seconds: Sent[float]


class CanaryAnswer(NamedTuple):
    """What a trainer rank's model predicts for the canary.

    Attributes:
        velocity: [S, n, ...], see `canary_velocity`.
        seconds: that it took.
    """

    velocity: Sent[torch.Tensor]
    seconds: Sent[float]


class Loaded(NamedTuple):
    """What a rollout worker found out of weights that it took.

    Attributes:
        agreement: of its canary with the trainer's.
        seconds: what it spent its time on, one after the other: `load` (with waiting for weights that come by Ray's
            object store), `digests`, `rollout_canary`, `wait` (for the trainer's digests and canary), `compare`.
    """

    agreement: Agreement
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Proof:
    """What a rollout worker must find out for itself, by references: it goes on with its own part until they are there.

    Attributes:
        digests: of the weights that the trainer sent.
        velocity: the trainer's, see `canary_velocity`.
        last: its velocity at the sync before; None at the first.
    """

    digests: ray.ObjectRef
    velocity: ray.ObjectRef
    last: ray.ObjectRef | None = None


@dataclass(frozen=True)
class PolicyWeights:
    """Weights that samples are to come from. A worker that was started again finds its way back to them.

    Attributes:
        number: counts the weights of this run; a worker that holds the number has nothing to do.
        source: reference to the trainer's weights, a list of `HostBucket`, or to a `HeldByTrainer`, who copies them for
            a worker that asks; in a tuple, so that Ray hands on the reference; or none.
        buckets: so many came to the worker directly, see `tasks.actors.weight_transport`; where they did not, or not
            all of them, it goes to the `source`.
        folder: where a run exported them, if they are not a trainer's.
        canary: reference to the input from which the worker must repeat the trainer's answer, in a tuple: every request
            for samples has these weights with it, and embeddings are large. Empty asks for no proof.
        proof: of these weights; None where no proof is asked for.
        version, limits: see `check_velocity`.
    """

    number: int
    source: tuple[ray.ObjectRef, ...] = ()
    buckets: int = 0
    folder: Path | None = None
    canary: tuple[ray.ObjectRef, ...] = ()
    proof: Proof | None = None
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
