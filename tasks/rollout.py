"""Rollout: prompts become trajectories and pictures."""

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.base import DiffusionModelBase, DiffusionModelConfig
from models.config import DiffusionPipelineConfig
from models.engines.canary import Canary, check_canary
from models.engines.rollout_engine import RolloutEngine
from models.engines.samples_file import read_samples, write_samples
from models.engines.trajectories import LATENTS, PICTURES, PromptTable, RolloutRequest, Samples
from models.engines.weights import WeightSyncError
from models.schedulers.noise_keys import NoiseKey
from tasks.clock import Stopwatch
from tasks.cluster import GPU_SHARE, ActorGroup, SharedGpus
from tasks.config import DiffusionRolloutConfig
from tasks.dataset import Prompt, PromptEmbeddings
from tasks.gpu_memory import measures_gpu_memory
from tasks.router import Router
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
        elif weights.buckets:
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


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being sampled.

    Attributes:
        prompts: the prompt of each sample.
        sample_index: which of its prompt's samples each one is.
        trajectories, seconds: what `RolloutActor.generate` returns, as references; in place of trajectories finished
            latents, where the loss noises them again.
        text: tokens of the denoiser's text and of its negative prompt, 0 where there is none.
        pictures, latents: likewise; None where the rollout was not asked for them.
        worker: who samples it.
    """

    prompts: tuple[Prompt, ...]
    sample_index: tuple[int, ...]
    text: tuple[int, int]
    trajectories: ray.ObjectRef
    pictures: ray.ObjectRef | None
    latents: ray.ObjectRef | None
    seconds: ray.ObjectRef
    worker: int


Part = Sequence[tuple[Prompt, int]]
"""The samples of one batch: the prompt, and which of the prompt's samples it is."""


def pending_batch(
    part: Part, text: tuple[int, int], answer: Sequence[ray.ObjectRef], outputs: frozenset[str], worker: int
) -> PendingBatch:
    """A batch from the references to what `RolloutActor.generate` returns."""
    trajectories, pictures, latents, seconds = answer
    return PendingBatch(
        tuple(prompt for prompt, _ in part),
        tuple(index for _, index in part),
        text,
        trajectories,
        pictures if PICTURES in outputs else None,
        latents if LATENTS in outputs else None,
        seconds,
        worker,
    )


