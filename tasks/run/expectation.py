# SPDX-License-Identifier: Apache-2.0
"""What an iteration should take, said at a run's start, and what it took, said once beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from models.algorithms import get_diffusion_loss_fn
from models.cost.device_peaks import BFLOAT16
from models.cost.flops import Batch, PolicyFlops, compared_passes, step_forwards
from models.cost.measured_shares import MEASURED_ON, Shares, measured_shares
from tasks.config.tree import TrainConfig
from tasks.data.pairs import SIDES
from tasks.rewards.base import check_reward
from tasks.run.update_passes import learnt_of_a_prompt, trained_steps

COMPARED = 3
"""The iteration of a process that is set beside what was expected: the ones before compile."""
SELDOM = ("testing", "save_checkpoint", "export")
"""Stages that are not in every iteration."""


@dataclass(frozen=True)
class PlannedWork:
    """Operations of an iteration, where each sample counts with the longest prompt.

    Attributes:
        samples: that are sampled, or read as pairs.
        rollout: of all denoising steps; 0 where pairs are read.
        old_log_prob: of the trainer's own log-probs before its first step.
        update: of forward and backward, what gradient checkpointing computes again left out.
        recomputed: that.
        compared: of forwards without gradient in the update: older weights of the policy and the reference.
        reference: of them, those of reference and teacher.
    """

    samples: int
    rollout: float
    old_log_prob: float
    update: float
    recomputed: float
    compared: float
    reference: float


def planned_work(config: TrainConfig, flops: PolicyFlops) -> PlannedWork:
    """What an iteration of the config has to compute; decoding, rewards and weight syncs do not count."""
    settings, algorithm = config.actor_rollout_ref, config.algorithm
    rollout, actor = settings.rollout, settings.actor
    per_prompt = rollout.n if config.is_online else len(SIDES)
    samples = config.data.train_batch_size * per_prompt
    chosen = learnt_of_a_prompt(config)
    learnt = config.data.train_batch_size * chosen
    steps = trained_steps(config)
    shapes, trained = [flops.text._replace(samples=samples)], float(learnt * steps * actor.ppo_epochs)
    recorded = 0
    if config.records_unconditional and flops.text.negative_tokens:  # no more once the weights have moved
        recorded = actor.ppo_mini_batch_size * chosen * steps
    policy, others = compared_work(config, trained)
    rescored = 0.0 if algorithm.rollout_correction.bypass_mode else float(samples * steps)

    def counted(own: float, older: float = 0.0, frozen: float = 0.0, recompute: bool = False) -> float:
        taken = recorded if own else 0.0
        return flops.update(shapes, own, older, frozen, recorded=taken, recompute=recompute)

    update = counted(trained)
    return PlannedWork(
        samples,
        rollout=flops.rollout(shapes) if config.is_online else 0.0,
        old_log_prob=counted(0.0, rescored),
        update=update,
        recomputed=counted(trained, recompute=True) - update if actor.fsdp_config.gradient_checkpointing else 0.0,
        compared=counted(0.0, policy, others),
        reference=counted(0.0, 0.0, others),
    )


def compared_work(config: TrainConfig, trained: float) -> tuple[float, float]:
    """Samples times timesteps that older weights of the policy see, and reference and teacher.

    Args:
        trained: samples times timesteps that are trained on, over all epochs.
    """
    actor = config.actor_rollout_ref.actor
    loss = get_diffusion_loss_fn(actor.diffusion_loss.loss_mode, actor.diffusion_loss.options)
    seen = trained / (actor.ppo_epochs if loss.process == "forward" else 1)
    policy, others = compared_passes(loss, actor)
    return policy * seen, others * seen


@dataclass(frozen=True)
class RewardWork:
    """What the rewards ask of the CPUs.

    Attributes:
        core_seconds: label -> of one core for an iteration's samples, where a figure is known.
        seconds: until the last of these is scored, if every worker has a core.
        unknown: labels of the others.
    """

    core_seconds: Mapping[str, float]
    seconds: float
    unknown: tuple[str, ...] = ()


def reward_work(config: TrainConfig) -> RewardWork:
    """By the figures that the rewards declare of themselves."""
    pipeline, known, unknown, longest = config.actor_rollout_ref.rollout.pipeline, {}, [], 0.0
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    for label, (name, entry) in config.reward.named().items():
        declared = getattr(check_reward(name, **entry.options), "core_seconds", None)
        each = declared and declared(entry.options, pipeline.height * pipeline.width)
        if each is None or entry.num_gpus or entry.is_colocated:
            unknown.append(label)
            continue
        frames = ceil((pipeline.num_frames or 1) / entry.frame_interval)
        known[label] = each * samples * frames * entry.training_share
        longest = max(longest, known[label] / entry.num_workers)
    return RewardWork(known, longest, tuple(unknown))


@dataclass(frozen=True)
class Placed:
    """Seconds of an iteration in a placement.

    Attributes:
        rollout, training: of their stages; training is old log-probs and update.
        waits: of rewards that the rollout does not hide.
        ahead: is the next iteration sampled during the update?
    """

    rollout: float
    training: float
    waits: float
    ahead: bool

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration, by the table of docs/placement.md."""
        sampled = self.rollout + self.waits
        return max(sampled, self.training) if self.ahead else sampled + self.training


