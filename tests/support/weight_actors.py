# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks and rollout workers of a tiny model, whose weights can be changed, sent and looked at."""

import copy
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from models.config.actor import ForwardProcessConfig
from models.training.engine import HeldWeights
from models.weights.buckets import from_host
from models.weights.canary import Canary, CanaryLimits
from models.weights.trainable import trainable
from tasks.actors.cluster import ray_cluster
from tasks.actors.rank_places import RankPlaces
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.trainer_group import Synced, TrainerGroup
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.trainer import RayConfig, TrainerConfig
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.prompts import Prompt
from tests.support.helpers import TEXT_DIM, actor_config, model_config

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it

PROMPTS = [Prompt(f"uid-{i}", f"prompt {i}", None, {}, "here") for i in range(2)]
PATIENCE_S = 60
"""Of a rank for a worker; only a defect lets it pass."""
BUCKET = 0.02
"""MiB; the tiny model is several of them."""


@dataclass
class Actors:
    """Trainer ranks and rollout workers."""

    trainer: TrainerGroup
    rollout: RolloutGroup
    canary: Canary
    version: int = 0

    def sync(
        self, transport: str, which: HeldWeights = "policy", trains_meanwhile: bool = False, **settings: Any
    ) -> tuple[Synced, RolloutGroup]:
        """Change the trainer's weights and send them: what the sync tells, and the group that samples with them."""
        self.trainer.trains_meanwhile = trains_meanwhile
        self.version += 1
        self.change()
        group = copy.copy(self.rollout)
        update = {"weight_transport": transport, "update_weights_bucket_megabytes": BUCKET} | settings
        group.settings = self.rollout.settings.model_copy(update=update)
        return self.trainer.broadcast(group, self.canary, self.version, CanaryLimits(), which), group

    def change(self) -> None:
        """Change the trainer's weights."""
        self.trainer.group.call_all("__ray_call__", _change)

    def held(self) -> list[dict[str, Tensor]]:
        """The trainer's weights, then each worker's, on the CPU."""
        gathered = ray.get([actor.weights.remote("policy") for actor in self.trainer.group.actors])[0]
        whole = {name: tensor for bucket in gathered.tensors for name, tensor in from_host(bucket, "cpu").items()}
        return [whole, *self.rollout.group.call_all("__ray_call__", _weights)]


def new_rollout(
    model: Path,
    folder: Path,
    workers: int,
    places: RankPlaces | None = None,
    *,
    device: str = "cpu",
    engine: str = "diffusers",
) -> RolloutGroup:
    """Rollout workers; `folder` for embeddings."""
    config = model_config(model)
    names = {"negative_prompt": " ", "max_sequence_length": 6, "model": "none", "model_digest": "none"}
    write_embeddings(PROMPTS, _encode, folder / "embeddings", 8, batch_size=8, **names)
    settings = DiffusionRolloutConfig(
        name=engine,
        n=2,
        micro_batch_size=2,
        num_actors=workers,
        max_restarts=20,
        pipeline=config.pipeline,
        algo=config.algo,
    )
    embeddings = PromptEmbeddings.open(folder / "embeddings")
    return RolloutGroup(config, embeddings, settings, device=device, seed=0, places=places)


@contextmanager
def started(
    model: Path,
    folder: Path,
    *,
    device: str = "cpu",
    ranks: int = 2,
    workers: int = 2,
    colocated: bool = False,
    engine: str = "diffusers",
) -> Iterator[Actors]:
    """In a Ray cluster of their own; `folder` for embeddings, `colocated` on the same GPUs, `engine` samples."""
    config = model_config(model)
    with ray_cluster(RayConfig(num_cpus=2)):
        places = RankPlaces(1, ranks, device, 1 + colocated)
        rollout = new_rollout(model, folder, workers, places if colocated else None, device=device, engine=engine)
        trainer = TrainerGroup(
            config,
            actor_config(),
            ForwardProcessConfig(),
            TrainerConfig(n_gpus_per_node=ranks, device=device),
            mini_batch_samples=4,
            places=places,
        )
        ray.get(trainer.start())
        yield Actors(trainer, rollout, Canary(rollout.prompt_table(["uid-0", "uid-1"])))


def has_model(worker: Any) -> bool:
    """Has this rollout worker loaded one?"""
    return worker._engine is not None


