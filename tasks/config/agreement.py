# SPDX-License-Identifier: Apache-2.0
"""What the sections of one configuration must agree on: a list of checks, each of fields in more than one section.

What a field or a section can tell by itself is checked there. Here a check reads all `RunSections`, answers nothing
where it holds, and raises ValueError with the fields, their values and what would be right where it does not.
"""

from collections.abc import Callable

from models.config.section import AUTO
from tasks.config.sections import RunSections
from tasks.system.credentials import refuse_secret_options

LEAST_ROUNDING = 1e-3
"""By which velocities in float32 and bfloat16 differ at least: one of a bfloat16 number alone is up to 2^-9 of it."""


def check_agreement(config: RunSections) -> None:
    """Make every check of `CHECKS`, in that order. Raises ValueError, the first one's that does not hold."""
    for check in CHECKS:
        check(config)


def check_secrets(config: RunSections) -> None:
    """No field is a secret, and no address holds one: all of the config is recorded."""
    refuse_secret_options(config.model_dump(), "the config")


def check_group_size(config: RunSections) -> None:
    """An advantage compares the samples of one prompt, unless a teacher says what is right."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    compares = config.is_online and config.actor_rollout_ref.actor.teacher_path is None
    if compares and rollout.n < 2:
        raise ValueError(
            f"actor_rollout_ref.rollout.n is {rollout.n}: {algorithm.adv_estimator} compares the samples of one "
            "prompt and needs at least 2"
        )


def check_selection(config: RunSections) -> None:
    """The best and the worst samples of a group are fewer than all."""
    k, n = config.algorithm.best_worst_k, config.actor_rollout_ref.rollout.n
    if k is not None and 2 * k >= n:
        raise ValueError(
            f"algorithm.best_worst_k is {k}, but the {k} best and {k} worst of rollout.n {n} samples are all there "
            f"are: {f'take at most {(n - 1) // 2}, ' * (n > 2)}raise rollout.n, or leave it out"
        )


def check_log_probs_exist(config: RunSections) -> None:
    """A policy gradient takes log-probs, which the ODE has none of."""
    loss = config.actor_rollout_ref.actor.diffusion_loss.loss_mode
    noise_level = config.actor_rollout_ref.rollout.algo.noise_level
    if config.algorithm.trainer_type == "policy_gradient" and noise_level == 0:
        raise ValueError(
            f"actor_rollout_ref.rollout.algo.noise_level is 0, an ODE without log-probs: loss {loss} needs it above 0"
        )


def check_solver(config: RunSections) -> None:
    """What exploring leaves in the finished latents is predicted for Euler's steps after the window."""
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.trainer_type == "policy_gradient" and rollout.pipeline.solver != "euler":
        raise ValueError(
            f"actor_rollout_ref.rollout.pipeline.solver is {rollout.pipeline.solver}, but loss "
            f"{config.actor_rollout_ref.actor.diffusion_loss.loss_mode} explores by steps with noise, and what these "
            "leave is known for euler alone: set euler; val_kwargs.pipeline.solver may be another"
        )


def check_levels_of_a_pass(config: RunSections) -> None:
    """The levels, or steps, of a sample are so many times those of a pass."""
    rollout, together = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.levels_per_pass
    steps, what = rollout.pipeline.num_inference_steps, "noise levels"
    if config.algorithm.trainer_type == "direct_preference":
        levels = config.algorithm.levels_per_sample(steps)
    elif together > 1:
        levels, what = rollout.algo.window_length(steps), "trained steps"
    else:
        return
    if levels % together:
        raise ValueError(
            f"actor_rollout_ref.actor.levels_per_pass is {together}, which does not divide the {levels} {what} "
            "of a sample: give a divisor, so that all passes are of one size"
        )


def check_finished_samples(config: RunSections) -> None:
    """A loss on finished samples has no log-probs that could be corrected."""
    algorithm = config.algorithm
    if algorithm.trainer_type == "direct_preference" and not algorithm.rollout_correction.bypass_mode:
        loss = config.actor_rollout_ref.actor.diffusion_loss.loss_mode
        raise ValueError(
            f"algorithm.rollout_correction.bypass_mode is false, but loss {loss} reads no log-probs that could be "
            "corrected: set it to true"
        )


