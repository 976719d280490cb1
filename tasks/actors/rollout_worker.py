# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: a Ray actor with one engine and its weights."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.engine import RolloutEngine, WeightLoad
from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine
from models.samples.file import read_samples
from models.samples.trajectories import FINITE, LATENTS, PICTURES, RolloutRequest
from models.weights.buckets import HostBucket, from_host
from models.weights.canary import Agreement, check_velocity
from models.weights.digests import DigestBook, check_digests, digests_of
from models.weights.trainable import WeightSyncError
from tasks.actors.memory import measures_gpu_memory
from tasks.actors.messages import (
    CopiedWeights,
    HeldByTrainer,
    Loaded,
    PolicyWeights,
    Proof,
    RolloutReply,
    ask,
    reference,
)
from tasks.actors.ray_files import keep_engines_sockets
from tasks.actors.weight_transport import Arrival, Courier, Parcel
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.system.collector import collects_once_loaded
from tasks.system.stopwatch import Stopwatch


def _stage_of(_request: RolloutRequest, pipeline: DiffusionPipelineConfig | None, _weights: Any) -> str:
    return "gen" if pipeline is None else "testing"


class RolloutWorker:
    """One rollout worker: an engine and its weights.

    One that Ray starts again loads its model when it is needed, if it sleeps while the trainer has the GPU: it may be
    started in the middle of an update, beside which the model does not fit.
    """

    def __init__(self, model_config: DiffusionModelConfig, settings: DiffusionRolloutConfig, device: str):
        torch.set_num_threads(settings.num_threads)
        self._engine: RolloutEngine | None = None
        self._made_of, self._making = (model_config, settings, device), threading.Lock()
        self.held, self.loaded, self.device = 0, Loaded(Agreement(0.0), {}), device
        self.given = DigestBook(device=device)
        self.courier = Courier(device)
        self.arrival: Arrival | None = None
        self._loading, self._sampled_until = threading.Lock(), 0.0
        if not (settings.sleeps and _is_started_again()):
            self._load_once()

    @property
    def engine(self) -> RolloutEngine:
        """Loaded, if it was not yet."""
        return self._load_once()

    def _load_once(self) -> RolloutEngine:
        with self._making:
            if self._engine is None:
                self._engine = self._loaded_engine()
        return self._engine

    @measures_gpu_memory("load")
    @collects_once_loaded
    def _loaded_engine(self) -> RolloutEngine:
        return _engine(*self._made_of)

    def ready(self) -> bool:
        """Answers once its process is there, with the model unless it waits to be woken."""
        return True

    @measures_gpu_memory(_stage_of)
    def generate(
        self, request: RolloutRequest, pipeline: DiffusionPipelineConfig | None, weights: PolicyWeights | None
    ) -> RolloutReply:
        """Sample what the request asks for, with `weights` or, without any, with those that are there.

        Two threads may call it at a time. The seconds of both are counted once.
        """
        start = time.perf_counter()
        if weights is not None:
            with self._loading:
                self.load_policy(weights)
        made = self.engine.produce(request, pipeline)
        pictures, latents = (None if kept is None else kept.numpy() for kept in (made.pictures, made.latents))
        now = time.perf_counter()
        seconds, self._sampled_until = now - max(start, self._sampled_until), now
        return RolloutReply(made.recorded, pictures, latents, made.finite.numpy(), seconds)

    def read(self, file: Path) -> RolloutReply:
        """What `generate` returned and `write_batch` wrote; it took no seconds."""
        recorded, outputs = read_samples(file)
        pictures, latents = (outputs[name].numpy() if name in outputs else None for name in (PICTURES, LATENTS))
        finite = outputs.get(FINITE, torch.ones(len(recorded), dtype=torch.bool))  # of older versions nothing is known
        return RolloutReply(recorded, pictures, latents, finite.numpy(), 0.0)

    @measures_gpu_memory("update_weights")
    def load_policy(self, weights: PolicyWeights) -> Loaded:
        """Take these weights, unless they are there already; how well the canary's velocity agrees with the trainer's.

        Raises:
            WeightSyncError: the engine does not take them, holds others, or its canary is beyond the limits.
        """
        if self.held != weights.number:
            clock, agreement = Stopwatch(), self.loaded.agreement
            with clock.stage("load"):
                self._load(weights)
            if weights.proof is not None:
                agreement = self._checked(weights, weights.proof, clock)
            self.held, self.loaded = weights.number, Loaded(agreement, clock.seconds)
        return self.loaded

    def _checked(self, weights: PolicyWeights, proof: Proof, clock: Stopwatch) -> Agreement:
        """Each thing is asked for when it is needed: the trainer may still be at it."""
        with clock.stage("digests"):
            held = self.engine.held_weights()
            digests = self.given.digests() if held is None else digests_of(held)
        with clock.stage("wait"):
            sent = ray.get(proof.digests)
        check_digests(sent, digests, weights.version)
        with clock.stage("rollout_canary"):
            own = self.engine.canary_velocity(ray.get(weights.canary[0]))
        with clock.stage("wait"):
            velocity, last = ray.get(proof.velocity), None if proof.last is None else ray.get(proof.last)
        with clock.stage("compare"):
            return check_velocity(velocity, own, last, weights.version, weights.limits)

    def take(self, parcel: Parcel) -> None:
        """The next bucket of weights that the trainer sends directly. `load_policy` follows the last one."""
        if parcel.index == 0:
            self.held, self.arrival = 0, Arrival(parcel.number, self._begin_load(), self.device)
        weights = self.courier.receive(parcel)
        if (
            self.arrival is not None
        ):  # else this process is younger than the transfer, and `load_policy` takes another way
            self.arrival.take(weights)

    def _load(self, weights: PolicyWeights) -> None:
        arrival, self.arrival = self.arrival, None
        if weights.folder is not None:
            self.engine.load_exported(weights.folder)
        elif weights.buckets and arrival is not None and arrival.finish(weights.number, weights.buckets):
            return
        elif weights.source:
            load = self._begin_load()
            found: list[HostBucket] | HeldByTrainer = ray.get(weights.source[0])
            given = copied_by(found) if isinstance(found, HeldByTrainer) else found
            # An engine that puts tensors together may do so in host memory, and for processes on other GPUs.
            place = "cpu" if self.engine.held_weights() is None else self.device
            for bucket in given:
                load.take(from_host(bucket, place))
            load.finish()
        else:
            raise WeightSyncError(
                f"policy version {weights.version} did not reach a rollout worker, and rollout.max_restarts is 0, so "
                "that no copy is kept for such a one"
            )

    def _begin_load(self) -> WeightLoad:
        """A load of the engine's; of one that does not keep the weights as they come, their digests are taken here."""
        load = self.engine.begin_load()
        if self.engine.held_weights() is not None:
            return load
        self.given = DigestBook(device=self.device)
        return _DigestedLoad(load, self.given)

    def sleep(self, with_policy: bool = True) -> None:
        """Give up the GPU's memory until `wake`; without the policy's weights they have to be given again."""
        if not with_policy:
            self.held = 0
        if self._engine is not None:
            self._engine.sleep(with_policy)

    def wake(self) -> None:
        """Be ready for new weights and samples."""
        if self._engine is None:
            self._load_once()  # and is awake
        else:
            self._engine.wake()