def spoil(worker: Any, repacks: bool) -> None:
    """Let the last tensor of each bucket come to this worker's engine as another one; `repacks` makes the engine one
    whose own weights cannot be looked at, and spoils them on their way to it."""

    def spoiled(weights: Any) -> dict[str, Tensor]:
        *_, last = weights
        return {name: tensor * 1.001 if name == last else tensor for name, tensor in weights.items()}

    if repacks:
        receive = worker.courier.receive
        worker.engine.held_weights = lambda: None
        worker.courier.receive = lambda parcel: spoiled(receive(parcel))
        return
    begin = worker.engine.begin_load

    def begin_spoiled() -> Any:
        load = begin()
        take = load.take
        load.take = lambda weights: take(spoiled(weights))
        return load

    worker.engine.begin_load = begin_spoiled


def mend(worker: Any) -> None:
    """Undo `spoil`, but for the engine that repacks."""
    worker.courier.__dict__.pop("receive", None)
    worker.engine.__dict__.pop("begin_load", None)


def leave_a_mark(worker: Any, file: Path) -> None:
    """Let the worker's canary leave a file."""
    canary_velocity = worker.engine.canary_velocity

    def marked(canary: Canary) -> Tensor:
        velocity = canary_velocity(canary)
        file.touch()
        return velocity

    worker.engine.canary_velocity = marked


def meet_when_sampling(worker: Any) -> None:
    """Let each of the worker's requests wait, before it is sampled, for another one."""
    meeting, produce = threading.Barrier(2), worker.engine.produce

    def met(*given: Any) -> Any:
        meeting.wait(PATIENCE_S)
        return produce(*given)

    worker.engine.produce = met


def sample_as_before(worker: Any) -> None:
    """Undo `meet_when_sampling`."""
    worker.engine.__dict__.pop("produce", None)


def at_once(worker: Any) -> int:
    """How many calls of this the worker is in."""
    worker.inside = worker.__dict__.get("inside", 0) + 1
    time.sleep(0.02)
    found: int = worker.inside
    worker.inside -= 1
    return found


def wait_for(file: Path) -> None:
    """Until the file is there."""
    until = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"nobody left {file.name}")
        time.sleep(0.01)


def answer_after(rank: Any, file: Path) -> None:
    """Let the rank's canary wait for that file."""
    canary_velocity = rank.engine.canary_velocity

    def patient(canary: Canary) -> Tensor:
        wait_for(file)
        return canary_velocity(canary)

    rank.engine.canary_velocity = patient


def answer_as_before(actor: Any) -> None:
    """Undo `leave_a_mark` or `answer_after`."""
    actor.engine.__dict__.pop("canary_velocity", None)


def hold_any(rank: Any) -> None:
    """Let the rank's engine have its own weights for whichever it is asked to hold, and note which those were."""
    rank.asked = []

    def holding(which: str) -> nullcontext:
        rank.asked.append(which)
        return nullcontext()

    rank.engine.holding = holding


def asked_for(rank: Any) -> list[str]:
    """What `hold_any` has noted, which this undoes."""
    rank.engine.__dict__.pop("holding", None)
    return rank.__dict__.pop("asked")


def fail_at(rank: Any, method: str, call: int = 1, after: Path | None = None) -> None:
    """Let this call of the engine's method, and all later ones, raise before the rank takes its part in it, and not
    before the file `after` is there."""
    working, calls = getattr(rank.engine, method), itertools.count(1)

    def failing(*given: Any) -> Any:
        if next(calls) < call:
            return working(*given)
        if after is not None:
            wait_for(after)
        raise MemoryError(f"no room for {method}")

    setattr(rank.engine, method, failing)


def fail_no_more(rank: Any) -> None:
    """Undo `fail_at`."""
    for method in ("canary_velocity", "whole_weights"):
        rank.engine.__dict__.pop(method, None)


def assert_equal(weights: list[dict[str, Tensor]]) -> None:
    """All of them, bit for bit."""
    expected, *others = weights
    for other in others:
        assert other.keys() == expected.keys()
        assert all(torch.equal(other[name], expected[name]) for name in expected)


def pictures(group: RolloutGroup) -> np.ndarray:
    """Of two samples a prompt."""
    return np.concatenate(ray.get([batch.pictures for batch in group.submit(PROMPTS, 2, 1, (0,))]))


def _change(rank: Any) -> None:
    with torch.no_grad():
        for parameter in trainable(rank.engine.module).values():
            parameter.mul_(1.01)


def _weights(worker: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in trainable(worker.engine.transformer).items()}


def _encode(texts: list[str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(len(texts), 6, TEXT_DIM, generator=generator)
    return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(len(texts), 6, dtype=torch.bool)}