def check_pairs_stay_together(config: RunSections) -> None:
    """A loss that compares pairs finds both pictures of each in one micro batch."""
    rollout, actor, algorithm = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.algorithm
    if algorithm.trainer_type != "direct_preference" or not algorithm.paired_preference:
        return
    loss = actor.diffusion_loss.loss_mode
    if actor.ppo_micro_batch_size_per_gpu != AUTO and actor.ppo_micro_batch_size_per_gpu % 2:
        raise ValueError(
            f"actor.ppo_micro_batch_size_per_gpu is {actor.ppo_micro_batch_size_per_gpu}: loss {loss} compares "
            "pairs and needs an even number"
        )
    if config.is_online and rollout.micro_batch_size != AUTO and rollout.micro_batch_size % rollout.n:
        raise ValueError(
            f"rollout.micro_batch_size {rollout.micro_batch_size} must be a multiple of rollout.n {rollout.n}: "
            f"loss {loss} looks for its pairs among samples that are kept together"
        )


def check_sequence_sharing(config: RunSections) -> None:
    """Ranks that share the tokens of a sample are on one machine."""
    sharing, trainer = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size, config.trainer
    if trainer.n_gpus_per_node % sharing:
        raise ValueError(
            f"actor.fsdp_config.ulysses_sequence_parallel_size is {sharing}: ranks that share a sequence are on "
            f"one machine, so trainer.n_gpus_per_node {trainer.n_gpus_per_node} must be a multiple of it"
        )


def check_batches(config: RunSections) -> None:
    """An iteration is whole optimiser steps, and each of these whole batches on every rank."""
    rollout, mini = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.ppo_mini_batch_size
    prompts = config.data.train_batch_size
    micro = 1 if rollout.micro_batch_size == AUTO else rollout.micro_batch_size
    if prompts % mini:
        raise ValueError(
            f"data.train_batch_size {prompts} must be a multiple of actor.ppo_mini_batch_size {mini} (both count "
            "prompts)"
        )
    if not config.is_online:
        if mini % config.data_ranks:
            raise ValueError(
                f"actor.ppo_mini_batch_size {mini} (pairs) must be a multiple of the {config.data_ranks} trainer ranks"
            )
        return
    per_step, unit = mini * rollout.n, micro * config.data_ranks
    if per_step % unit:
        raise ValueError(
            f"actor.ppo_mini_batch_size {mini} x rollout.n {rollout.n} = {per_step} samples must be a multiple of "
            f"rollout.micro_batch_size {micro} x {config.data_ranks} trainer ranks = {unit}"
        )


def check_placement(config: RunSections) -> None:
    """Colocated, a rollout worker sits on the GPU of each trainer rank."""
    rollout, ranks = config.actor_rollout_ref.rollout, config.trainer.world_size
    if rollout.placement == "colocated" and rollout.num_actors != ranks:
        raise ValueError(
            f"actor_rollout_ref.rollout.placement is colocated, one worker on each trainer rank's GPU: "
            f"rollout.num_actors is {rollout.num_actors}, set it to the {ranks} ranks"
        )


def check_weight_transport(config: RunSections) -> None:
    """Weights come the way that the placement of trainer and rollout leaves open."""
    rollout = config.actor_rollout_ref.rollout
    needs = {"ipc": "colocated", "collective": "separate"}.get(rollout.weight_transport, rollout.placement)
    if rollout.placement != needs:
        why = {
            "ipc": "a worker can read the trainer's memory only on the same GPU",
            "collective": "NCCL takes no two processes on one GPU",
        }[rollout.weight_transport]
        raise ValueError(
            f"actor_rollout_ref.rollout.weight_transport is {rollout.weight_transport} and rollout.placement "
            f"{rollout.placement}, but {why}: set placement to {needs}, or weight_transport to object_store"
        )
    whole = rollout.num_gpus_per_actor >= 1 or config.trainer.device == "cpu"
    if rollout.weight_transport == "collective" and not whole:
        raise ValueError(
            "actor_rollout_ref.rollout.weight_transport is collective and rollout.num_gpus_per_actor "
            f"{rollout.num_gpus_per_actor:g}, but NCCL takes no two processes on one GPU: give every worker a "
            "whole GPU, or set weight_transport to object_store"
        )


