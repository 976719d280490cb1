# SPDX-License-Identifier: Apache-2.0
"""Settings of the update that the models floor reads: optimiser, sharding, losses; see `models.config`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from models.config.bounds import (
    MOST_BATCH,
    MOST_COEFFICIENT,
    MOST_ITERATIONS,
    MOST_NOISE_LEVELS,
    MOST_PROCESSES,
    MOST_STEPS,
    Options,
)
from models.config.section import ANY_NAME, IMPORT_PATH, Later, NotShaping, Samples, Section, choices, known

AwmWeighting = Literal["uniform", "t", "t2", "huber", "ghuber", "adaptive"]
Decay = Annotated[float, Field(ge=0, lt=1)]
KlLossType = Literal["gaussian", "flow_grpo"]
LOSSES = (
    *("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "dpo", "diffusion_nft", "awm"),
    *("distill_kl", "distill_fm_mse"),
)
"""Those that are registered; this module is read where torch is not imported."""
DecaySchedule = Literal["copy", "linear_to_0_3", "linear_to_0_5", "delayed_linear_to_0_999"]


SCHEDULES_OF_ALL_STEPS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    "warmup_stable_decay",
)
"""Schedules of transformers' `get_scheduler` that depend on how many optimiser steps there are in all."""
SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", *SCHEDULES_OF_ALL_STEPS)
"""Those that are functions of the optimiser step alone."""
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""The others: a loss that should fall paces them, and the losses here are made anew with each iteration's samples."""


class OptimConfig(Section):
    """AdamW, and how its learning rate goes."""

    lr: float = Field(3e-4, gt=0, le=1.0, description="Learning rate after the warm-up.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of AdamW's first and second moments.")
    eps: float = Field(1e-8, gt=0, le=1.0, description="Added to AdamW's denominator.")
    weight_decay: float = Field(1e-4, ge=0, le=100.0, description="Decoupled weight decay.")
    lr_warmup_steps: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="Optimiser steps of linear warm-up, from lr/steps to lr; with a named lr_scheduler_type from 0.",
    )
    lr_scheduler_type: Later[str | None] = Field(
        None,
        description="Schedule of the learning rate, by transformers' name (docs/training.md); null is the warm-up and "
        "then a constant rate.",
        examples=["cosine", "constant_with_warmup"],
    )
    lr_scheduler_kwargs: Later[Options] = Field(
        default_factory=dict, description="The schedule's own arguments: num_cycles, min_lr, power ..."
    )
    total_training_steps: Later[int | None] = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="Optimiser steps that the schedule spans; its last rate then stays. null is all of the run's, and "
        "a longer run then is another run.",
    )
    clip_grad: float = Field(
        1.0, gt=0, le=1e9, description="Largest norm of the gradient over all ranks; 1e9 clips nothing."
    )

    @model_validator(mode="after")
    def _schedule_is_known(self) -> Self:
        name = self.lr_scheduler_type
        if name in SCHEDULES_BY_METRIC:
            raise ValueError(
                f"lr_scheduler_type is {name}, which a falling loss would pace: the losses here are of each "
                f"iteration's own samples and need not fall. Choose among {', '.join(SCHEDULES)}"
            )
        if name is not None and name not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type is {name!r}; known: {', '.join(SCHEDULES)}; or null")
        unread = {"lr_scheduler_kwargs": self.lr_scheduler_kwargs, "total_training_steps": self.total_training_steps}
        for field, value in unread.items() if name is None else ():
            if value:
                raise ValueError(f"{field} is {value}, but lr_scheduler_type is null, which does not read it")
        if name == "constant" and self.lr_warmup_steps:
            raise ValueError(
                f"lr_warmup_steps is {self.lr_warmup_steps}, but lr_scheduler_type constant has no warm-up: use "
                "constant_with_warmup, or leave lr_scheduler_type out for a warm-up that begins above 0"
            )
        return self

    @property
    def depends_on_length(self) -> bool:
        """Does the schedule depend on how many steps it spans?"""
        return self.lr_scheduler_type in SCHEDULES_OF_ALL_STEPS and "num_stable_steps" not in self.lr_scheduler_kwargs

    @property
    def spans_the_run(self) -> bool:
        """Does the learning rate depend on how long the run is?"""
        return self.depends_on_length and self.total_training_steps is None

    def spanning(self, steps: int) -> "OptimConfig":
        """These settings with `total_training_steps` filled in, for a run of that many optimiser steps."""
        if self.lr_scheduler_type is None or self.total_training_steps is not None:
            return self
        return self.model_copy(update={"total_training_steps": steps})


