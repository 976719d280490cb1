# SPDX-License-Identifier: Apache-2.0
"""All trainer ranks as one."""

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from models.algorithms import needs_old_means
from models.config.actor import DiffusionActorConfig, ForwardProcessConfig
from models.families.base import DiffusionModelConfig
from models.training.engine import HeldWeights
from models.weights.canary import Agreement, Canary, CanaryLimits
from tasks.actors.actor_group import ActorGroup
from tasks.actors.interpreter import own_environment
from tasks.actors.loading import get_loaded
from tasks.actors.messages import (
    BothLogProbs,
    CanaryAnswer,
    CopiedWeights,
    GatheredWeights,
    HeldByTrainer,
    OldBatch,
    Proof,
    RankMiniBatch,
    Rescored,
    SentWeights,
    ask,
    reference,
)
from tasks.actors.rank_places import RankPlaces
from tasks.actors.rollout_group import PendingBatch, RolloutGroup
from tasks.actors.trainer_rank import TrainerRank
from tasks.actors.update_plan import NothingToLearn, OldScores, over_ranks, plan_updates
from tasks.actors.waiting import get, unfinished
from tasks.actors.weight_transport import Routes
from tasks.config.trainer import TrainerConfig
from tasks.data.pairs import PairBatch

SAVING_POLL_S = 0.2
RANK = "trainer rank {}"


