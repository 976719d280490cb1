"""What passes between the driver and the processes of a run, by name."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray

from models.weights.canary import Canary, CanaryLimits


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
class RankMiniBatch:
    """One rank's share of one optimiser step.

    Attributes:
        positions: which of the references handed to the rank.
        advantages: of each of those batches, [B].
        global_count: samples that count, over all ranks; see `ActorBatch`.
    """

    positions: tuple[int, ...]
    advantages: tuple[np.ndarray, ...]
    global_count: float