class EmaConfig(Section):
    """An exponential moving average of the trained weights, used for validation and export."""

    enable: bool = Field(False, description="Keep the average; validation and exported weights then use it.")
    decay: float = Field(
        0.9, gt=0, lt=1, description="Largest decay; after s optimiser steps it is min((1+s)/(10+s), decay)."
    )
    update_interval: int = Field(
        8, ge=1, le=MOST_STEPS, description="Optimiser steps between two updates of the average."
    )


class FSDPConfig(Section):
    """How the trainer's ranks hold and compute the model."""

    param_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Format in which the trainer computes; null is model.dtype, as the rollout does."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Format of gradient reduction.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more work."
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free unsharded weights between forward and backward: less memory, one more gather. false, with "
        "LoRA over frozen weights that are whole on every rank, has one exchange for all of LoRA and not one a block, "
        "and a lone rank that trains all weights and offloads none gathers them at once, too.",
    )
    shard_frozen: bool = Field(
        True,
        description="With LoRA: shard the frozen weights too. false keeps them whole on every rank, so that only the "
        "LoRA weights travel: faster where the model fits. A lone rank that offloads nothing has them whole anyway.",
    )
    shard_gradients: NotShaping[bool] = Field(
        False,
        description="Divide gradients among the ranks after every pass: each keeps its part. false adds up whole ones "
        "on every rank and divides them once an optimiser step: fewer exchanges, for LoRA and small models.",
    )
    param_offload: NotShaping[bool] = Field(
        False,
        description="Keep the shards of all weights, the gradients and the optimiser in host memory: a block's weights "
        "come to the GPU when it computes, and AdamW steps on the CPU.",
    )
    optimizer_offload: NotShaping[bool] = Field(
        False,
        description="Keep AdamW's moments in host memory, on the GPU for the optimiser step alone. With param_offload "
        "they are there already.",
    )
    ulysses_sequence_parallel_size: NotShaping[int] = Field(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="Ranks that share the tokens of a sample, for sequences too long for one GPU (video).",
    )


class DiffusionLossConfig(Section):
    """Which policy loss, and its bounds."""

    loss_mode: str = Field(
        "flow_grpo",
        description="Registered name of the loss, or package.module:Class.",
        json_schema_extra=choices(*LOSSES, own=ANY_NAME),
    )
    options: Later[Options] = Field(
        default_factory=dict, description="Keyword arguments of a loss of your own; those of the project take none."
    )
    clip_ratio: float = Field(
        1e-4,
        gt=0,
        le=MOST_COEFFICIENT,
        description="Ratio clip range of flow_grpo, grpo_guard and awm. Log-probs of sampled steps are means over the "
        "latent, so it is small for them: 1e-3..2e-6.",
    )
    adv_clip_max: float = Field(
        5.0,
        gt=0,
        le=MOST_COEFFICIENT,
        description="flow_grpo, grpo_guard, diffusion_nft and awm clamp advantages to plus or minus this.",
    )
    temporal_gradient_rectification: Later[bool] = Field(
        False,
        description="flow_grpo and flow_dppo: weigh each step by the inverse of how strongly its log-prob's gradient "
        "scales with the velocity, over the mean of these inverses over the window's range (Flash-GRPO).",
    )
    kl_mask_threshold: float = Field(
        1e-5,
        gt=0,
        le=MOST_COEFFICIENT,
        description="flow_dppo only: KL per latent element above which a step may not go further.",
    )
    dpo_beta: float = Field(
        100.0,
        gt=0,
        le=MOST_COEFFICIENT,
        description="dpo only: how sharply a pair's error difference counts; 100 in recipes, 2000 in the paper.",
    )
    nft_beta: float = Field(
        1.0, gt=0, le=1, description="diffusion_nft only: share of the policy in the implicit positive velocity."
    )
    awm_weighting: AwmWeighting = Field(
        "uniform", description="awm only: how a timestep's matching error becomes a log-prob, docs/algorithms.md."
    )
    awm_ema_coef: float = Field(
        1.0,
        ge=0,
        le=MOST_COEFFICIENT,
        description="awm only: weight of the distance to the slowly moving copy of the policy.",
    )