@dataclass(frozen=True)
class Expectation:
    """What an iteration should take.

    Attributes:
        samples: of an iteration.
        rollout, old_log_prob, update: GPU seconds; the update's are with `compared`.
        compared, reference: GPU seconds of the update's forwards without gradient, and of the reference's among them.
        rollout_gpus, trainer_gpus: that share these.
        colocated: are they the same?
        ahead: is the next iteration sampled during the update?
        rewards: None where nothing is scored.
        shares: of the peak; None where the seconds are those at the peak.
    """

    samples: int
    rollout: float
    old_log_prob: float
    update: float
    compared: float
    reference: float
    rollout_gpus: float
    trainer_gpus: float
    colocated: bool
    ahead: bool
    rewards: RewardWork | None
    shares: Shares | None

    @property
    def placed(self) -> Placed:
        """As the run computes."""
        return self.on(self.rollout_gpus, self.trainer_gpus, self.ahead)

    def on(self, rollout_gpus: float, trainer_gpus: float, ahead: bool) -> Placed:
        """The same work on so many GPUs."""
        sampling = self.rollout / rollout_gpus if self.rollout else 0.0
        scoring = 0.0 if self.rewards is None else self.rewards.seconds
        training = (self.old_log_prob + self.update) / trainer_gpus
        return Placed(sampling, training, max(scoring - sampling, 0.0), ahead)

    def elsewhere(self) -> tuple[str, Placed] | None:
        """The other placement of the same GPUs, in words; None where there is none."""
        if self.colocated:
            gpus = int(self.trainer_gpus)
            ways = [(k, self.on(k, gpus - k, True)) for k in range(1, gpus)]
            if not ways:
                return None
            k, best = min(ways, key=lambda way: way[1].seconds)
            return f"apart, {k} of {gpus} GPUs sampling one step ahead", best
        gpus = int(self.rollout_gpus + self.trainer_gpus)
        return (f"colocated on {gpus} GPUs", self.on(gpus, gpus, False)) if self.rollout and gpus else None

    def lines(self) -> list[str]:
        """What a run says at its start."""
        if self.shares is None:
            return [self._whole("at its devices' peak an iteration takes")]
        said = [self._whole("an iteration should take"), self._basis(self.shares)]
        return [*said, *self._of_rewards(), *self._of_placement()]

    def _whole(self, begins: str) -> str:
        placed = self.placed
        update = f"update {self.update / self.trainer_gpus:.3g} s"
        within = {"reference": self.reference, "older weights": self.compared - self.reference}
        of_it = [f"{name} {work / self.trainer_gpus:.3g} s" for name, work in within.items() if work]
        parts = [f"rollout {placed.rollout:.3g} s"] if self.rollout else []
        parts += [f"old log-probs {self.old_log_prob / self.trainer_gpus:.3g} s"] if self.old_log_prob else []
        parts += [update + (f" with {' and '.join(of_it)}" if of_it else "")]
        parts += [f"rewards after the rollout {placed.waits:.3g} s"] if placed.waits else []
        why = "the longer of sampling and training" if self.ahead else "one after the other"
        return (
            f"{begins} {placed.seconds:.3g} s, {self.samples / placed.seconds:.3g} images/s: {', '.join(parts)}; {why}"
        )

    def _basis(self, shares: Shares) -> str:
        measured = shares.measured
        return (
            f"expected by the shares of the peak that {measured.name}, {'compiled' if measured.compiled else 'eager'}, "
            f"reached on one {MEASURED_ON.removeprefix('NVIDIA ')} (rollout {shares.rollout:.2f}, update "
            f"{shares.update:.2f}, forwards without gradient {shares.reference:.2f}); compilation, weight syncs, "
            "sleep, validations and records come on top"
        )

    def _of_rewards(self) -> list[str]:
        if self.rewards is None:
            return []
        known = [f"{label} {work:.3g} core-seconds" for label, work in self.rewards.core_seconds.items()]
        said = known + [f"{label} not known" for label in self.rewards.unknown]
        hidden = ""
        if known:
            hidden = f"; {self.rewards.seconds:.3g} s if each worker has a core, during the rollout and after it"
        return [f"expected of rewards: {', '.join(said)}{hidden}"]

    def _of_placement(self) -> list[str]:
        other = self.elsewhere()
        if other is None:
            return ["expected apart: not on one GPU"] if self.colocated else []
        name, placed = other
        gain = placed.seconds - self.placed.seconds
        say = f"expected {name}: {placed.seconds:.3g} s"
        if self.colocated:
            if gain < 0:
                return [f"{say}, which is less than here"]
            return [f"{say}, which pays where sleep, waking and rewards of unknown length take more than {gain:.3g} s"]
        return [f"{say}, and sleep and waking where both do not fit together, against {self.placed.seconds:.3g} s here"]


