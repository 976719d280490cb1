# SPDX-License-Identifier: Apache-2.0
"""One rank of the trainer: a Ray actor with its part of the engine."""

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from models.config.actor import DiffusionActorConfig, ForwardProcessConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import FinishedLatents, Trajectories
from models.training.engine import HeldWeights, TrainingEngine, get_training_engine
from models.training.micro_batches import ActorBatch
from models.weights.buckets import HostBucket, buckets, to_host
from models.weights.canary import Canary
from models.weights.digests import DigestBook
from models.weights.trainable import export_weights
from tasks.actors.memory import measures_gpu_memory
from tasks.actors.messages import (
    BUSY_SECONDS,
    Address,
    Amount,
    BothLogProbs,
    CanaryAnswer,
    CopiedWeights,
    GatheredWeights,
    RankBatch,
    RankMiniBatch,
    Rescored,
    SampleMismatch,
    SentWeights,
)
from tasks.actors.weight_transport import Courier, Route
from tasks.config.trainer import TrainerConfig
from tasks.system.collector import collects_once_loaded

HOST_BUCKET_BYTES = 1 << 26
"""Of weights on their way to host memory: so much they take of the device meanwhile."""


class TrainerRank:
    """One rank of the trainer."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: DiffusionActorConfig,
        forward_config: ForwardProcessConfig,
        settings: TrainerConfig,
        gives_back: bool = False,
    ):
        torch.set_num_threads(settings.num_threads)
        self.model_config, self.actor_config, self.forward_config = model_config, actor_config, forward_config
        self.settings, self.device, self.gives_back = settings, settings.device, gives_back
        self.courier = Courier(self.device)
        self._early_seconds = 0.0

    def reserve_address(self) -> Address:
        """This machine and a free port of it for the process group's rendezvous; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return Address(ray.util.get_node_ip_address(), probe.getsockname()[1])

    @measures_gpu_memory("load")
    @collects_once_loaded
    def initialize(self, rank: int, world_size: int, address: Address) -> bool:
        """Join the process group and build the engine."""
        # Also gloo on CUDA: for what lies in host memory, and for checkpoints that are written in the background.
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        meeting = f"tcp://{address.host}:{address.port}"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size)
        self.engine = self.new_engine()
        self.engine.initialize()
        self.rank, self.book = rank, DigestBook()
        return True

    def new_engine(self) -> TrainingEngine:
        """The engine that the config names, with nothing loaded."""
        keeps_previous = self.settings.one_step_off_policy
        given = (self.model_config, self.actor_config, self.device, self.forward_config, keeps_previous)
        engine_class = get_training_engine(self.actor_config.strategy)
        # What says nothing is not given: an engine that always stops need not know of it.
        skippable = self.settings.skippable_steps
        return engine_class(*given, max_nonfinite_steps=skippable) if skippable else engine_class(*given)

    @measures_gpu_memory("load")
    def warm_up(self, canary: Canary) -> None:
        """Have the engine compile its update, if it is one that can."""
        warm_up = getattr(self.engine, "warm_up", None)
        if warm_up is not None:
            warm_up(canary)

    @measures_gpu_memory("old_log_prob")
    def rescore(self, trajectories: Trajectories, with_means: bool) -> Rescored:
        """A batch under the present weights."""
        own = self.engine.rescored(trajectories, with_means)
        return Rescored(BothLogProbs(own.log_probs, trajectories.log_probs), own.means)

    def steps_early(self) -> bool:
        """Can the engine take an optimiser step of an update whose other batches are not there yet?"""
        return hasattr(self.engine, "step_early")

    @measures_gpu_memory("update_actor")
    def step_early(self, mini_batch: RankMiniBatch) -> None:
        """One optimiser step of an update whose other mini-batches come with `update`.

        Raises:
            SampleMismatch: the samples are not those that the advantages belong to.
        """
        start = time.perf_counter()
        engine: Any = self.engine  # which can, see `steps_early`
        engine.step_early(actor_batch(mini_batch))
        self._early_seconds += time.perf_counter() - start

    @measures_gpu_memory("update_actor")
    def update(self, mini_batches: Sequence[RankMiniBatch], epochs: int) -> dict[str, float]:
        """One optimiser step for each mini-batch, `epochs` times over; metrics of this rank, of early steps too, and
        `BUSY_SECONDS`.

        Raises:
            SampleMismatch: the samples are not those that the advantages belong to.
        """
        start = time.perf_counter()
        metrics = self.engine.update_policy([actor_batch(step) for step in mini_batches], epochs)
        if self.gives_back:  # a rollout that sleeps meanwhile does it because both do not fit
            torch.cuda.empty_cache()
        early, self._early_seconds = self._early_seconds, 0.0
        return metrics | {BUSY_SECONDS: early + time.perf_counter() - start}

    @measures_gpu_memory("update_weights")
    def gather_weights(self, which: HeldWeights) -> GatheredWeights:
        """The weights of `engine.holding(which)`, of whole shape on rank 0."""
        start = time.perf_counter()
        with self.engine.holding(which):
            gathered, amount = self._on_host(self._digested(self.engine.whole_weights()))
        return GatheredWeights(gathered, self.book.digests(), amount, time.perf_counter() - start)

    def weights(self, which: HeldWeights) -> CopiedWeights:
        """The weights of `engine.holding(which)`, of whole shape on rank 0, else none."""
        with self.engine.holding(which):
            return CopiedWeights(*self._on_host(self.engine.whole_weights()))

    def _on_host(self, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[list[HostBucket], Amount]:
        """Rank 0's weights in host memory; of the others none, though they gather as many."""
        copied: list[HostBucket] = []
        size = 0
        for bucket in buckets(weights, HOST_BUCKET_BYTES):
            if self.rank == 0:
                copied.append(to_host(bucket))
                size += sum(tensor.nbytes for tensor in bucket.values())
        return copied, Amount(len(copied), size)

    @measures_gpu_memory("update_weights")
    def send_weights(self, number: int, route: Route, limit: int, which: HeldWeights) -> SentWeights:
        """Send the weights of `engine.holding(which)` in buckets of about `limit` bytes.

        Every rank takes part in gathering them, with receivers on its route or without.
        """
        start, count, size = time.perf_counter(), 0, 0
        with self.engine.holding(which):
            for bucket in buckets(self._digested(self.engine.whole_weights()), limit):
                if route.receivers:
                    self.courier.send(number, count, bucket, route)
                count += 1
                size += sum(tensor.nbytes for tensor in bucket.values())
        return SentWeights(self.book.digests(), Amount(count, size), time.perf_counter() - start)

    @measures_gpu_memory("update_weights")
    def canary(self, canary: Canary, which: HeldWeights) -> CanaryAnswer:
        """What the model predicts with the weights of `engine.holding(which)`; every rank takes part."""
        start = time.perf_counter()
        with self.engine.holding(which):
            return CanaryAnswer(self.engine.canary_velocity(canary), time.perf_counter() - start)

    def _digested(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights; rank 0, whose proof counts, digests them as they pass: in the format in which they travel,
        and in the model's, in which a rollout holds them."""
        self.book = DigestBook(self.model_config.dtype)
        return self.book.passing(weights) if self.rank == 0 else weights

    @measures_gpu_memory("save_checkpoint")
    def save_checkpoint(self, folder: Path) -> None:
        """See `TrainingEngine.save_checkpoint`."""
        self.engine.save_checkpoint(folder)

    def start_saving(self, folder: Path) -> None:
        """See `TrainingEngine.start_saving`."""
        self.engine.start_saving(folder)

    def saving_finished(self) -> bool:
        """See `TrainingEngine.saving_finished`."""
        return self.engine.saving_finished()

    def load_checkpoint(self, folder: Path) -> None:
        """See `TrainingEngine.load_checkpoint`."""
        self.engine.load_checkpoint(folder)

    @measures_gpu_memory("export")
    def export(self, folder: Path) -> None:
        """Write the weights, or their average where one is kept, as diffusers users load them; every rank gathers, rank
        0 writes."""
        with self.engine.holding("average" if self.actor_config.ema.enable else "policy"):
            weights = self.engine.gather_weights()
        if dist.get_rank() == 0:
            export_weights(DiffusionModelBase.get_class(self.model_config), self.model_config, weights, folder)


def actor_batch(step: RankMiniBatch) -> ActorBatch:
    """What a rank trains on in one optimiser step; see `part_of` for the error."""
    return ActorBatch([part_of(batch) for batch in step.parts], step.global_count)


def part_of(given: RankBatch) -> tuple[Trajectories | FinishedLatents, torch.Tensor]:
    """The batch's samples with the old scores that they are compared with, and their advantages [B].

    Raises:
        SampleMismatch: the samples that came are not those that the advantages were computed for, or in another order.
    """
    samples, old = _fetch(given.samples), given.old
    if samples.keys != given.keys:
        raise SampleMismatch(
            f"a batch of an update has the samples {samples.keys[:3]}..., and its advantages belong to "
            f"{given.keys[:3]}...: nothing was trained"
        )
    if old is not None:
        samples = replace(samples, log_probs=old.log_probs, is_weights=old.is_weights, means=_fetch(old.means))
    return samples, torch.tensor(given.advantages)


def _fetch(given: Any) -> Any:
    """The value of what may be a reference."""
    return ray.get(given) if isinstance(given, ray.ObjectRef) else given