class ForwardProcessConfig(Section):
    """How finished samples are noised again, and the copy of the policy that some losses compare with.

    Read by the losses of the forward process (dpo, diffusion_nft, awm, distill_fm_mse); the policy-gradient losses
    train on the sampler's own steps and read none of it.
    """

    timestep_sampling: Literal["schedule", "stratified", "logit_normal"] = Field(
        "schedule",
        description="Noise levels to train at: those of the rollout's own schedule, one of each of num_train_timesteps "
        "equal parts of it, or drawn from logit-normal(0, 1).",
    )
    share_noise_in_group: Later[bool] = Field(
        False,
        description="All samples of a prompt are noised alike, with the same levels and the same noise, so that their "
        "errors differ by the samples alone (diffusion_nft, awm, distill_fm_mse).",
    )
    num_train_timesteps: int | None = Field(
        None,
        ge=1,
        le=MOST_NOISE_LEVELS,
        description="Noise levels of each sample in an update, of a schedule drawn without repetition; null takes "
        "every one of the schedule, or 1 of logit_normal.",
    )
    timestep_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of the schedule's levels to train at, counted from pure noise."
    )
    logit_normal_shift: Later[float] = Field(
        1.0,
        ge=1,
        le=100.0,
        description="logit_normal only: k of t <- k t / (1 + (k-1) t), which moves the levels towards pure noise. "
        "Public DPO of Stable Diffusion 3 draws from the model's own schedule, whose static shift is 3.",
    )
    old_policy_decay_schedule: DecaySchedule = Field(
        "copy",
        description="old <- d old + (1 - d) policy after an iteration: copy has d = 0; linear_to_0_5 lets d rise by "
        "0.001 an optimiser step up to 0.5, linear_to_0_3 up to 0.3, delayed_linear_to_0_999 by 0.0075 after 75 steps.",
    )
    old_policy_decay: float | None = Field(None, ge=0, lt=1, description="A constant d instead of the schedule.")
    old_policy_update_interval: int = Field(
        1, ge=1, le=MOST_ITERATIONS, description="Iterations between two updates of the old policy."
    )

    @model_validator(mode="after")
    def _levels_of_a_schedule(self) -> Self:
        if self.timestep_sampling == "stratified" and self.num_train_timesteps is None:
            raise ValueError(
                "timestep_sampling is stratified but num_train_timesteps is null, which takes every level as schedule "
                "does: say into how many parts the schedule is cut"
            )
        if self.timestep_sampling == "logit_normal" and self.timestep_fraction != 1.0:
            raise ValueError(
                f"timestep_fraction {self.timestep_fraction} is a share of the schedule's levels, but "
                f"timestep_sampling is {self.timestep_sampling}: leave it at 1"
            )
        if self.timestep_sampling != "logit_normal" and self.logit_normal_shift != 1.0:
            raise ValueError(
                f"logit_normal_shift is {self.logit_normal_shift:g}, but timestep_sampling {self.timestep_sampling} "
                "takes the schedule's levels, which have the model's shift: leave it at 1"
            )
        return self

    def share_of(self, levels: int) -> int:
        """`timestep_fraction` of so many levels, rounded down, and one at the least."""
        return max(int(levels * self.timestep_fraction + 1e-9), 1)  # .58 of 50 is 28.999999999999996

    def levels_per_sample(self, num_inference_steps: int) -> int:
        """Noise levels of each sample in an update, for a schedule of that many steps.

        Raises:
            ValueError: num_train_timesteps asks for more than there are.
        """
        if self.timestep_sampling == "logit_normal":
            return self.num_train_timesteps or 1
        there = self.share_of(num_inference_steps)
        if (self.num_train_timesteps or 0) > there:
            raise ValueError(
                f"algorithm.num_train_timesteps is {self.num_train_timesteps}, but timestep_fraction "
                f"{self.timestep_fraction} of {num_inference_steps} steps leaves {there}"
            )
        return self.num_train_timesteps or there