class RolloutGroup:
    """The rollout workers, and how an iteration's samples are laid out in batches.

    Batches are cut before they are dealt out, and every draw has a noise key, so the number of workers changes nothing
    but the speed.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        embeddings: PromptEmbeddings,
        settings: DiffusionRolloutConfig,
        *,
        device: str,
        seed: int,
        record_means: bool = False,
        record_unconditional: bool = False,
        record_finished: bool = False,
        outputs: frozenset[str] = frozenset({PICTURES}),
        shared: SharedGpus | None = None,
    ):
        self.embeddings, self.settings, self.seed = embeddings, settings, seed
        self.record_means, self.record_unconditional = record_means, record_unconditional
        self.record_finished, self.outputs = record_finished, outputs
        self.pipeline, self.adapter = model_config.pipeline, DiffusionModelBase.get_class(model_config)
        gpus = 0.0 if device != "cuda" else settings.gpus_per_worker if shared is None else GPU_SHARE
        self.group = ActorGroup(
            RolloutActor,
            settings.num_actors,
            gpus,
            (model_config, settings, device),
            shared=shared,
            max_restarts=settings.max_restarts,
            max_task_retries=settings.max_restarts,
        )
        self.router = Router(len(self.group), settings.max_queued_batches)
        self.weights: PolicyWeights | None = None
        self._numbers = itertools.count(1)

    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int,
        iteration: int,
        window: Sequence[int],
        pipeline: DiffusionPipelineConfig | None = None,
        seed: int | None = None,
        draw: bool = False,
    ) -> list[PendingBatch]:
        """Start sampling every prompt `n` times. Returns when every batch has found a place in a worker's queue.

        Args:
            iteration: names the noise; negative for validation.
            window: stochastic steps; empty for the ODE.
            pipeline: sampling settings, if not the rollout's own.
            seed: of the noise, if not the run's own.
            draw: for looking at, not for training: decode pictures also where no reward asks for them.
        """
        outputs = self.outputs | {PICTURES} if draw else self.outputs
        batches = []
        for part in self.parts(prompts, n):
            request = self._request(
                part, self.seed if seed is None else seed, iteration, window, pipeline, outputs, not draw
            )
            worker = self.router.next_free()
            actor = self.group.actors[worker]
            answer = actor.generate.options(num_returns=4).remote(request, pipeline, self.weights)
            batches.append(pending_batch(part, request.prompts.lengths, answer, outputs, worker))
            self.router.taken(worker, batches[-1].seconds)
        return batches

    def parts(self, prompts: Sequence[Prompt], n: int) -> list[Part]:
        """How `n` samples of every prompt are cut into batches: the prompt and the sample index of each sample."""
        samples, size = [(prompt, index) for prompt in prompts for index in range(n)], self.settings.micro_batch_size
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def on(self, embeddings: PromptEmbeddings) -> "RolloutGroup":
        """The same workers for the prompts of another data set."""
        group = copy.copy(self)
        group.embeddings = embeddings
        return group

    def _request(
        self,
        part: Part,
        seed: int,
        iteration: int,
        window: Sequence[int],
        pipeline: DiffusionPipelineConfig | None,
        outputs: frozenset[str],
        trains: bool = True,
    ) -> RolloutRequest:
        uids = list(dict.fromkeys(prompt.uid for prompt, _ in part))
        keys = tuple(NoiseKey(seed, iteration, prompt.uid, index) for prompt, index in part)
        rows = torch.tensor([uids.index(prompt.uid) for prompt, _ in part])
        table = self.prompt_table(uids, pipeline)
        finished = self.record_finished and trains
        return RolloutRequest(
            keys=keys,
            prompts=table,
            prompt_index=rows,
            window=tuple(window),
            record_means=self.record_means,
            record_unconditional=self.record_unconditional,
            record_finished=finished,
            outputs=outputs,
        )

    def prompt_table(self, uids: Sequence[str], pipeline: DiffusionPipelineConfig | None = None) -> PromptTable:
        """Embeddings of these prompts, each once; the negative prompt's if `pipeline` (the rollout's own) is guided."""
        return prompt_table(self.embeddings, uids, self.adapter.is_guided(pipeline or self.pipeline))

    def load_weights(
        self,
        tensors: ray.ObjectRef | None,
        canary: Canary,
        velocity: ray.ObjectRef,
        version: int,
        tolerance: float,
        sent: tuple[int, int] | None = None,
    ) -> float:
        """Give every worker the same weights; the largest difference of a canary.

        Args:
            tensors: where a worker finds them; None where they were sent and no copy is kept.
            sent: number and buckets of weights that the workers have by now, see `next_number`.

        Raises:
            WeightSyncError: a worker's is beyond the tolerance.
        """
        number, buckets = sent or (self.next_number(), 0)
        kept = () if tensors is None else (tensors,)
        check = {"canary": canary, "velocity": (velocity,), "version": version, "tolerance": tolerance}
        return self._hold(PolicyWeights(number, kept, buckets, **check))

    def next_number(self) -> int:
        """Of the next weights."""
        return next(self._numbers)

    def load_exported(self, folder: Path) -> None:
        """Give every worker the weights that a run exported to `folder`."""
        self._hold(PolicyWeights(self.next_number(), folder=folder))

    def _hold(self, weights: PolicyWeights) -> float:
        self.weights = weights
        return max(self.group.call_all("hold", weights))

    @contextmanager
    def asleep(self, clock: Stopwatch) -> Iterator[None]:
        """The workers are off their GPUs during the block, if they share them with the trainer.

        Weights that are to be sampled from are loaded after the block.
        """
        if self.settings.placement == "separate":
            yield
            return
        with clock.stage("sleep"):
            self.group.call_all("sleep")
        yield
        with clock.stage("sleep"):
            self.group.call_all("wake")


def prompt_table(embeddings: PromptEmbeddings, uids: Sequence[str], needs_negative: bool) -> PromptTable:
    """Embeddings of these prompts, each once, with the negative prompt's where guidance needs it."""
    negative = embeddings.negative() if needs_negative else {}
    return PromptTable.of(embeddings.get(uids) | {f"negative_{name}": tensor for name, tensor in negative.items()})


@task(name="rollout", cache_policy=NO_CACHE, persist_result=False)
def finish_rollout(clock: Stopwatch, batches: list[PendingBatch], stage: str = "gen") -> float:
    """Wait until every batch is sampled; a worker's error is raised here. Returns the workers' busy seconds."""
    with clock.stage(stage):
        return sum(ray.get([batch.seconds for batch in batches]))