def check_overlap(config: RunSections) -> None:
    """One step off policy a rollout goes on during the update, and the loss knows which weights sampled."""
    if not config.trainer.one_step_off_policy:
        return
    correction = config.algorithm.rollout_correction
    if not config.is_online:
        raise ValueError(
            "trainer.one_step_off_policy is true, but algorithm.sample_source offline has no rollout to overlap "
            "with: set it to false"
        )
    if config.actor_rollout_ref.rollout.placement == "colocated":
        raise ValueError(
            "trainer.one_step_off_policy is true, but with actor_rollout_ref.rollout.placement colocated the "
            "workers sleep during the update: set placement to separate"
        )
    if not correction.bypass_mode and correction.rollout_is is None:
        raise ValueError(
            "trainer.one_step_off_policy is true and algorithm.rollout_correction.bypass_mode false without "
            "rollout_is: the loss would compare with weights that did not sample, and nothing would account for "
            "it; set bypass_mode to true, or rollout_is to step or sequence"
        )


def check_queues(config: RunSections) -> None:
    """One step off policy the whole next iteration waits at the rollout workers, or the update would wait for it."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.micro_batch_size == AUTO:
        return
    batches = -(-config.data.train_batch_size * rollout.n // rollout.micro_batch_size)
    if config.trainer.one_step_off_policy and batches > rollout.num_actors * rollout.max_queued_batches:
        raise ValueError(
            f"trainer.one_step_off_policy is true, but {rollout.num_actors} rollout workers queue "
            f"{rollout.max_queued_batches} batches each and an iteration has {batches}: the update would wait "
            f"until they are handed out; raise actor_rollout_ref.rollout.max_queued_batches"
        )


def check_determinism(config: RunSections) -> None:
    """Deterministic kernels are set in processes that this project starts."""
    name = config.actor_rollout_ref.rollout.name
    if config.trainer.full_determinism and name != "diffusers":
        raise ValueError(
            f"trainer.full_determinism is true, but actor_rollout_ref.rollout.name is {name}, whose processes it "
            "does not reach: sample with diffusers, or set it to false"
        )


def check_cuda_graphs(config: RunSections) -> None:
    """There is a GPU to record them on."""
    if config.actor_rollout_ref.rollout.cuda_graphs and config.trainer.device != "cuda":
        raise ValueError(
            f"actor_rollout_ref.rollout.cuda_graphs is true, but trainer.device is {config.trainer.device}: set it to "
            "false, or trainer.device to cuda"
        )


def check_profile(config: RunSections) -> None:
    """Profiled ranks and workers exist."""
    profile, workers = config.trainer.profile, config.actor_rollout_ref.rollout.num_actors
    for field, there in (("ranks", config.trainer.world_size), ("rollout_workers", workers)):
        unknown = [number for number in getattr(profile, field) if number >= there]
        if profile.iterations and unknown:
            raise ValueError(f"trainer.profile.{field} names {unknown[0]}, but there are {there}: they count from 0")


def check_guards(config: RunSections) -> None:
    """What is to stop a run must be there, and be asked."""
    guards, every = config.reward.guards, config.trainer.test_freq
    if guards.action != "stop":
        return
    if not config.is_online or every == 0:
        why = "trainer.test_freq is 0" if config.is_online else "algorithm.sample_source is offline"
        advice = "validate every few iterations, or set action to flag" if config.is_online else "set action to flag"
        raise ValueError(f"reward.guards.action is stop and {why}: guards are tested at validations, so {advice}")


def check_rollout_gpus(config: RunSections) -> None:
    """On CUDA a worker that shares no rank's GPU has one, or a share."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.device == "cuda" and not config.shares_gpus and not rollout.num_gpus_per_actor:
        raise ValueError(
            "actor_rollout_ref.rollout.num_gpus_per_actor is 0, but trainer.device is cuda and placement separate: all "
            "workers would be on the first GPU, beside whatever is there; give each a GPU or a share of one"
        )


