"""Update: trajectories and advantages become new weights, and the new weights reach the rollout."""

import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.base import DiffusionModelConfig
from models.config import DiffusionActorConfig
from models.engines.canary import Canary, check_canary
from models.engines.trajectories import Trajectories
from tasks.clock import Stopwatch
from tasks.cluster import ActorGroup
from tasks.rollout import PendingBatch, RolloutGroup


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's share of one optimiser step.

    Attributes:
        positions: which of the references handed to the rank.
        advantages: of each of those batches, [B].
        global_count: samples that count, over all ranks.
    """

    positions: tuple[int, ...]
    advantages: tuple[np.ndarray, ...]
    global_count: int


class TrainerRank:
    """One rank of the trainer."""

    def __init__(
        self, model_config: DiffusionModelConfig, actor_config: DiffusionActorConfig, device: str, num_threads: int
    ):
        torch.set_num_threads(num_threads)
        self.model_config, self.actor_config, self.device = model_config, actor_config, device

    def reserve_address(self) -> tuple[str, int]:
        """Host and a free port for the process group's rendezvous; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def initialize(self, rank: int, world_size: int, address: tuple[str, int]) -> bool:
        """Join the process group and build the engine."""
        import torch.distributed as dist

        import models.families  # noqa: F401  registers the adapters in this process
        from models.engines.fsdp import DiffusersFSDPEngine

        backend = "nccl" if self.device == "cuda" else "gloo"
        host, port = address
        dist.init_process_group(backend, init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)
        self.engine = DiffusersFSDPEngine(self.model_config, self.actor_config, self.device)
        self.engine.initialize()
        return True

    def update(self, plan: list[RankMiniBatch], *trajectories: Trajectories) -> dict[str, float]:
        """One optimiser step per entry of the plan; metrics of this rank."""
        from models.engines.fsdp import ActorBatch

        batches = [
            ActorBatch(
                [
                    (trajectories[i], torch.tensor(row))
                    for i, row in zip(entry.positions, entry.advantages, strict=True)
                ],
                entry.global_count,
            )
            for entry in plan
        ]
        return self.engine.update_policy(batches)

    def weights_and_canary(self, canary: Canary, averaged: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The trained weights (whole on rank 0) and what they predict for the canary."""
        with self.engine.averaged() if averaged else nullcontext():
            return self.engine.gather_weights(), self.engine.canary_velocity(canary)

    def save_checkpoint(self, folder: Path) -> None:
        """See `DiffusersFSDPEngine.save_checkpoint`."""
        self.engine.save_checkpoint(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """See `DiffusersFSDPEngine.load_checkpoint`."""
        self.engine.load_checkpoint(folder)

    def export(self, folder: Path, averaged: bool = True) -> None:
        """Write the weights as diffusers users load them; every rank gathers, rank 0 writes."""
        import torch.distributed as dist

        from models.engines.weights import export_weights

        with self.engine.averaged() if averaged else nullcontext():
            weights = self.engine.gather_weights()
        if dist.get_rank() == 0:
            export_weights(self.engine.adapter, self.model_config, weights, folder)


class TrainerGroup:
    """The trainer's ranks."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: DiffusionActorConfig,
        *,
        world_size: int,
        device: str,
        num_threads: int,
        mini_batch_samples: int,
    ):
        self.actor_config, self.mini_batch_samples = actor_config, mini_batch_samples
        self.device = device
        gpus = 1 if device == "cuda" else 0
        self.group = ActorGroup(TrainerRank, world_size, gpus, (model_config, actor_config, device, num_threads))

    def start(self) -> list[ray.ObjectRef]:
        """Build the engines; the references are ready when they are."""
        address = ray.get(self.group.actors[0].reserve_address.remote())
        count = len(self.group)
        return [actor.initialize.remote(rank, count, address) for rank, actor in enumerate(self.group.actors)]

    def update(self, batches: Sequence[PendingBatch], advantages: np.ndarray) -> dict[str, float]:
        """Train on one iteration's batches; metrics averaged over ranks."""
        plans = plan_updates(
            [len(batch.prompts) for batch in batches],
            advantages,
            self.mini_batch_samples,
            len(self.group),
            self.actor_config.ppo_epochs,
        )
        running = []
        for actor, (plan, used) in zip(self.group.actors, plans, strict=True):
            running.append(actor.update.remote(plan, *[batches[i].trajectories for i in used]))
        metrics = ray.get(running)
        combine = {name: max if name.endswith("/max") else np.mean for name in metrics[0]}
        return {name: float(function([m[name] for m in metrics])) for name, function in combine.items()}

    def save(self, folder: Path) -> None:
        """Every rank writes its part of a checkpoint."""
        self.group.call_all("save_checkpoint", folder)

    def load(self, folder: Path) -> None:
        """Every rank restores its part of a checkpoint."""
        self.group.call_all("load_checkpoint", folder)

    def export(self, folder: Path) -> None:
        """Write the weights (the average, where one is kept) as diffusers users load them; see `export_weights`."""
        self.group.call_all("export", folder)

    def broadcast(self, rollout: RolloutGroup, canary: Canary, version: int, tolerance: float, averaged: bool) -> float:
        """Send the weights to every rollout worker and prove that they arrived; see `sync_weights`."""
        parts = [
            actor.weights_and_canary.options(num_returns=2).remote(canary, averaged) for actor in self.group.actors
        ]
        weights, velocity = parts[0]
        answers = rollout.load_weights(weights, canary)
        expected = ray.get(velocity)
        return max(check_canary(expected, answer, version, tolerance) for answer in answers)


