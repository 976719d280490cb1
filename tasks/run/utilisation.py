# SPDX-License-Identifier: Apache-2.0
"""How much of what its devices can compute an iteration used: perf/tflops and perf/mfu."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from models.cost.device_peaks import peak_tflops
from models.cost.flops import Batch, PolicyFlops
from tasks.actors.actor_group import ActorGroup
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.waiting import get
from tasks.config.tree import TrainConfig
from tasks.data.pairs import PairBatch
from tasks.records.metrics import compute_utilisation_metrics
from tasks.run.expectation import Expectation, compared_work, expect

UNMEASURED = (
    "which share of that peak is reached was measured on CUDA in bfloat16 alone; perf/mfu of an iteration tells it"
)


class Utilisation:
    """Joins an iteration's operations with its seconds and the devices of rollout and trainer."""

    def __init__(self, config: TrainConfig, flops: PolicyFlops, rollout: ActorGroup | None, trainer: ActorGroup):
        self.config, self.flops = config, flops
        self.groups = {"update": trainer} | ({} if rollout is None else {"rollout": rollout})

    def metrics(
        self,
        batches: Sequence[PendingBatch | PairBatch],
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> dict[str, float]:
        """See `compute_utilisation_metrics`.

        Args:
            batches: of the iteration.
            metrics: of it, with actor/sample_steps and, if it sampled, perf/rollout_busy_s.
            seconds: by stage.
        """
        settings, ranks = self.config.actor_rollout_ref, self.config.trainer.world_size
        shapes = [Batch(len(batch.keys), *batch.text) for batch in batches]
        trained = metrics.get("actor/sample_steps", 0.0) * self.config.data_ranks
        recorded = metrics.get("actor/recorded_steps", 0.0) * self.config.data_ranks
        policy, others = compared_work(self.config, trained)
        flops = {"update": self.flops.update(shapes, trained, policy, others, recorded=recorded)}
        early = metrics.get("perf/early_steps", 0.0) > 0.0  # then the update is longer than what was waited for it
        spent = {"update": (metrics["perf/update_busy_s"] if early else seconds["update_actor"]) * ranks}
        if settings.actor.fsdp_config.gradient_checkpointing:
            flops["update/recomputed"] = self.flops.update(
                shapes, trained, policy, others, recorded=recorded, recompute=True
            )
            spent["update/recomputed"] = spent["update"]
        sampled = metrics.get("perf/rollout_busy_s", 0.0) > 0.0  # else an earlier process of the run did it
        if sampled and "rollout" in self.groups and self.config.rollout_devices:
            flops["rollout"] = self.flops.rollout(shapes)
            share = self.config.rollout_devices / len(self.groups["rollout"])
            spent["rollout"] = metrics["perf/rollout_busy_s"] * share
        return compute_utilisation_metrics(flops, spent, self.peaks)

    @cached_property
    def expected(self) -> Expectation | None:
        """What an iteration should take, by measured shares of its devices' peak; None where that is not known."""
        return expect(self.config, self.flops, self.peaks, measured=True)

    def expectation(self) -> list[str]:
        """What a run says of it at its start."""
        known = self.expected
        at_peak = expect(self.config, self.flops, self.peaks, measured=False)
        if known is None or at_peak is None:
            return [
                f"an iteration's time cannot be estimated: the peak of this {self.config.trainer.device} is not known "
                "(trainer.device_peak_tflops gives it)"
            ]
        (bound,) = at_peak.lines()
        return [f"{bound}; {UNMEASURED}"] if known.shares is None else [bound, *known.lines()]

    @cached_property
    def peaks(self) -> dict[str, float]:
        """1e12 operations a second of one device, for each of rollout and update where that is known."""
        settings, given = self.config.actor_rollout_ref, self.config.trainer.device_peak_tflops
        if given is not None:
            return dict.fromkeys(self.groups, given)
        if self.config.trainer.device != "cuda":
            return {}
        formats = {
            "update": settings.actor.fsdp_config.param_dtype or settings.model.dtype,
            "rollout": settings.model.dtype,
        }
        names = {  # by a lambda, because an actor would import this module to have its function
            stage: get(group.actors[0].__ray_call__.remote(lambda _: torch.cuda.get_device_name()))
            for stage, group in self.groups.items()
        }
        peaks = {stage: peak_tflops(name, formats[stage]) for stage, name in names.items()}
        return {stage: peak for stage, peak in peaks.items() if peak is not None}
