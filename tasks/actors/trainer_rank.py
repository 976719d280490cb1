"""One rank of the trainer: a Ray actor with its part of the engine."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from models.config.actor import DiffusionActorConfig, ForwardProcessConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import FinishedLatents, Trajectories
from models.training.engine import TrainingEngine, get_training_engine
from models.training.weight_copies import HeldWeights
from models.weights.buckets import buckets
from models.weights.canary import Canary, Proof
from models.weights.digests import DigestBook
from tasks.actors.memory import measures_gpu_memory
from tasks.actors.messages import RankMiniBatch
from tasks.actors.weight_transport import Courier, Route


class TrainerRank:
    """One rank of the trainer."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: DiffusionActorConfig,
        forward_config: ForwardProcessConfig,
        device: str,
        num_threads: int,
        keeps_previous: bool = False,
        max_nonfinite_steps: int = 0,
    ):
        torch.set_num_threads(num_threads)
        self.model_config, self.actor_config, self.device = model_config, actor_config, device
        self.forward_config, self.keeps_previous = forward_config, keeps_previous
        self.skippable = max_nonfinite_steps
        self.courier = Courier(device)

    def reserve_address(self) -> tuple[str, int]:
        """Host and a free port for the process group's rendezvous; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    @measures_gpu_memory("load")
    def initialize(self, rank: int, world_size: int, address: tuple[str, int]) -> bool:
        """Join the process group and build the engine."""
        import torch.distributed as dist

        # Also gloo on CUDA: for what lies in host memory, and for checkpoints that are written in the background.
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        host, port = address
        dist.init_process_group(backend, init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)
        self.engine = self.new_engine()
        self.engine.initialize()
        self.rank, self.book = rank, DigestBook()
        return True

    def new_engine(self) -> TrainingEngine:
        """The engine that the config names, with nothing loaded."""
        given = (self.model_config, self.actor_config, self.device, self.forward_config, self.keeps_previous)
        engine_class = get_training_engine(self.actor_config.strategy)
        # What says nothing is not given: an engine that always stops need not know of it.
        return engine_class(*given, **{"max_nonfinite_steps": self.skippable} if self.skippable else {})

    @measures_gpu_memory("old_log_prob")
    def old_log_probs(self, with_means: bool, *trajectories: Trajectories) -> tuple:
        """For each batch (its log-probs under the present weights, the rollout's), then each batch's means or None."""
        scored = [self.engine.rescored(batch, with_means) for batch in trajectories]
        pairs = [(new.log_probs, batch.log_probs) for new, batch in zip(scored, trajectories, strict=True)]
        return (pairs, *[new.means for new in scored])

    @measures_gpu_memory("update_actor")
    def update(
        self, plan: list[RankMiniBatch], old: list[tuple[torch.Tensor, torch.Tensor | None]] | None, *given: Any
    ) -> dict[str, float]:
        """One optimiser step per entry of the plan; metrics of this rank.

        Args:
            plan: which samples each step takes.
            old: log-probs [B, W] and weights [B, W] of each batch, where the rollout's own are not the old ones.
            given: the batches' trajectories, or finished latents; with `old` then the trajectories' means.
        """
        from models.training.micro_batches import ActorBatch

        trajectories: Sequence[Trajectories | FinishedLatents] = given
        if old is not None:
            paths, means = given[: len(old)], given[len(old) :]
            trajectories = [
                replace(path, log_probs=log_probs, is_weights=weights, means=mean)
                for path, (log_probs, weights), mean in zip(paths, old, means, strict=True)
            ]
        # One object for each mini-batch, however many passes the plan makes over it.
        batches = {
            entry.positions: ActorBatch(
                [
                    (trajectories[i], torch.tensor(row))
                    for i, row in zip(entry.positions, entry.advantages, strict=True)
                ],
                entry.global_count,
            )
            for entry in plan
        }
        return self.engine.update_policy([batches[entry.positions] for entry in plan])

    @measures_gpu_memory("update_weights")
    def weights_and_proof(self, canary: Canary, which: HeldWeights) -> tuple[dict[str, torch.Tensor], Proof, int]:
        """The weights of `engine.holding(which)` (of whole shape on rank 0), what a worker must find out of them, and
        bytes."""
        weights = {}
        with self.engine.holding(which):
            for name, whole in self._digested(self.engine.whole_weights()):
                if self.rank == 0:
                    weights[name] = whole.cpu().clone()
            proof = self._proof(canary)
        return weights, proof, sum(tensor.nbytes for tensor in weights.values())

    def weights(self, which: HeldWeights) -> dict[str, torch.Tensor]:
        """The weights of `engine.holding(which)`, of whole shape on rank 0, else none."""
        with self.engine.holding(which):
            return self.engine.gather_weights()

    @measures_gpu_memory("update_weights")
    def send_weights(
        self, number: int, route: Route, limit: int, canary: Canary, which: HeldWeights
    ) -> tuple[Proof, tuple[int, int]]:
        """Send the weights of `engine.holding(which)` in buckets of about `limit` bytes.

        Every rank takes part in gathering them, with receivers on its route or without. Returns what a worker must find
        out of them, and how many buckets and bytes they are.
        """
        count = size = 0
        with self.engine.holding(which):
            for bucket in buckets(self._digested(self.engine.whole_weights()), limit):
                if route.receivers:
                    self.courier.send(number, count, bucket, route)
                count += 1
                size += sum(tensor.nbytes for tensor in bucket.values())
            return self._proof(canary), (count, size)

    def _digested(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights; rank 0, whose proof counts, digests them as they pass: in the format in which they travel,
        and in the model's, in which a rollout holds them."""
        self.book = DigestBook(self.model_config.dtype)
        return self.book.passing(weights) if self.rank == 0 else weights

    def _proof(self, canary: Canary) -> Proof:
        return Proof(self.engine.canary_velocity(canary), self.book.digests())

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
        import torch.distributed as dist

        from models.weights.trainable import export_weights

        with self.engine.averaged():
            weights = self.engine.gather_weights()
        if dist.get_rank() == 0:
            export_weights(DiffusionModelBase.get_class(self.model_config), self.model_config, weights, folder)