def plan_updates(
    batch_sizes: Sequence[int], advantages: np.ndarray, mini_batch_samples: int, world_size: int, epochs: int
) -> list[tuple[list[RankMiniBatch], list[int]]]:
    """Deal an iteration's batches to optimiser steps and ranks.

    Mini-batches are runs of whole batches in order, and within one the ranks take equal consecutive shares: a batch
    stays as it was sampled, which keeps its replayed log-probs equal to the last bit.

    Args:
        batch_sizes: samples of each batch.
        advantages: [sum of batch_sizes], NaN where missing.
        mini_batch_samples: samples of an optimiser step, over all ranks.
        world_size: ranks.
        epochs: passes over the samples.

    Returns:
        For each rank (its plan, the batch numbers its `positions` count in).
    """
    starts = np.concatenate([[0], np.cumsum(batch_sizes)])
    mini_batch_of = [int(start) // mini_batch_samples for start in starts[:-1]]
    plans: list[list[RankMiniBatch]] = [[] for _ in range(world_size)]
    used: list[list[int]] = [[] for _ in range(world_size)]
    for number in sorted(set(mini_batch_of)):
        members = [i for i, owner in enumerate(mini_batch_of) if owner == number]
        share = len(members) // world_size
        rows = [advantages[starts[i] : starts[i + 1]] for i in members]
        counted = int(sum(np.count_nonzero(~np.isnan(row)) for row in rows))
        if counted == 0:
            continue
        for rank in range(world_size):
            own = slice(rank * share, (rank + 1) * share)
            first = len(used[rank])
            used[rank] += members[own]
            positions = tuple(range(first, len(used[rank])))
            plans[rank].append(RankMiniBatch(positions, tuple(rows[own]), counted))
    return [(plan * epochs, indices) for plan, indices in zip(plans, used, strict=True)]


@task(name="update", cache_policy=NO_CACHE, persist_result=False)
def update(
    clock: Stopwatch, trainer: TrainerGroup, batches: list[PendingBatch], advantages: np.ndarray
) -> dict[str, float]:
    """Train on one iteration's samples; metrics under actor/."""
    with clock.stage("update_actor"):
        return {f"actor/{name}": value for name, value in trainer.update(batches, advantages).items()}


@task(name="sync-weights", cache_policy=NO_CACHE, persist_result=False)
def sync_weights(
    clock: Stopwatch,
    trainer: TrainerGroup,
    rollout: RolloutGroup,
    canary: Canary,
    version: int,
    tolerance: float,
    averaged: bool = False,
) -> float:
    """Give the rollout the trainer's weights, through Ray's object store.

    Returns:
        The canary's largest relative difference over the rollout workers.

    Raises:
        WeightSyncError: it is above `tolerance`.
    """
    with clock.stage("update_weights"):
        return trainer.broadcast(rollout, canary, version, tolerance, averaged)
