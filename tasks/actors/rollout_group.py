# SPDX-License-Identifier: Apache-2.0
"""All rollout workers as one: batches out, pictures and trajectories back by reference."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import ray
import torch

from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.samples.trajectories import LATENTS, PICTURES, PICTURES_ALONE, PromptTable, Recording, RolloutRequest
from models.schedulers.noise_keys import NoiseKey
from models.weights.canary import Agreement, CanaryLimits
from tasks.actors.actor_group import ActorGroup
from tasks.actors.messages import Loaded, PolicyWeights, Proof, RolloutReply, ask, reference
from tasks.actors.rank_places import RankPlaces
from tasks.actors.rollout_worker import RolloutWorker
from tasks.actors.router import Router
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.data.embeddings import Embeddings, prompt_table
from tasks.data.prompts import Prompt
from tasks.system.stopwatch import Stopwatch

SAMPLING = "sampling"
IN_HAND = 2
"""Batches that a diffusers worker has in hand: while the samples of one are on their way out of it, its GPU is at the
next one's."""


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being sampled.

    Attributes:
        prompts: the prompt of each sample.
        keys: the noise key of each sample.
        trajectories, seconds: of `RolloutReply`, as references; in place of trajectories finished latents, where the
            loss noises them again.
        text: tokens of the denoiser's text and of its negative prompt, 0 where there is none.
        pictures, latents: likewise; None where the rollout was not asked for them.
        finite: likewise.
        worker: who samples it.
    """

    prompts: tuple[Prompt, ...]
    keys: tuple[NoiseKey, ...]
    text: tuple[int, int]
    trajectories: ray.ObjectRef
    pictures: ray.ObjectRef | None
    latents: ray.ObjectRef | None
    finite: ray.ObjectRef
    seconds: ray.ObjectRef
    worker: int


def pending_batch(
    prompts: Mapping[str, Prompt],
    keys: tuple[NoiseKey, ...],
    text: tuple[int, int],
    reply: RolloutReply,
    outputs: frozenset[str],
    worker: int,
) -> PendingBatch:
    """A batch from the references to a worker's reply; `prompts` are the iteration's by uid."""
    return PendingBatch(
        tuple(prompts[key.prompt_uid] for key in keys),
        keys,
        text,
        reference(reply.recorded),
        reference(reply.pictures) if PICTURES in outputs else None,
        reference(reply.latents) if LATENTS in outputs else None,
        reference(reply.finite),
        reference(reply.seconds),
        worker,
    )


def by_uid(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    """Prompts by the uid that noise keys name them by."""
    return {prompt.uid: prompt for prompt in prompts}


def window_of_batch(keys: Sequence[NoiseKey], window: Sequence[int] | Mapping[str, Sequence[int]]) -> Sequence[int]:
    """The stochastic steps of a batch's samples, which go through one loop.

    Raises:
        ValueError: the batch's prompts have different ones.
    """
    if not isinstance(window, Mapping):
        return window
    windows = {key.prompt_uid: tuple(window[key.prompt_uid]) for key in keys} if window else {}
    if len({*windows.values()}) > 1:
        raise ValueError(f"one batch holds prompts with different windows, {windows}: cut it so that it holds one")
    return next(iter(windows.values()), ())


class RolloutGroup:
    """The rollout workers, and how an iteration's samples are laid out in batches.

    Batches are cut before they are dealt out, and every draw has a noise key, so the number of workers changes nothing
    but the speed.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        embeddings: Embeddings,
        settings: DiffusionRolloutConfig,
        *,
        device: str,
        seed: int,
        recording: Recording = PICTURES_ALONE,
        places: RankPlaces | None = None,
    ):
        self.embeddings, self.settings, self.seed = embeddings, settings, seed
        self.recording = recording
        self._sleeps = False
        self.pipeline, self.adapter = model_config.pipeline, DiffusionModelBase.get_class(model_config)
        alone = settings.gpus_per_worker if device == "cuda" else 0.0
        self._call = {"concurrency_group": SAMPLING} if settings.name == "diffusers" else {}
        self.group = ActorGroup(
            RolloutWorker,
            settings.num_actors,
            alone if places is None else places.num_gpus,
            (model_config, settings, device),
            places=places,
            concurrency_groups={SAMPLING: IN_HAND} if self._call else None,
            max_restarts=settings.max_restarts,
            # As often as there is a worker to do it: until Ray knows that a machine is lost, every try fails.
            max_task_retries=-1 if settings.max_restarts else 0,
        )
        self.router = Router(len(self.group), settings.max_queued_batches)
        self.weights: PolicyWeights | None = None
        self._numbers = itertools.count(1)

    def wait_ready(self, seconds: float = inf) -> None:
        """Until every worker has its model, so many seconds at most. Raises NotLoaded where one has it not by then."""
        self.group.wait_loaded("rollout worker", seconds, "ready")

    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int,
        iteration: int,
        window: Sequence[int] | Mapping[str, Sequence[int]],
        pipeline: DiffusionPipelineConfig | None = None,
        seed: int | None = None,
        draw: bool = False,
    ) -> list[PendingBatch]:
        """Start sampling every prompt `n` times. Returns when every batch has found a place in a worker's queue.

        Args:
            iteration: names the noise; negative for validation.
            window: stochastic steps, of all prompts or by uid of each; empty for the ODE.
            pipeline: sampling settings, if not the rollout's own.
            seed: of the noise, if not the run's own.
            draw: for looking at, not for training: decode pictures also where no reward asks for them.
        """
        recording = self.recording
        if draw:
            recording = replace(recording, record_finished=False, outputs=recording.outputs | {PICTURES})
        keys = self.batch_keys(prompts, n, iteration, seed)
        return [*self.hand_out(prompts, keys, window, pipeline, recording)]

    def hand_out(
        self,
        prompts: Sequence[Prompt],
        batch_keys: Sequence[tuple[NoiseKey, ...]],
        window: Sequence[int] | Mapping[str, Sequence[int]],
        pipeline: DiffusionPipelineConfig | None = None,
        recording: Recording | None = None,
    ) -> Iterator[PendingBatch]:
        """Start sampling batch by batch; each comes once it has found a place in a worker's queue.

        Args:
            batch_keys: the noise keys of each batch, from `batch_keys`.
            recording: what is recorded, if not the group's own; the rest as for `submit`.
        """
        named, recording = by_uid(prompts), self.recording if recording is None else recording
        for keys in batch_keys:
            request = self._request(keys, window_of_batch(keys, window), pipeline, recording)
            worker = self.router.next_free()
            generate = self.group.actors[worker].generate
            reply = ask(RolloutReply, generate, request, pipeline, self.weights, **self._call)
            batch = pending_batch(named, keys, request.prompts.lengths, reply, recording.outputs, worker)
            self.router.assign(worker, batch.seconds)
            yield batch

    def batch_keys(
        self, prompts: Sequence[Prompt], n: int, iteration: int, seed: int | None = None
    ) -> list[tuple[NoiseKey, ...]]:
        """How `n` samples of every prompt are cut into batches: the noise keys of each; `seed` if not the run's own."""
        seed, size = self.seed if seed is None else seed, self.settings.batch_size
        keys = [NoiseKey(seed, iteration, prompt.uid, index) for prompt in prompts for index in range(n)]
        return [tuple(keys[start : start + size]) for start in range(0, len(keys), size)]

    def on(self, embeddings: Embeddings) -> "RolloutGroup":
        """The same workers for the prompts of another data set."""
        group = copy.copy(self)
        group.embeddings = embeddings
        return group

    def _request(
        self,
        keys: tuple[NoiseKey, ...],
        window: Sequence[int],
        pipeline: DiffusionPipelineConfig | None,
        recording: Recording,
    ) -> RolloutRequest:
        uids = list(dict.fromkeys(key.prompt_uid for key in keys))
        return RolloutRequest(
            keys=keys,
            prompts=self.prompt_table(uids, pipeline),
            prompt_index=torch.tensor([uids.index(key.prompt_uid) for key in keys]),
            window=tuple(window),
            **vars(recording),
        )

    def prompt_table(self, uids: Sequence[str], pipeline: DiffusionPipelineConfig | None = None) -> PromptTable:
        """Embeddings of these prompts, each once; the negative prompt's if `pipeline` (the rollout's own) is guided."""
        return prompt_table(self.embeddings, uids, self.is_guided(pipeline))

    def is_guided(self, pipeline: DiffusionPipelineConfig | None = None) -> bool:
        """Does `pipeline` (the rollout's own) ask for guidance, and so for negative prompts?"""
        return self.adapter.is_guided(pipeline or self.pipeline)

    def load_weights(
        self,
        source: ray.ObjectRef | None,
        canary: ray.ObjectRef,
        proof: Proof,
        version: int,
        limits: CanaryLimits,
        sent: tuple[int, int] | None = None,
        beside: Sequence[ray.ObjectRef] = (),
    ) -> Loaded:
        """Give every worker the same weights; how well the worst one's canary agrees with the trainer's, and the
        seconds of the slowest.

        Args:
            source: where a worker finds them, or a `HeldByTrainer`; None where they were sent and no worker is started
                again.
            canary: where it finds that.
            proof: of these weights.
            sent: number and buckets of weights that the workers have by now, see `next_number`.
            beside: what the trainer's ranks are at, of which a worker may wait for one alone: their error is raised.

        Raises:
            WeightSyncError: a worker holds others, or its canary is beyond the limits.
        """
        number, buckets = sent or (self.next_number(), 0)
        found = () if source is None else (source,)
        weights = PolicyWeights(number, found, buckets, canary=(canary,), proof=proof, version=version, limits=limits)
        return self._hold(weights, beside)

    @property
    def policy_version(self) -> int:
        """The iteration that the weights are of which were given last."""
        if self.weights is None:
            raise RuntimeError("the rollout was given no weights yet")
        return self.weights.version

    def next_number(self) -> int:
        """The number that the next weights have."""
        return next(self._numbers)

    def load_exported(self, folder: Path) -> None:
        """Give every worker the weights that a run exported to `folder`."""
        self._hold(PolicyWeights(self.next_number(), folder=folder))

    def _hold(self, weights: PolicyWeights, beside: Sequence[ray.ObjectRef] = ()) -> Loaded:
        self.weights = weights
        loaded: list[Loaded] = self.group.get(
            [actor.load_policy.remote(weights) for actor in self.group.actors], beside
        )
        slowest = max(loaded, key=lambda one: sum(one.seconds.values()))
        return Loaded(Agreement.worst([one.agreement for one in loaded]), slowest.seconds)

    @contextmanager
    def asleep(self, clock: Stopwatch, with_policy: bool = True) -> Iterator[None]:
        """The workers are off their GPUs during the block, if they share them with the trainer and do sleep.

        Args:
            with_policy: they keep the trainer's weights. Without, new ones are loaded after the block, before anything
                is sampled.
        """
        if not self.settings.sleeps or self._sleeps:
            yield
            return
        with clock.stage("sleep"):
            self.group.call_all("sleep", with_policy)
        self._sleeps = True
        yield
        with clock.stage("sleep"):
            self.group.call_all("wake")
        self._sleeps = False
