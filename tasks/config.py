"""Settings that the tasks floor reads; `flows.config` composes them into the one tree."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from models.config import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig, RolloutCorrectionConfig, Section


class DataConfig(Section):
    """Where the DVC stages put the data set, and how much of it one iteration takes."""

    prompts: Path = Field(Path("data/prompts.parquet"), description="Prompt table of the `prompts` stage.")
    embeddings: Path = Field(Path("data/embeddings"), description="Folder of the `embeddings` stage.")
    train_batch_size: int = Field(16, ge=1, description="Prompts per iteration; each is sampled rollout.n times.")


class ValidationPipelineConfig(Section):
    """How validation samples: always the ODE, with the same noise for every checkpoint."""

    num_inference_steps: int | None = Field(None, ge=1, description="Denoising steps; null is the rollout's number.")
    true_cfg_scale: float | None = Field(None, ge=1.0, description="Guidance; null is the rollout's.")


class ValidationConfig(Section):
    """Which held-out pictures measure progress."""

    n: int = Field(1, ge=1, description="Pictures per held-out prompt.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first so many held-out prompts.")
    pipeline: ValidationPipelineConfig = Field(
        default_factory=ValidationPipelineConfig, description="What differs from the rollout's sampling."
    )


class DiffusionRolloutConfig(Section):
    """Sampling: which engine, how many workers, how many samples, and how."""

    name: Literal["diffusers"] = Field("diffusers", description="Rollout engine.")
    n: int = Field(16, ge=1, description="Samples per prompt: the group whose mean is the baseline.")
    micro_batch_size: int = Field(
        16, ge=1, description="Samples denoised together. A batch of this size is never split or merged afterwards."
    )
    num_actors: int = Field(1, ge=1, description="Rollout workers; the pictures do not depend on their number.")
    num_gpus_per_actor: float = Field(1.0, ge=0, description="GPUs (or a share of one) each worker takes on CUDA.")
    num_threads: int = Field(1, ge=1, description="CPU threads of each worker.")
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


class DiffusionAlgoConfig(Section):
    """The algorithm: what its name stands for, from rewards to advantages, and whose log-probs are the old ones."""

    name: str = Field(
        "flow_grpo",
        description="flow_grpo, dance_grpo, mix_grpo, grpo_guard or flow_dppo: sets kernel, window, advantage and loss "
        "with their defaults, wherever such a field is not given itself.",
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
    gpu_pool: str | None = Field(
        None,
        description="Prefect's global concurrency limit with a slot for each GPU of the pool; a CUDA run holds as many "
        "as it uses, so that two runs share none.",
    )


class TrackingConfig(Section):
    """MLflow."""

    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI; MLFLOW_TRACKING_URI overrides it.")
    artifacts: str | None = Field(None, description="Artifact root of a new experiment; null is ./mlruns.")
    experiment: str = Field("doubleflow", description="MLflow experiment.")
    pictures: int = Field(
        32, ge=0, description="Pictures of each iteration that are kept, one by one and as a grid; 0 keeps none."
    )