class TrainerGroup:
    """The trainer's ranks."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        actor_config: DiffusionActorConfig,
        forward_config: ForwardProcessConfig,
        settings: TrainerConfig,
        *,
        mini_batch_samples: int,
        places: RankPlaces | None = None,
        gives_back: bool = False,
    ):
        self.actor_config, self.mini_batch_samples = actor_config, mini_batch_samples
        self.sharing = actor_config.fsdp_config.ulysses_sequence_parallel_size
        gpus = places.num_gpus if places is not None else 1.0 if settings.device == "cuda" else 0.0
        arguments = (model_config, actor_config, forward_config, settings, gives_back)
        own = {} if actor_config.python is None else {"runtime_env": own_environment(actor_config.python)}
        self.group = ActorGroup(TrainerRank, settings.world_size, gpus, arguments, places=places, **own)
        self.routes = Routes(self.group.actors)
        self._canary: tuple[Canary, ray.ObjectRef] | None = None
        self._velocity: ray.ObjectRef | None = None  # for the canary at the last sync
        self.trains_meanwhile = settings.one_step_off_policy
        self._holders = dict[HeldWeights, ray.ObjectRef]()
        # Not among what the group has begun: an error of theirs is the update's. Raised by what writes a checkpoint
        # meanwhile, it would take that with it, and where scores are waited for, those that nobody has kept yet.
        self._early = list[ray.ObjectRef]()

    def start(self, seconds: float = inf) -> list[ray.ObjectRef]:
        """Build the engines; the references are ready when they are. Raises NotLoaded where rank 0 is not there in so
        many seconds."""
        first = self.group.actors[0]
        (address,) = get_loaded([RANK.format(0)], [first], [first.reserve_address.remote()], seconds)
        count = len(self.group)
        return [actor.initialize.remote(rank, count, address) for rank, actor in enumerate(self.group.actors)]

    def wait_started(self, started: Sequence[ray.ObjectRef], seconds: float = inf) -> None:
        """Until the engines are built, so many seconds at most. Raises NotLoaded where one is not by then."""
        get_loaded([*map(RANK.format, range(len(self.group)))], self.group.actors, started, seconds)

    def warm_up(self, canary: Canary) -> None:
        """Begin to compile the update; what is asked of the ranks next waits for it, and raises its error."""
        self.group.begin([actor.warm_up.remote(canary) for actor in self.group.actors])

    def begin_old_log_probs(self, batches: Sequence[PendingBatch | PairBatch]) -> "PendingOldLogProbs":
        """Have the ranks score each batch with the present weights; what is asked of them next waits for that.

        Batches are all of one size and a multiple of the ranks (the config's checks), so every rank makes as many
        passes.
        """
        loss = self.actor_config.diffusion_loss
        with_means, ranks = needs_old_means(loss.loss_mode, loss.options), len(self.group) // self.sharing
        log_probs, means = list[ray.ObjectRef](), list[ray.ObjectRef]()
        for number, batch in enumerate(batches):
            first = number % ranks * self.sharing
            of_batch, mean = self._rescore(batch, self.group.actors[first : first + self.sharing], with_means)
            log_probs += of_batch
            means.append(mean)
        return PendingOldLogProbs(log_probs, means)

    def old_log_probs(self, pending: "PendingOldLogProbs") -> tuple[list[OldBatch], list[torch.Tensor]]:
        """What the weights said of each batch, and the rollout's own log-probs [m, W]."""
        # Of all ranks, of which one may fail while those that it shares samples with wait for it.
        found: list[BothLogProbs] = self.group.get(pending.log_probs)
        scored = found[:: self.sharing]
        own = [OldBatch(both.own, None, of_batch) for both, of_batch in zip(scored, pending.means, strict=True)]
        return own, [both.rollout for both in scored]

    def _rescore(
        self, batch: PendingBatch | PairBatch, ranks: Sequence[Any], with_means: bool
    ) -> tuple[list[ray.ObjectRef], ray.ObjectRef]:
        """Log-probs of each of the ranks that share a batch, and the first's means: the others' are let go at once."""
        replies = [ask(Rescored, actor.rescore, batch.trajectories, with_means) for actor in ranks]
        return [reference(reply.log_probs) for reply in replies], reference(replies[0].means)

    @cached_property
    def steps_early(self) -> bool:
        """Can the engine take an optimiser step before an update's other samples are scored? Asked of rank 0."""
        return self.group.get([self.group.actors[0].steps_early.remote()])[0]

    def step_early(self, batches: Sequence[PendingBatch], advantages: np.ndarray, old: OldScores | None) -> int:
        """Begin the optimiser steps of an iteration's first batches, which are whole mini-batches; `update` of the
        other batches goes on with them, and raises their errors.

        Args:
            batches: whole mini-batches.
            advantages: [samples] of them, NaN where one is left out.
            old: of these batches.

        Returns:
            How many were begun; none of a mini-batch that has no sample to learn from.
        """
        plans = plan_updates(batches, advantages, self.mini_batch_samples, len(self.group) // self.sharing, old)
        ranks = enumerate(self.group.actors)
        steps = [(actor, step) for rank, actor in ranks for step in plans[rank // self.sharing]]
        self._early += [actor.step_early.remote(step) for actor, step in steps]
        return len(plans[0])

    def update(
        self, batches: Sequence[PendingBatch | PairBatch], advantages: np.ndarray, old: OldScores | None
    ) -> dict[str, float]:
        """Train on one iteration's batches and advantages [samples], or on those that no early step was taken of;
        metrics averaged over the ranks that have them.

        Raises:
            NothingToLearn: samples have an advantage, but none is left to train on.
        """
        ranks, epochs = len(self.group) // self.sharing, self.actor_config.ppo_epochs
        plans = plan_updates(batches, advantages, self.mini_batch_samples, ranks, old)
        check_plans(plans, advantages)
        early, self._early = self._early, []
        unfinished(early)
        actors = enumerate(self.group.actors)
        updates = [actor.update.remote(plans[rank // self.sharing], epochs) for rank, actor in actors]
        metrics = self.group.get(updates, beside=early)
        get(early)  # of which one may have failed since it was last looked at
        return over_ranks(metrics)

    def save(self, folder: Path) -> None:
        """Every rank writes its part of a checkpoint."""
        self.group.call_all("save_checkpoint", folder)

    def start_saving(self, folder: Path) -> None:
        """Every rank copies its part of a checkpoint to host memory and begins to write it."""
        self.group.call_all("start_saving", folder)

    def wait_until_saved(self) -> None:
        """Return when every rank has written what it began; a rank's error is raised here.

        A rank answers between its other calls, so this asks and does not wait there.
        """
        while not all(self.group.call_all("saving_finished")):
            time.sleep(SAVING_POLL_S)

    def load(self, folder: Path) -> None:
        """Every rank restores its part of a checkpoint."""
        self.group.call_all("load_checkpoint", folder)

    def export(self, folder: Path) -> None:
        """Write the weights (the average, where one is kept) as diffusers users load them; see `export_weights`."""
        self.group.call_all("export", folder)

    def broadcast(
        self, rollout: RolloutGroup, canary: Canary, version: int, limits: CanaryLimits, which: HeldWeights
    ) -> "Synced":
        """Send the weights to every rollout worker and prove that they arrived; see `sync_weights`.

        The workers load what has come, and compute their own proof of it, while the trainer still computes its canary.
        An error of any rank is raised: rank 0, which the workers wait for, waits for the others.
        """
        ranks, known = self.group.actors, self._known(canary)
        sent, number = self._send(rollout, which)
        answers = [ask(CanaryAnswer, actor.canary, known, which) for actor in ranks]
        first, answer = sent[0], answers[0]
        took = [reference(of_rank.seconds) for of_rank in (*sent, *answers)]
        self.group.begin(took)
        velocity = reference(answer.velocity)
        source: ray.ObjectRef | None
        proof = Proof(reference(first.digests), velocity, self._velocity)
        if isinstance(first, GatheredWeights):
            source, arrived = reference(first.tensors), None
        else:
            source = self._for_restarts(rollout, which) if rollout.settings.max_restarts else None
            arrived = number, self.group.get([reference(of_rank.amount) for of_rank in sent])[0].buckets
        loaded = rollout.load_weights(source, known, proof, version, limits, arrived, self.group.begun)
        self._velocity = velocity
        amount, *of_ranks = self.group.get([reference(first.amount), *took])
        seconds = {"gather": of_ranks[0], "trainer_canary": of_ranks[len(ranks)], **loaded.seconds}
        return Synced(loaded.agreement, amount.size / 2**30, seconds)

    def _send(
        self, rollout: RolloutGroup, which: HeldWeights
    ) -> tuple[Sequence[GatheredWeights] | Sequence[SentWeights], int]:
        """Begin to send the weights on the way that the rollout's settings say: of each rank what it sent, and the
        weights' number, which those that are in the object store get later."""
        ranks, settings = self.group.actors, rollout.settings
        if settings.weight_transport == "object_store":
            return [ask(GatheredWeights, actor.gather_weights, which) for actor in ranks], 0
        number, limit = rollout.next_number(), int(settings.update_weights_bucket_megabytes * 2**20)
        routes = self.routes.to(rollout.group.actors, settings.weight_transport)
        return [
            ask(SentWeights, actor.send_weights, number, route, limit, which)
            for actor, route in zip(ranks, routes, strict=True)
        ], number

    def _for_restarts(self, rollout: RolloutGroup, which: HeldWeights) -> ray.ObjectRef:
        """The weights for a worker that will have to be started again, or who copies them then.

        The trainer holds what the rollout samples from until the next update, so only one that takes place meanwhile
        needs a copy beforehand. So does a worker whose machine may be lost alone: Ray repeats its calls elsewhere where
        a rank wants their samples, and that rank answers nobody until it has them.
        """
        if self.trains_meanwhile or rollout.settings.weight_transport == "collective":
            return self._copied(which)
        if which not in self._holders:
            self._holders[which] = ray.put(HeldByTrainer(tuple(self.group.actors), which))
        return self._holders[which]

    def _copied(self, which: HeldWeights) -> ray.ObjectRef:
        """The weights in the object store. They are copied while the workers already sample."""
        copies = [ask(CopiedWeights, actor.weights, which) for actor in self.group.actors]
        self.group.begin([reference(of_rank.amount) for of_rank in copies])
        return reference(copies[0].tensors)

    def _known(self, canary: Canary) -> ray.ObjectRef:
        """The canary in the object store: it has prompts' embeddings, and is the same at every sync."""
        if self._canary is None or self._canary[0] is not canary:
            self._canary = (canary, ray.put(canary))
        return self._canary[1]


def check_plans(plans: Sequence[Sequence[RankMiniBatch]], advantages: np.ndarray) -> None:
    """An update without an optimiser step is one whose advantages [samples] were all left out on purpose, as NaN.

    Raises:
        NothingToLearn: it is not; every step of every sample with an advantage was rejected.
    """
    learnable = int(np.isfinite(advantages).sum())
    if learnable and not any(plans):
        raise NothingToLearn(
            f"of the {learnable} samples with an advantage algorithm.rollout_correction left none to train on: widen "
            "rollout_rs_threshold, or find out why rollout and trainer differ"
        )


class PendingOldLogProbs(NamedTuple):
    """Scores of the trainer's own weights that are on their way.

    Attributes:
        log_probs: references to `BothLogProbs`: of each batch those of the ranks that share it.
        means: references to means [m, W, ...] or None, one a batch.
    """

    log_probs: list[ray.ObjectRef]
    means: list[ray.ObjectRef]


class Synced(NamedTuple):
    """What a weight sync tells.

    Attributes:
        agreement: of the canary's velocities, the worst over the rollout workers.
        gib: size of the weights, of which every worker got a copy.
        seconds: what it consists of: those of `Loaded`, of the worker that took longest, and rank 0's `gather` (the
            weights gathered, digested, and copied to host memory or sent) and `trainer_canary`, beside the worker's.
    """

    agreement: Agreement
    gib: float
    seconds: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Under sync/."""
        found = {f"sync/canary_{name}": value for name, value in self.agreement._asdict().items() if value is not None}
        return found | {"sync/gib": self.gib}