def _is_started_again() -> bool:
    """Is this an actor's process, and not its first?"""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and context.was_current_actor_reconstructed


def copied_by(holder: HeldByTrainer) -> list[HostBucket]:
    """Its weights in host memory. Raises the error of whichever rank fails first: the others would wait for it."""
    copies = [ask(CopiedWeights, rank.weights, holder.which) for rank in holder.ranks]
    ray.get([reference(of_rank.amount) for of_rank in copies])  # it does not wait for the others either
    found: list[HostBucket] = ray.get(reference(copies[0].tensors))
    return found


class _DigestedLoad:
    """A load that digests what passes through it."""

    def __init__(self, load: WeightLoad, book: DigestBook):
        self._load, self._book = load, book

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._book.add(weights.items())
        self._load.take(weights)

    def finish(self) -> None:
        self._load.finish()


def _engine(model_config: DiffusionModelConfig, settings: DiffusionRolloutConfig, device: str) -> RolloutEngine:
    if settings.name == "vllm_omni":
        keep_engines_sockets()
        return VllmOmniRolloutEngine(
            model_config,
            settings.vllm_omni,
            max_num_seqs=settings.batch_size,
            sleep_mode=settings.sleeps,
        )
    return DiffusersRolloutEngine(model_config, device, settings.cuda_graphs, settings.batch_size)