class DiffusionActorConfig(Section):
    """The update: how samples become optimiser steps."""

    strategy: str = Field(
        "fsdp2",
        description="Training engine: fsdp2, veomni, or package.module:Class (docs/training.md).",
        json_schema_extra=choices("fsdp2", "veomni", own=IMPORT_PATH),
    )
    python: NotShaping[str | None] = Field(
        None,
        description="Interpreter of the trainer's actors, /folder/bin/python of another environment that has what the "
        "training engine needs; null is the run's own (docs/training.md).",
    )
    ppo_mini_batch_size: int = Field(
        16, ge=1, le=MOST_BATCH, description="Prompts (with all their samples) per optimiser step."
    )
    ppo_micro_batch_size_per_gpu: Samples = Field(
        16,
        description="Largest number of samples in a forward and backward pass. At rollout.micro_batch_size or above, "
        "batches pass as they were sampled and replay their log-probs to the last bit. auto takes what fits "
        "(docs/measuring.md).",
    )
    levels_per_pass: Later[int] = Field(
        1,
        ge=1,
        le=MOST_NOISE_LEVELS,
        description="Noise levels, or steps of the sampler, of a sample that one forward and backward pass computes; "
        "a divisor of their number. A pass then has so many rows for each of its ppo_micro_batch_size_per_gpu samples, "
        "and there are so many times fewer passes: for models that are too small to keep a GPU busy. Sampled steps "
        "replay their log-probs to the last bit where rollout.micro_batch_size is the number of these rows; where it "
        "is not, algorithm.rollout_correction.bypass_mode: false has the first ratios be exactly 1 nonetheless.",
    )
    ppo_epochs: int = Field(1, ge=1, le=1000, description="Passes over one iteration's samples.")
    use_kl_loss: bool = Field(
        False,
        description="Add the distance to the model at model.path to the loss: the KL divergence of a step's Gaussians, "
        "or with a loss of the forward process the mean squared difference of the velocities.",
    )
    kl_loss_coef: float = Field(
        0.0,
        ge=0,
        le=MOST_COEFFICIENT,
        description="Weight of use_kl_loss's distance, in the units of kl_loss_type.",
    )
    kl_loss_type: Later[KlLossType] = Field(
        "gaussian",
        description="gaussian is the divergence itself, mean (mu-mu_ref)^2 / (2 sd^2). flow_grpo leaves out the step "
        "length, mean (mu-mu_ref)^2 / (2 g^2) with sd = g sqrt(-D), as public Flow-GRPO code does: its beta goes with "
        "this one.",
    )
    matching_loss_coef: Later[float] = Field(
        0.0,
        ge=0,
        le=MOST_COEFFICIENT,
        description="Losses of the forward process: weight of the flow-matching error on the samples that are trained "
        "on, mean (v - (e - x0))^2, which is added to the loss; when that helps and when it hurts: docs/algorithms.md.",
    )
    guidance_gradient: Literal["both", "conditional"] = Field(
        "both",
        description="With classifier-free guidance: both is the whole gradient. conditional takes the half without the "
        "prompt as a constant, as public flow_grpo does; it is then computed without gradient, and in an iteration's "
        "first optimiser step not at all, since the rollout has recorded it.",
    )
    diffusion_loss: DiffusionLossConfig = Field(default_factory=DiffusionLossConfig, description="The policy loss.")
    teacher_path: str | None = Field(
        None,
        description="distill_kl and distill_fm_mse: the teacher, a folder in diffusers format of the same architecture "
        "or one with the LoRA weights that a run exported.",
    )
    optim: OptimConfig = Field(default_factory=OptimConfig, description="The optimiser.")
    ema: EmaConfig = Field(default_factory=EmaConfig, description="Averaged weights.")
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig, description="Sharding and precision.")

    @property
    def micro_batch(self) -> int:
        """`ppo_micro_batch_size_per_gpu`, once it is a number."""
        return known(self.ppo_micro_batch_size_per_gpu, "actor.ppo_micro_batch_size_per_gpu")

    @property
    def rows_of_pass(self) -> int:
        """Most rows that a forward and backward pass has."""
        return self.micro_batch * self.levels_per_pass

    @property
    def shards_all_in_fp32(self) -> bool:
        """Are frozen weights sharded in fp32, on one rank as on many? VeOmni's are."""
        return self.strategy == "veomni"

    def keeps_frozen_whole(self, world_size: int, dtype: str) -> bool:
        """With LoRA, are the frozen weights of a model in `dtype` whole on each of so many ranks?

        A lone rank has nobody to share with, and in every pass FSDP copies what it has sharded.
        """
        fsdp = self.fsdp_config
        alone = world_size == 1 and not fsdp.param_offload and fsdp.param_dtype in (None, dtype)
        return not self.shards_all_in_fp32 and (alone or not fsdp.shard_frozen)

    def shares_in_one_group(self, world_size: int, dtype: str, trains_lora: bool) -> bool:
        """Are the trained weights of a model in `dtype` gathered, and their gradients divided, all at once?

        By block each has an exchange, and calls around it that a small model waits for: worth it only where a gathered
        block goes as the next one comes, or where ranks exchange all weights while they compute.
        """
        fsdp = self.fsdp_config
        alone = world_size == 1 and not fsdp.param_offload and not self.shards_all_in_fp32
        at_once = self.keeps_frozen_whole(world_size, dtype) if trains_lora else alone
        return at_once and not fsdp.reshard_after_forward

    @model_validator(mode="after")
    def _kl_needs_a_weight(self) -> Self:
        if self.use_kl_loss and self.kl_loss_coef == 0:
            raise ValueError("use_kl_loss is true but kl_loss_coef is 0: give the coefficient a positive value")
        if self.kl_loss_type != "gaussian" and not self.use_kl_loss:
            raise ValueError(
                f"kl_loss_type is {self.kl_loss_type} but use_kl_loss is false, so there is no KL: set use_kl_loss to "
                "true, or leave kl_loss_type out"
            )
        return self
