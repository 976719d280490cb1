# SPDX-License-Identifier: Apache-2.0
"""What the loss asks of the rollout and of the rest of the config, beyond what each section can say by itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from models.algorithms import DiffusionNFTLoss, GRPOGuardLoss, check_loss_inputs, get_diffusion_loss_fn
from models.algorithms.losses import IS_WEIGHTS, OLD_MEAN, TEACHER_MEAN, TRAINER_TYPES, DiffusionLossFn
from models.algorithms.rollout_correction import too_far_apart
from models.schedulers import leftover_noise, step_without_log_prob
from models.schedulers.kernels import cps_log_prob, get_kernel
from models.training.engine import FIRST_RATIO
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig

if TYPE_CHECKING:
    from models.schedulers import FlowMatchSDEDiscreteScheduler


def check_exploration(config: TrainConfig, scheduler: "FlowMatchSDEDiscreteScheduler") -> None:
    """The window's steps have log-probs, and what they add is taken away again by those that follow, nearly."""
    rollout = config.actor_rollout_ref.rollout
    algo, steps = rollout.algo, rollout.pipeline.num_inference_steps
    if config.algorithm.trainer_type != "policy_gradient" or not config.is_online:
        return
    low, high = algo.window_bounds(steps)
    if (found := step_without_log_prob(scheduler, algo)) is not None:
        step, sigma, std = found
        raise ConfigError(
            f"rollout.algo.sde_type {algo.sde_type} has no finite log-prob at step {step} of [{low}, {high}), noise "
            f"level {sigma:.3g}, where its standard deviation is {std:.3g}: it must be above 0 at each step that "
            "sde_window_range covers"
        )
    left = leftover_noise(scheduler, algo)
    if left > algo.max_leftover_noise:
        size = algo.window_length(steps)
        raise ConfigError(
            f"exploring would leave noise of standard deviation {left:.2f} in the finished latents, more than "
            f"rollout.algo.max_leftover_noise {algo.max_leftover_noise:g}: {size} steps of [{low}, {high}) of "
            f"{steps} with {algo.sde_type} at noise_level {algo.noise_level:g}; let sde_window_range end earlier or "
            "lower noise_level"
        )


