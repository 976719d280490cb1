"""Settings that the tasks floor reads; `flows.config` composes them into the one tree."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from models.config import (
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    ForwardProcessConfig,
    RolloutCorrectionConfig,
    Section,
    VllmOmniConfig,
)


class DataConfig(Section):
    """Where the DVC stages put the data set, and how much of it one iteration takes."""

    prompts: Path = Field(Path("data/prompts.parquet"), description="Prompt table of the `prompts` stage.")
    embeddings: Path = Field(Path("data/embeddings"), description="Folder of the `embeddings` stage.")
    pairs: Path = Field(
        Path("data/pairs"), description="Folder of the `pairs` stage, read where algorithm.sample_source is offline."
    )
    train_batch_size: int = Field(
        16, ge=1, description="Prompts per iteration, each sampled rollout.n times; offline, pairs per iteration."
    )


class ValidationPipelineConfig(Section):
    """How validation samples: always the ODE, with the same noise for every checkpoint."""

    num_inference_steps: int | None = Field(None, ge=1, description="Denoising steps; null is the rollout's number.")
    true_cfg_scale: float | None = Field(None, ge=1.0, description="Guidance; null is the rollout's.")
    guidance_scale: float | None = Field(None, ge=0.0, description="Guidance; null is the rollout's.")


class ValidationConfig(Section):
    """Which held-out pictures measure progress."""

    n: int = Field(1, ge=1, description="Pictures per held-out prompt.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first so many held-out prompts.")
    pipeline: ValidationPipelineConfig = Field(
        default_factory=ValidationPipelineConfig, description="What differs from the rollout's sampling."
    )


class DiffusionRolloutConfig(Section):
    """Sampling: which engine, how many workers, how many samples, and how."""

    name: Literal["diffusers", "vllm_omni"] = Field(
        "diffusers", description="Rollout engine: diffusers in the worker's process, or vLLM-Omni (docs/vllm-omni.md)."
    )
    n: int = Field(16, ge=1, description="Samples per prompt: the group whose mean is the baseline.")
    micro_batch_size: int = Field(
        16, ge=1, description="Samples denoised together. A batch of this size is never split or merged afterwards."
    )
    num_actors: int = Field(1, ge=1, description="Rollout workers; the pictures do not depend on their number.")
    num_gpus_per_actor: float = Field(1.0, ge=0, description="GPUs (or a share of one) each worker takes on CUDA.")
    num_threads: int = Field(1, ge=1, description="CPU threads of each worker.")
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="colocated puts a worker on each trainer rank's GPU; it gives its memory up during the update.",
    )
    max_queued_batches: int = Field(
        16, ge=1, description="Batches that wait at one worker; beyond them, handing out more waits for a free place."
    )
    max_restarts: int = Field(
        2, ge=0, description="How often a worker that died is started again; its batches are then sampled again."
    )
    vllm_omni: VllmOmniConfig = Field(default_factory=VllmOmniConfig, description="Settings of that engine.")
    pipeline: DiffusionPipelineConfig = Field(
        default_factory=DiffusionPipelineConfig, description="How a picture is sampled."
    )
    algo: DiffusionRolloutAlgoConfig = Field(
        default_factory=DiffusionRolloutAlgoConfig, description="How a sample explores."
    )
    val_kwargs: ValidationConfig = Field(default_factory=ValidationConfig, description="Held-out pictures.")

    @model_validator(mode="after")
    def _window_fits(self):
        steps = self.pipeline.num_inference_steps
        low, high = self.algo.window_bounds(steps)
        if not 0 <= low < high <= steps:
            raise ValueError(
                f"rollout.algo.sde_window_range [{low}, {high}) must lie within the {steps} denoising steps of "
                "rollout.pipeline.num_inference_steps"
            )
        size = self.algo.sde_window_size
        if size is not None and size > high - low:
            raise ValueError(f"rollout.algo.sde_window_size {size} is longer than sde_window_range [{low}, {high})")
        if high == steps > 1 and self.algo.sde_type != "cps":
            raise ValueError(
                f"rollout.algo.sde_window_range ends at the last of {steps} steps, where {self.algo.sde_type} would "
                f"leave noise in the finished picture: let it end at {steps - 1} or before"
            )
        return self

    def validation_pipeline(self) -> DiffusionPipelineConfig:
        """The rollout's sampling with validation's own values in place."""
        changes = self.val_kwargs.pipeline.model_dump(exclude_none=True)
        return self.pipeline.model_copy(update=changes)


class RewardFunctionConfig(Section):
    """One reward."""

    weight: float = Field(1.0, description="Its share of the trained reward.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward.")


class RewardConfig(Section):
    """What is rewarded, and who computes it."""

    functions: dict[str, RewardFunctionConfig] = Field(
        default_factory=lambda: {"ocr": RewardFunctionConfig()},
        description="Reward name, or package.module:object, to its weight and options.",
    )
    num_workers: int = Field(1, ge=1, description="Reward workers; each scores whole micro-batches.")

    @model_validator(mode="after")
    def _something_is_rewarded(self):
        if not self.functions:
            raise ValueError("reward.functions is empty: name at least one reward, for example ocr")
        return self


class DiffusionAlgoConfig(ForwardProcessConfig):
    """The algorithm: what its name stands for, which stages it chains, and how rewards become advantages."""

    name: str = Field(
        "flow_grpo",
        description="flow_grpo, dance_grpo, mix_grpo, grpo_guard, flow_dppo, dpo, diffusion_nft, awm, distill_kl or "
        "distill_fm_mse: sets kernel, window, advantage and loss with their defaults, wherever such a field is not "
        "given itself.",
    )
    trainer_type: Literal["policy_gradient", "direct_preference"] = Field(
        "policy_gradient",
        description="policy_gradient trains on the steps of a stochastic sampler; direct_preference on finished "
        "samples of the ODE, noised again. The loss decides; a name sets it.",
    )
    sample_source: Literal["online", "offline"] = Field(
        "online",
        description="online samples and scores in every iteration; offline reads data.pairs and starts neither rollout "
        "nor reward (dpo).",
    )
    paired_preference: bool = Field(
        False, description="The loss compares a better with a worse sample of one prompt (dpo). A name sets it."
    )
    adv_mode: Literal["continuous", "positive_only", "negative_only", "one_only", "binary"] = Field(
        "continuous",
        description="What is kept of advantages: all, max(A, 0), min(A, 0), 1 where A > 0 else 0, or the sign.",
    )
    adv_estimator: str = Field("flow_grpo", description="Advantage estimator, or package.module:function.")
    norm_adv_by_std_in_grpo: bool = Field(True, description="Divide by a standard deviation; false is Dr.GRPO.")
    global_std: bool = Field(True, description="Divide by the whole batch's standard deviation, not the group's.")
    drop_equal_groups: bool = Field(
        False,
        description="Leave groups out of the update whose rewards are all equal. They carry no signal; counted, they "
        "cost time and shrink the gradient's mean as a run succeeds, which Adam's memory turns into smaller steps.",
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig, description="Rollout log-probs that are not the trainer's."
    )

    @model_validator(mode="after")
    def _offline_has_pairs(self):
        if self.sample_source == "offline" and not self.paired_preference:
            raise ValueError(
                "algorithm.sample_source is offline, which reads preference pairs, but paired_preference is false: use "
                "a loss that compares pairs (algorithm.name dpo) or sample online"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_chooses_its_own_deviations(self):
        if self.adv_estimator == "gdpo" and not (self.norm_adv_by_std_in_grpo and self.global_std):
            raise ValueError(
                "algorithm.adv_estimator gdpo divides by the group's and then by the batch's standard deviation: leave "
                "norm_adv_by_std_in_grpo and global_std true"
            )
        return self


class RayConfig(Section):
    """The cluster. With RAY_ADDRESS set the run joins that one, otherwise it starts its own on this machine."""

    num_cpus: int | None = Field(None, ge=1, description="CPUs of a cluster started here; null is what there is.")
    log_to_driver: bool = Field(False, description="Show the workers' output in the driver's terminal.")


class TrackingConfig(Section):
    """MLflow."""

    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI; MLFLOW_TRACKING_URI overrides it.")
    artifacts: str | None = Field(None, description="Artifact root of a new experiment; null is ./mlruns.")
    experiment: str = Field("doubleflow", description="MLflow experiment.")
