"""Rollout: prompts become trajectories and pictures."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.base import DiffusionModelConfig
from models.config import DiffusionPipelineConfig
from models.engines.canary import Canary
from models.engines.trajectories import PromptTable, RolloutRequest
from models.schedulers.noise_keys import NoiseKey
from tasks.clock import Stopwatch
from tasks.cluster import ActorGroup
from tasks.dataset import Prompt, PromptEmbeddings


class RolloutActor:
    """One rollout worker: an engine and its weights."""

    def __init__(self, model_config: DiffusionModelConfig, device: str, num_threads: int):
        import models.families  # noqa: F401  registers the adapters in this process
        from models.engines.diffusers_rollout import DiffusersRolloutEngine

        torch.set_num_threads(num_threads)
        self.engine = DiffusersRolloutEngine(model_config, device)

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def generate(self, request: RolloutRequest, pipeline: DiffusionPipelineConfig | None) -> tuple[Any, Any, float]:
        """(trajectories or None, pictures uint8 [B, H, W, 3] as numpy, seconds it took)."""
        start = time.perf_counter()
        pictures, trajectories = self.engine.generate(request, pipeline)
        return trajectories, pictures.numpy(), time.perf_counter() - start

    def load_weights(self, weights: dict[str, torch.Tensor], canary: Canary) -> torch.Tensor:
        """Take the trainer's weights; answers with the canary's velocity as proof."""
        self.engine.load_weights(weights)
        return self.engine.canary_velocity(canary)

    def load_exported(self, folder: Path) -> None:
        """Take the weights that a run exported to `folder`."""
        self.engine.load_exported(folder)


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being sampled.

    Attributes:
        prompts: the prompt of each sample.
        sample_index: which of its prompt's samples each one is.
        trajectories, pictures, seconds: what `RolloutActor.generate` returns, as references.
    """

    prompts: tuple[Prompt, ...]
    sample_index: tuple[int, ...]
    trajectories: ray.ObjectRef
    pictures: ray.ObjectRef
    seconds: ray.ObjectRef


class RolloutGroup:
    """The rollout workers, and how an iteration's samples are laid out in batches.

    Batches are cut before they are dealt out, and every draw has a noise key, so the number of workers changes nothing
    but the speed.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        embeddings: PromptEmbeddings,
        *,
        count: int,
        num_gpus: float,
        device: str,
        num_threads: int,
        micro_batch_size: int,
        seed: int,
        record_means: bool,
    ):
        self.embeddings, self.micro_batch_size, self.seed = embeddings, micro_batch_size, seed
        self.record_means = record_means
        self.needs_negative = model_config.pipeline.true_cfg_scale > 1
        self.group = ActorGroup(RolloutActor, count, num_gpus, (model_config, device, num_threads))

    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int,
        iteration: int,
        window: Sequence[int],
        pipeline: DiffusionPipelineConfig | None = None,
        seed: int | None = None,
    ) -> list[PendingBatch]:
        """Start sampling every prompt `n` times.

        Args:
            iteration: names the noise; negative for validation.
            window: stochastic steps; empty for the ODE.
            pipeline: sampling settings, if not the rollout's own.
            seed: of the noise, if not the run's own.
        """
        samples = [(prompt, index) for prompt in prompts for index in range(n)]
        batches = []
        for number, start in enumerate(range(0, len(samples), self.micro_batch_size)):
            part = samples[start : start + self.micro_batch_size]
            actor = self.group.actors[number % len(self.group)]
            request = self._request(part, self.seed if seed is None else seed, iteration, window)
            references = actor.generate.options(num_returns=3).remote(request, pipeline)
            batches.append(PendingBatch(tuple(p for p, _ in part), tuple(i for _, i in part), *references))
        return batches

    def on(self, embeddings: PromptEmbeddings) -> "RolloutGroup":
        """The same workers for the prompts of another data set."""
        group = copy.copy(self)
        group.embeddings = embeddings
        return group

    def _request(
        self, part: Sequence[tuple[Prompt, int]], seed: int, iteration: int, window: Sequence[int]
    ) -> RolloutRequest:
        uids = list(dict.fromkeys(prompt.uid for prompt, _ in part))
        keys = tuple(NoiseKey(seed, iteration, prompt.uid, index) for prompt, index in part)
        rows = torch.tensor([uids.index(prompt.uid) for prompt, _ in part])
        return RolloutRequest(keys, self.prompt_table(uids), rows, tuple(window), self.record_means)

    def prompt_table(self, uids: Sequence[str]) -> PromptTable:
        """Embeddings of these prompts, each once."""
        negative = self.embeddings.negative() if self.needs_negative else {}
        return PromptTable(
            **self.embeddings.get(uids), **{f"negative_{name}": tensor for name, tensor in negative.items()}
        )

    def load_weights(self, weights: ray.ObjectRef, canary: Canary) -> list[torch.Tensor]:
        """Give every worker the same weights; their canary velocities."""
        return self.group.call_all("load_weights", weights, canary)


@task(name="rollout", cache_policy=NO_CACHE, persist_result=False)
def finish_rollout(clock: Stopwatch, batches: list[PendingBatch]) -> float:
    """Wait until every batch is sampled; a worker's error is raised here. Returns the workers' busy seconds."""
    with clock.stage("gen"):
        return sum(ray.get([batch.seconds for batch in batches]))