def check_loss(config: TrainConfig) -> None:
    """The loss is known, gets what it declares, and does not divide by a standard deviation of 0."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    name, steps = actor.diffusion_loss.loss_mode, rollout.pipeline.num_inference_steps
    weighted = config.algorithm.rollout_correction.rollout_is is not None
    options = actor.diffusion_loss.options
    check_loss_inputs(name, actor.use_kl_loss, weighted, actor.teacher_path is not None, options)
    loss = get_diffusion_loss_fn(name, options)
    _check_fewer_images(config, loss)
    for field, right in (("trainer_type", TRAINER_TYPES[loss.process]), ("paired_preference", loss.paired)):
        if getattr(config.algorithm, field) != right:
            raise ConfigError(
                f"algorithm.{field} is {getattr(config.algorithm, field)}, but loss {name!r} needs {right}: set it, or "
                "give the algorithm.name that brings both"
            )
    if config.trainer.one_step_off_policy and "old_log_probs" not in loss.required_data_keys:
        raise ConfigError(
            f"trainer.one_step_off_policy is true, but loss {name!r} compares with no old log-probs, so it would take "
            "samples of older weights for its own: set it to false"
        )
    if loss.process == "forward":
        if actor.kl_loss_type != "gaussian":
            raise ConfigError(
                f"actor.kl_loss_type is {actor.kl_loss_type}, but with loss {name} the distance to the start is that "
                "of the velocities, which has no step length: leave it out"
            )
        return
    _check_steps(config)
    _check_ratio(config, loss)
    gaussian = {OLD_MEAN, TEACHER_MEAN} & {*loss.required_data_keys}
    divides = f"loss {name}" if gaussian else "use_kl_loss" if actor.use_kl_loss else None
    if divides and rollout.algo.sde_type == "cps" and rollout.algo.window_bounds(steps)[1] == steps:
        raise ConfigError(
            f"rollout.algo.sde_window_range ends at the last of {steps} steps, whose standard deviation is 0 with cps, "
            f"and {divides} divides by it: let it end at {steps - 1} or before"
        )


def _check_fewer_images(config: TrainConfig, loss: DiffusionLossFn) -> None:
    """What changes which samples and steps a loss learns most from has a meaning for this one."""
    settings = config.actor_rollout_ref.actor.diffusion_loss
    name = settings.loss_mode
    if config.algorithm.best_worst_k is not None and not loss.learns_from_rewards():
        raise ConfigError(
            f"algorithm.best_worst_k is {config.algorithm.best_worst_k}, but loss {name} does not learn from rewards: "
            "leave it out"
        )
    if settings.awm_weighting == "adaptive" and isinstance(loss, DiffusionNFTLoss):
        raise ConfigError(
            f"actor.diffusion_loss.awm_weighting is adaptive, but loss {name} weighs its errors so by itself: leave "
            "it out"
        )
    if settings.temporal_gradient_rectification and (
        IS_WEIGHTS not in loss.optional_data_keys or isinstance(loss, GRPOGuardLoss)
    ):
        why = "scales its steps by itself" if isinstance(loss, GRPOGuardLoss) else "multiplies no step by a weight"
        raise ConfigError(
            f"actor.diffusion_loss.temporal_gradient_rectification is true, but loss {name} {why}: use flow_grpo or "
            "flow_dppo, or set it to false"
        )


def _check_steps(config: TrainConfig) -> None:
    """There is a step to learn from that the picture survives, and the KL's form has a meaning for the kernel."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    kernel, steps = rollout.algo.sde_type, rollout.pipeline.num_inference_steps
    if steps == 1:
        why = "has no noise and no gradient" if kernel == "cps" else "would leave its noise in the finished picture"
        raise ConfigError(
            f"rollout.pipeline.num_inference_steps is 1, but loss {actor.diffusion_loss.loss_mode} trains on the "
            f"sampler's random steps, and the last one {why} with {kernel}: take at least 2"
        )
    low, high = rollout.algo.window_bounds(steps)
    if kernel == "cps" and high == steps and rollout.algo.window_length(steps) == 1:
        raise ConfigError(
            f"rollout.algo.sde_window_range [{low}, {high}) with one trained step may choose the last of {steps}, "
            f"which has no noise and no gradient with cps: let it end at {steps - 1}"
        )
    if kernel == "cps" and high == steps and actor.diffusion_loss.temporal_gradient_rectification:
        raise ConfigError(
            f"actor.diffusion_loss.temporal_gradient_rectification divides by how a step's gradient scales, but the "
            f"last of {steps} steps has none with cps: let rollout.algo.sde_window_range end at {steps - 1}"
        )
    if actor.kl_loss_type == "flow_grpo" and kernel == "cps":
        raise ConfigError(
            "actor.kl_loss_type is flow_grpo, which leaves out the step length of sd = g sqrt(-D), but sde_type is "
            "cps, whose deviation has none: use gaussian, which is public code's form for cps too"
        )


def _check_ratio(config: TrainConfig, loss: DiffusionLossFn) -> None:
    """What a loss takes for the log-ratio of two Gaussians is one."""
    kernel = config.actor_rollout_ref.rollout.algo.sde_type
    if isinstance(loss, GRPOGuardLoss) and get_kernel(kernel).log_prob is cps_log_prob:
        raise ConfigError(
            f"loss {config.actor_rollout_ref.actor.diffusion_loss.loss_mode} centres and scales the ratio of a "
            f"Gaussian's log-probs, but those of rollout.algo.sde_type {kernel} leave the variance out, so that its "
            "ratios would be off by more than they are clipped at: use sde or dance_sde, or loss flow_grpo or flow_dppo"
        )


def check_first_ratio(config: TrainConfig, learned: Mapping[str, float], lag: float) -> str | None:
    """A warning where rounding takes much of the clip range, from the metrics of a process's first update.

    Nothing is said of a loss that clips no ratio of log-probs, and of recorded log-probs that are `lag` updates older
    than the weights: their ratios differ from 1 for another reason.

    Raises:
        RatioError: it is more than `trainer.max_logprob_difference` allows.
    """
    deviation, bypass = learned.get(f"actor/{FIRST_RATIO}"), config.algorithm.rollout_correction.bypass_mode
    if deviation is None or "actor/pg_clipfrac" not in learned or (lag and bypass):
        return None
    clip_ratio = config.actor_rollout_ref.actor.diffusion_loss.clip_ratio
    return too_far_apart(deviation, clip_ratio, config.trainer.max_logprob_difference, bypass)