def expect(
    config: TrainConfig, flops: PolicyFlops, peaks: Mapping[str, float], *, measured: bool
) -> Expectation | None:
    """What an iteration should take; None where a peak is not known.

    Args:
        peaks: 1e12 operations a second of one device, by rollout and update.
        measured: by the measured shares of the peak; else what it takes at the peak.
    """
    online = config.is_online
    if "update" not in peaks or (online and "rollout" not in peaks) or (online and not config.rollout_devices):
        return None
    shares = _shares(config, flops) if measured else None
    of_rollout, of_update, of_forward = (
        (shares.rollout, shares.update, shares.reference) if shares is not None else (1.0, 1.0, 1.0)
    )
    work, trainer = planned_work(config, flops), peaks["update"] * 1e12
    done = work.update + (work.recomputed if shares is not None else 0.0)
    compared = work.compared / (trainer * of_forward)
    return Expectation(
        work.samples,
        rollout=work.rollout / (peaks["rollout"] * 1e12 * of_rollout) if online else 0.0,
        old_log_prob=work.old_log_prob / (trainer * of_forward),
        update=done / (trainer * of_update) + compared,
        compared=compared,
        reference=work.reference / (trainer * of_forward),
        rollout_gpus=config.rollout_devices if online else 0.0,
        trainer_gpus=float(config.trainer.world_size),
        colocated=online and config.actor_rollout_ref.rollout.placement == "colocated",
        ahead=config.trainer.one_step_off_policy,
        rewards=reward_work(config) if online and shares is not None else None,
        shares=shares,
    )


def _shares(config: TrainConfig, flops: PolicyFlops) -> Shares | None:
    """None where nothing like it was measured: on a CPU, in other formats than bf16."""
    settings = config.actor_rollout_ref
    model, rollout = settings.model, settings.rollout
    formats = {model.dtype, settings.actor.fsdp_config.param_dtype or model.dtype}
    if config.trainer.device != "cuda" or formats != {BFLOAT16} or model.frozen_dtype is not None:
        return None
    text: Batch = flops.text
    forward = step_forwards(flops.model_config, text.text_tokens, text.negative_tokens or None)[0] / 1e12
    trainer = measured_shares(forward, model.compile)
    compiled = model.compile if rollout.name == "diffusers" else not rollout.vllm_omni.enforce_eager
    sampler = measured_shares(forward, compiled, rollout.cuda_graphs)
    return Shares(trainer.measured, sampler.rollout, trainer.update, trainer.reference)


class BesideExpected:
    """Says once, of a process's third iteration, what it took beside what was expected.

    Args:
        expected: of an iteration.
        workers: of the rollout.
    """

    def __init__(self, expected: Expectation, workers: int):
        self.expected, self.workers, self._seen = expected, workers, 0

    def observe(self, number: int, metrics: Mapping[str, float]) -> str | None:
        """The line, once it is due.

        Args:
            number: of the iteration, whose update this process has made.
            metrics: of it.
        """
        self._seen += 1
        return beside(self.expected, number, metrics, self.workers) if self._seen == COMPARED else None


def beside(expected: Expectation, number: int, metrics: Mapping[str, float], workers: int) -> str:
    """What an iteration took, stage by stage, beside what was expected of it."""
    placed, trainer = expected.placed, expected.trainer_gpus
    seconds = {name.removeprefix("timing_s/"): s for name, s in metrics.items() if name.startswith("timing_s/")}
    step = seconds["step"] - sum(seconds.get(name, 0.0) for name in SELDOM)
    busy = metrics.get("perf/rollout_busy_s", 0.0)
    # With early steps the stage is what was left of the update once all was scored.
    update = metrics["perf/update_busy_s"] if metrics.get("perf/early_steps") else seconds.get("update_actor", 0.0)
    stages = {
        "rollout": (busy / workers if workers else 0.0, placed.rollout),
        "old log-probs": (seconds.get("old_log_prob", 0.0), expected.old_log_prob / trainer),
        "update": (update, expected.update / trainer),
        "rewards after the rollout": (seconds.get("reward", 0.0), placed.waits),
    }
    parts = [f"{name} {took:.3g} s ({should:.3g})" for name, (took, should) in stages.items() if took or should]
    counted = {"step", "gen", "old_log_prob", "update_actor", "reward", *SELDOM}
    others = {name: s for name, s in seconds.items() if name not in counted and "/" not in name}
    most = sorted(others.items(), key=lambda entry: -entry[1])[:2]
    rest = ", ".join(f"{name} {s:.3g} s" for name, s in most)
    scored = metrics.get("perf/reward_busy_s", 0.0) / expected.samples
    basis = "expected" if expected.shares is not None else "at its devices' peak"
    return (
        f"{basis} {placed.seconds:.3g} s, iteration {number} took {step:.3g}: {', '.join(parts)}"
        + (f"; most of the rest {rest}" if rest else "")
        + (f"; rewards {scored:.2g} s a picture" if scored else "")
    )
