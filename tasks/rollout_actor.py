"""The rollout worker: a Ray actor with one engine and its weights."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from models.base import DiffusionModelConfig
from models.config import DiffusionPipelineConfig
from models.engines.canary import Canary, check_canary
from models.engines.rollout_engine import RolloutEngine
from models.engines.samples_file import read_samples, write_samples
from models.engines.trajectories import LATENTS, PICTURES, RolloutRequest, Samples
from models.engines.weights import WeightSyncError
from tasks.config import DiffusionRolloutConfig
from tasks.memory import measures_gpu_memory
from tasks.weight_transport import Arrival, Courier, Parcel


@dataclass(frozen=True)
class PolicyWeights:
    """Weights that samples are to come from. A worker that was started again finds its way back to them.

    Attributes:
        number: counts the weights of this run; a worker that holds the number has nothing to do.
        tensors: reference to the trainer's weights, in a list so that Ray hands on the reference; or none.
        buckets: so many came to the worker directly, see `tasks.weight_transport`; where they did not, or not all of
            them, it takes `tensors`.
        folder: where a run exported them, if they are not a trainer's.
        canary, velocity: input and the trainer's answer (a reference, in a list), which the worker must repeat.
        version, tolerance: see `check_canary`.
    """

    number: int
    tensors: tuple[ray.ObjectRef, ...] = ()
    buckets: int = 0
    folder: Path | None = None
    canary: Canary | None = None
    velocity: tuple[ray.ObjectRef, ...] = ()
    version: int = 0
    tolerance: float = 0.0


def _stage_of(_request: RolloutRequest, pipeline: DiffusionPipelineConfig | None, _weights: Any) -> str:
    return "gen" if pipeline is None else "testing"


class RolloutActor:
    """One rollout worker: an engine and its weights."""

    @measures_gpu_memory("load")
    def __init__(self, model_config: DiffusionModelConfig, settings: DiffusionRolloutConfig, device: str):
        import models.families  # noqa: F401  registers the adapters in this process

        torch.set_num_threads(settings.num_threads)
        self.engine = _engine(model_config, settings, device)
        self.held, self.difference, self.device = 0, 0.0, device
        self.courier = Courier(device)
        self.arrival: Arrival | None = None

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    @measures_gpu_memory(_stage_of)
    def generate(
        self, request: RolloutRequest, pipeline: DiffusionPipelineConfig | None, weights: PolicyWeights | None
    ) -> tuple[Any, ...]:
        """(what the request asks to be recorded, pictures uint8 [B, H, W, 3], latents fp32 [B, ...], seconds it took).

        Pictures and latents are numpy, or None where the request does not ask for them.
        """
        start = time.perf_counter()
        if weights is not None:
            self.hold(weights)
        made = self.engine.produce(request, pipeline)
        pictures, latents = (None if kept is None else kept.numpy() for kept in (made.pictures, made.latents))
        return made.recorded, pictures, latents, time.perf_counter() - start

    def write(self, file: Path, recorded: Samples, pictures: np.ndarray | None, latents: np.ndarray | None) -> None:
        """Write what `generate` returned."""
        outputs = {PICTURES: pictures, LATENTS: latents}
        # Ray's arrays are read-only, which torch warns about.
        given = {name: torch.from_numpy(np.array(array)) for name, array in outputs.items() if array is not None}
        write_samples(file, recorded, given)

    def read(self, file: Path) -> tuple[Any, ...]:
        """What `generate` returned and `write` wrote; it took no seconds."""
        recorded, outputs = read_samples(file)
        return recorded, *(outputs[name].numpy() if name in outputs else None for name in (PICTURES, LATENTS)), 0.0

    @measures_gpu_memory("update_weights")
    def hold(self, weights: PolicyWeights) -> float:
        """Take these weights, unless they are there already; the canary's relative difference to the trainer's.

        Raises:
            WeightSyncError: the engine does not take them, or its canary is beyond the tolerance.
        """
        if self.held != weights.number:
            self._load(weights)
            if weights.canary is not None:
                own, expected = self.engine.canary_velocity(weights.canary), ray.get(weights.velocity[0])
                self.difference = check_canary(expected, own, weights.version, weights.tolerance)
            self.held = weights.number
        return self.difference

    def take(self, parcel: Parcel) -> None:
        """The next bucket of weights that the trainer sends directly. `hold` follows the last one."""
        if parcel.index == 0:
            self.held, self.arrival = 0, Arrival(parcel.number, self.engine.begin_load(), self.device)
        weights = self.courier.receive(parcel)
        if self.arrival is not None:  # else this process is younger than the transfer, and `hold` takes another way
            self.arrival.take(weights)

    def _load(self, weights: PolicyWeights) -> None:
        arrival, self.arrival = self.arrival, None
        if weights.folder is not None:
            self.engine.load_exported(weights.folder)
        elif weights.buckets and arrival is not None and arrival.finish(weights.number, weights.buckets):
            return
        elif weights.tensors:
            self.engine.load_weights(ray.get(weights.tensors[0]))
        else:
            raise WeightSyncError(
                f"policy version {weights.version} did not reach a rollout worker, and rollout.max_restarts is 0, so "
                "that no copy is kept for such a one"
            )

    def sleep(self) -> None:
        """Give up the GPU's memory until `wake`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Be ready for new weights and samples."""
        self.engine.wake()


def _engine(model_config: DiffusionModelConfig, settings: DiffusionRolloutConfig, device: str) -> RolloutEngine:
    if settings.name == "vllm_omni":
        from models.engines.vllm_omni.engine import VllmOmniRolloutEngine

        return VllmOmniRolloutEngine(
            model_config,
            settings.vllm_omni,
            max_num_seqs=settings.micro_batch_size,
            sleep_mode=settings.placement == "colocated",
        )
    from models.engines.diffusers_rollout import DiffusersRolloutEngine

    return DiffusersRolloutEngine(model_config, device)