def check_text_encoders(config: RunSections) -> None:
    """What encodes prompts within the run knows how long they are, and has the GPU that it is to share."""
    data, trainer = config.data, config.trainer
    if not data.is_live:
        return
    if config.actor_rollout_ref.rollout.pipeline.max_sequence_length is None:
        raise ValueError(
            "data.embeddings is live, but actor_rollout_ref.rollout.pipeline.max_sequence_length is null: say how many "
            "tokens a prompt may have"
        )
    if data.text_encoder.is_colocated and trainer.device != "cuda":
        raise ValueError(
            f"data.text_encoder.placement is colocated, on a trainer rank's GPU, but trainer.device is "
            f"{trainer.device}: set placement to separate"
        )


def check_rewards_place(config: RunSections) -> None:
    """Rewards that are to share the trainer ranks' GPUs find some there."""
    for label, entry in config.reward.functions.items():
        if entry.is_colocated and config.trainer.device != "cuda":
            raise ValueError(
                f"reward.functions.{label}.placement is colocated, on the trainer ranks' GPUs, but trainer.device is "
                f"{config.trainer.device}: set placement to separate"
            )


def check_rewriting(config: RunSections) -> None:
    """Prompts that change are encoded during the run, and are sampled from."""
    data = config.data
    if data.rewrite_prompts is None:
        return
    if not data.is_live:
        raise ValueError(
            f"data.rewrite_prompts is {data.rewrite_prompts}, but data.embeddings {data.embeddings} holds those of "
            "prompts as they are: set data.embeddings to live, or leave data.rewrite_prompts out"
        )
    if not config.is_online:
        raise ValueError(
            f"data.rewrite_prompts is {data.rewrite_prompts}, but algorithm.sample_source offline learns from pictures "
            "of the prompts as they are: leave it out"
        )


def check_number_formats(config: RunSections) -> None:
    """Rollout and trainer compute in one number format where their velocities may not differ by its rounding."""
    policy, allowed = config.actor_rollout_ref, config.canary_tolerance
    rollout, trainer = policy.model.dtype, policy.actor.fsdp_config.param_dtype
    if config.is_online and trainer not in (None, rollout) and allowed < LEAST_ROUNDING:
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.param_dtype is {trainer}, but the rollout computes in "
            f"actor_rollout_ref.model.dtype {rollout}: their velocities differ by rounding, about 0.01, where a weight "
            f"sync allows {allowed:g}; leave param_dtype out, set model.dtype to {trainer}, or raise "
            "trainer.canary_tolerance"
        )


def check_whole_weights_format(config: RunSections) -> None:
    """Frozen weights that are whole on each rank are outside of what FSDP casts."""
    policy = config.actor_rollout_ref
    sharding, dtype = policy.actor.fsdp_config, policy.model.dtype
    whole = policy.model.trains_lora and not sharding.shard_frozen and not policy.actor.shards_all_in_fp32
    if whole and sharding.param_dtype not in (None, dtype):
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.param_dtype is {sharding.param_dtype} and shard_frozen is false, so "
            f"that frozen weights stay in actor_rollout_ref.model.dtype {dtype}: leave param_dtype out, set it to "
            f"{dtype}, or set shard_frozen to true"
        )


CHECKS: tuple[Callable[[RunSections], None], ...] = (
    check_secrets,
    check_group_size,
    check_selection,
    check_log_probs_exist,
    check_solver,
    check_levels_of_a_pass,
    check_finished_samples,
    check_pairs_stay_together,
    check_sequence_sharing,
    check_batches,
    check_placement,
    check_weight_transport,
    check_overlap,
    check_queues,
    check_determinism,
    check_cuda_graphs,
    check_profile,
    check_guards,
    check_rollout_gpus,
    check_text_encoders,
    check_rewards_place,
    check_rewriting,
    check_number_formats,
    check_whole_weights_format,
)
