# SPDX-License-Identifier: Apache-2.0
"""How much of what its devices can compute an iteration used: perf/tflops and perf/mfu."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from models.algorithms import get_diffusion_loss_fn
from models.cost.device_peaks import peak_tflops
from models.cost.flops import Batch, PolicyFlops, compared_passes
from tasks.actors.actor_group import ActorGroup
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.waiting import get
from tasks.config.tree import TrainConfig
from tasks.data.pairs import SIDES, PairBatch
from tasks.records.metrics import compute_utilisation_metrics


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
        policy, others = self._compared(trained)
        flops = {"update": self.flops.update(shapes, trained, policy, others, recorded=recorded)}
        spent = {"update": seconds["update_actor"] * ranks}
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
        return compute_utilisation_metrics(flops, spent, self._peaks)

    def at_peak(self) -> dict[str, float]:
        """Seconds of an iteration's rollout and update if their devices did their peak all the time, where that is
        known.

        Each sample counts with the longest prompt and all of them are trained on; decoding, the trainer's own
        log-probs, rewards and weight syncs do not count.
        """
        config, policy_settings = self.config, self.config.actor_rollout_ref
        rollout, actor, algorithm = policy_settings.rollout, policy_settings.actor, config.algorithm
        samples = config.data.train_batch_size * (rollout.n if config.is_online else len(SIDES))
        inference_steps = rollout.pipeline.num_inference_steps
        if algorithm.trainer_type == "direct_preference":
            steps = algorithm.levels_per_sample(inference_steps)
        else:
            low, high = rollout.algo.window_bounds(inference_steps)
            steps = rollout.algo.sde_window_size or high - low
        shapes, trained = [self.flops.text._replace(samples=samples)], float(samples * steps * actor.ppo_epochs)
        recorded = samples * steps if config.records_unconditional and self.flops.text.negative_tokens else 0
        operations = {"update": self.flops.update(shapes, trained, *self._compared(trained), recorded=recorded)}
        devices = {"update": float(config.trainer.world_size), "rollout": config.rollout_devices}
        if config.is_online:
            operations["rollout"] = self.flops.rollout(shapes)
        return {
            stage: operations[stage] / (peak * 1e12 * devices[stage])
            for stage, peak in self._peaks.items()
            if stage in operations and devices[stage]
        }

    def expectation(self) -> str | None:
        """`at_peak` in a sentence; None where nothing is known."""
        found = self.at_peak()
        if not found:
            return None
        one_step_off = self.config.trainer.one_step_off_policy
        whole = max(found.values()) if one_step_off else sum(found.values())
        parts = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in sorted(found.items()))
        why = "the longer of the two" if one_step_off else "one after the other"
        return f"at its devices' peak an iteration takes {whole:.3g} s ({parts}, {why}); perf/mfu tells the share of it"

    def _compared(self, trained: float) -> tuple[float, float]:
        """Samples times timesteps that older weights of the policy see, and reference and teacher."""
        actor = self.config.actor_rollout_ref.actor
        loss = get_diffusion_loss_fn(actor.diffusion_loss.loss_mode, actor.diffusion_loss.options)
        seen = trained / (actor.ppo_epochs if loss.process == "forward" else 1)
        policy, others = compared_passes(loss, actor)
        return policy * seen, others * seen

    @cached_property
    def _peaks(self) -> dict[str, float]:
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
