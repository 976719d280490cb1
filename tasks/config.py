"""Settings that the tasks floor reads; `flows.config` composes them into the one tree."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.actor_config import ForwardProcessConfig
from models.bounds import (
    LONGEST_WAIT_S,
    MOST_BATCH,
    MOST_COEFFICIENT,
    MOST_COUNT,
    MOST_GPUS,
    MOST_GUIDANCE,
    MOST_ITERATIONS,
    MOST_MEGABYTES,
    MOST_NOISE_LEVELS,
    MOST_PROCESSES,
    MOST_RETRIES,
    MOST_THREADS,
    ExperimentName,
    Options,
    PoolName,
    RewardName,
)
from models.config import (
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    Later,
    NotShaping,
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
        16,
        ge=1,
        le=MOST_BATCH,
        description="Prompts per iteration, each sampled rollout.n times; offline, pairs per iteration.",
    )


class ValidationPipelineConfig(Section):
    """How validation samples: always the ODE, with the same noise for every checkpoint."""

    num_inference_steps: int | None = Field(
        None, ge=1, le=MOST_NOISE_LEVELS, description="Denoising steps; null is the rollout's number."
    )
    true_cfg_scale: float | None = Field(None, ge=1.0, le=MOST_GUIDANCE, description="Guidance; null is the rollout's.")
    guidance_scale: float | None = Field(None, ge=0.0, le=MOST_GUIDANCE, description="Guidance; null is the rollout's.")


class ValidationConfig(Section):
    """Which held-out pictures measure progress."""

    n: int = Field(1, ge=1, le=MOST_BATCH, description="Pictures per held-out prompt.")
    max_prompts: int | None = Field(
        None, ge=1, le=MOST_COUNT, description="Use only the first so many held-out prompts."
    )
    pipeline: ValidationPipelineConfig = Field(
        default_factory=ValidationPipelineConfig, description="What differs from the rollout's sampling."
    )


class DiffusionRolloutConfig(Section):
    """Sampling: which engine, how many workers, how many samples, and how."""

    name: Literal["diffusers", "vllm_omni"] = Field(
        "diffusers", description="Rollout engine: diffusers in the worker's process, or vLLM-Omni (docs/vllm-omni.md)."
    )
    n: int = Field(16, ge=1, le=MOST_BATCH, description="Samples per prompt: the group whose mean is the baseline.")
    micro_batch_size: int = Field(
        16,
        ge=1,
        le=MOST_BATCH,
        description="Samples denoised together. A batch of this size is never split or merged afterwards.",
    )
    num_actors: NotShaping[int] = Field(
        1, ge=1, le=MOST_PROCESSES, description="Rollout workers; the pictures do not depend on their number."
    )
    num_gpus_per_actor: NotShaping[float] = Field(
        1.0, ge=0, le=MOST_GPUS, description="GPUs (or a share of one) of each worker's process on CUDA."
    )
    num_threads: NotShaping[int] = Field(1, ge=1, le=MOST_THREADS, description="CPU threads of each worker.")
    placement: NotShaping[Literal["separate", "colocated"]] = Field(
        "separate",
        description="colocated puts a worker on each trainer rank's GPU; it gives its memory up during the update.",
    )
    max_queued_batches: NotShaping[int] = Field(
        16,
        ge=1,
        le=MOST_BATCH,
        description="Batches that wait at one worker; beyond them, handing out more waits for a free place.",
    )
    max_restarts: NotShaping[int] = Field(
        2,
        ge=0,
        le=MOST_RETRIES,
        description="How often a worker that died is started again; its batches are then sampled again.",
    )
    weight_transport: NotShaping[Literal["object_store", "ipc", "collective"]] = Field(
        "object_store",
        description="How new weights reach the workers: through Ray's object store; ipc, where placement is colocated, "
        "by the trainer's own memory (CUDA IPC, on the CPU shared memory); collective, where it is separate, by a "
        "broadcast (NCCL, on the CPU gloo).",
    )
    update_weights_bucket_megabytes: NotShaping[float] = Field(
        512, gt=0, le=MOST_MEGABYTES, description="MiB of weights that ipc and collective send at once."
    )
    vllm_omni: NotShaping[VllmOmniConfig] = Field(
        default_factory=VllmOmniConfig, description="Settings of that engine."
    )
    pipeline: DiffusionPipelineConfig = Field(
        default_factory=DiffusionPipelineConfig, description="How a picture is sampled."
    )
    algo: DiffusionRolloutAlgoConfig = Field(
        default_factory=DiffusionRolloutAlgoConfig, description="How a sample explores."
    )
    val_kwargs: NotShaping[ValidationConfig] = Field(default_factory=ValidationConfig, description="Held-out pictures.")

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

    @model_validator(mode="after")
    def _whole_workers(self):
        size = self.vllm_omni.tensor_parallel_size
        if size == 1:
            return self
        field = f"rollout.vllm_omni.tensor_parallel_size is {size}"
        if self.name != "vllm_omni":
            raise ValueError(
                f"{field}, but rollout.name is {self.name}, whose workers are one process: set name to vllm_omni, or "
                "tensor_parallel_size to 1"
            )
        if self.placement == "colocated":
            raise ValueError(
                f"{field}, but rollout.placement is colocated, which puts one process of the rollout on each trainer "
                "rank's GPU: set placement to separate, or tensor_parallel_size to 1"
            )
        if self.weight_transport == "collective":
            raise ValueError(
                f"{field}, but rollout.weight_transport is collective, whose broadcast ends in the worker's first "
                "process: set weight_transport to object_store, or tensor_parallel_size to 1"
            )
        if self.num_gpus_per_actor != 1:
            raise ValueError(
                f"{field} and rollout.num_gpus_per_actor {self.num_gpus_per_actor:g}, but each process of a worker "
                "takes a whole GPU: leave num_gpus_per_actor at 1"
            )
        return self

    @property
    def processes_per_worker(self) -> int:
        """Processes that hold one copy of the model together."""
        return self.vllm_omni.tensor_parallel_size

    @property
    def gpus_per_worker(self) -> float:
        """GPUs, or the share of one, that a worker takes where it shares none with a trainer rank."""
        return self.num_gpus_per_actor * self.processes_per_worker

    def validation_pipeline(self) -> DiffusionPipelineConfig:
        """The rollout's sampling with validation's own values in place."""
        changes = self.val_kwargs.pipeline.model_dump(exclude_none=True)
        return self.pipeline.model_copy(update=changes)


class RewardFunctionConfig(Section):
    """One reward: what it counts, and the pool of workers that serves it."""

    reward: str | None = Field(
        None, description="Registered name or package.module:object, where the key is a label; null takes the key."
    )
    weight: float | None = Field(
        None,
        ge=-MOST_COEFFICIENT,
        le=MOST_COEFFICIENT,
        description="Its share of the trained reward; 0 only measures. Null is 1, and 0 for a guard.",
    )
    required: bool = Field(
        True,
        description="Without this score a sample leaves statistics and update. An optional reward that is missing "
        "counts as its group's mean: it speaks neither for nor against the sample.",
    )
    guard: bool = Field(False, description="Measured, never trained on, and watched for a fall while the reward rises.")
    options: Options = Field(default_factory=dict, description="Keyword arguments of the reward.")
    num_workers: NotShaping[int] = Field(
        1, ge=1, le=MOST_PROCESSES, description="Worker processes; each loads the reward once."
    )
    num_cpus: NotShaping[float] = Field(
        0.0, ge=0, le=MOST_THREADS, description="CPUs each worker reserves; 0 shares what there is."
    )
    num_gpus: NotShaping[float] = Field(
        0.0, ge=0, le=MOST_GPUS, description="GPUs, or a share of one, each worker takes."
    )
    batch_size: NotShaping[int | None] = Field(
        None,
        ge=1,
        le=MOST_BATCH,
        description="Pictures a call, across prompts and rollout batches; null is a rollout batch.",
    )
    retries: NotShaping[int] = Field(
        2, ge=0, le=MOST_RETRIES, description="Times a batch is scored again after an error or its worker's death."
    )
    retry_wait_s: NotShaping[float] = Field(
        1.0, ge=0, le=LONGEST_WAIT_S, description="Seconds before a batch that raised an error is tried again."
    )
    timeout_s: NotShaping[float] = Field(
        600.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds a batch may take; then its worker is ended, started again, and retries.",
    )

    @model_validator(mode="after")
    def _a_guard_is_not_trained_on(self):
        if self.guard and self.weight:
            raise ValueError(
                f"guard is true and weight {self.weight:g}: a guard is never trained on, so leave its weight out"
            )
        return self

    @property
    def share(self) -> float:
        """Its weight in the trained reward."""
        default = 0.0 if self.guard else 1.0
        return default if self.weight is None else self.weight


class GuardConfig(Section):
    """What tells a better policy from one that found a hole in its reward."""

    statistics: bool = Field(
        True, description="Measure edge density, entropy, saturation and diversity of the pictures, as guards too."
    )
    window: int = Field(20, ge=5, le=MOST_ITERATIONS, description="Iterations over which trends are tested.")
    p_value: float = Field(
        0.01, gt=0, lt=1, description="Level of the trend tests, shared among the guards: p_value / their number each."
    )
    floor_iterations: int = Field(
        3,
        ge=0,
        le=MOST_ITERATIONS,
        description="First iterations in which a trained reward is watched for scores that are all near its lowest, or "
        "all alike: if they are in each of them, the run warns. 0 does not watch.",
    )


class RewardConfig(Section):
    """What is rewarded, who computes it, and when too little of it came back."""

    functions: dict[RewardName, RewardFunctionConfig] = Field(
        default_factory=lambda: {"ocr": RewardFunctionConfig()},
        description="Reward name, package.module:object or a label, to its weight, options and workers.",
    )
    max_missing_fraction: NotShaping[float] = Field(
        0.1,
        ge=0,
        le=1,
        description="Above this share of missing scores of a reward the run stops with its error.",
    )
    guards: NotShaping[GuardConfig] = Field(default_factory=GuardConfig, description="Signs of reward hacking.")

    @model_validator(mode="after")
    def _something_is_rewarded(self):
        if not self.functions:
            raise ValueError("reward.functions is empty: name at least one reward, for example ocr")
        if not any(entry.share for entry in self.functions.values()):
            raise ValueError(
                f"reward.functions {', '.join(self.functions)}: all are guards or have weight 0, so nothing is "
                "rewarded; give one a weight"
            )
        return self

    def named(self) -> dict[str, tuple[str, RewardFunctionConfig]]:
        """Label -> (registered name or import path, settings)."""
        return {label: (entry.reward or label, entry) for label, entry in self.functions.items()}

    @property
    def num_gpus(self) -> float:
        """GPUs of all reward workers."""
        return sum(entry.num_workers * entry.num_gpus for entry in self.functions.values())

    @property
    def num_cpus(self) -> float:
        """CPUs that all reward workers reserve."""
        return sum(entry.num_workers * entry.num_cpus for entry in self.functions.values())


class DiffusionAlgoConfig(ForwardProcessConfig):
    """The algorithm: what its name stands for, which stages it chains, and how rewards become advantages."""

    name: NotShaping[str] = Field(
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
    adv_options: Later[Options] = Field(
        default_factory=dict,
        description="Keyword arguments of the advantage estimator; flow_grpo and gdpo take epsilon, what their "
        "standard deviations are kept above 0 with.",
    )
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

    num_cpus: int | None = Field(
        None, ge=1, le=MOST_THREADS, description="CPUs of a cluster started here; null is what there is."
    )
    log_to_driver: bool = Field(False, description="Show the workers' output in the driver's terminal.")
    gpu_pool: PoolName | None = Field(
        None,
        description="Prefect's global concurrency limit with a slot for each GPU of the pool; a CUDA run holds as many "
        "as it uses, so that two runs share none.",
    )


class ProfileConfig(Section):
    """torch.profiler traces out of the actors (docs/measuring.md). Without iterations nothing is profiled."""

    iterations: tuple[Annotated[int, Field(ge=1, le=MOST_ITERATIONS)], ...] = Field(
        (), description="Iterations that are profiled; their traces are artifacts under profile/<iteration>/."
    )
    ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_PROCESSES)], ...] = Field(
        (0,), description="Trainer ranks whose update is traced."
    )
    rollout_workers: tuple[Annotated[int, Field(ge=0, lt=MOST_PROCESSES)], ...] = Field(
        (0,), description="Rollout workers whose sampling is traced."
    )
    record_shapes: bool = Field(False, description="Keep the shapes of each operation's inputs.")
    with_stack: bool = Field(False, description="Keep the Python stack of each operation: slow, and large traces.")
    profile_memory: bool = Field(False, description="Keep every allocation.")


class TrackingConfig(Section):
    """MLflow."""

    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI; MLFLOW_TRACKING_URI overrides it.")
    artifacts: str | None = Field(None, description="Artifact root of a new experiment; null is ./mlruns.")
    experiment: ExperimentName = Field("doubleflow", description="MLflow experiment.")
    pictures: int = Field(
        32,
        ge=0,
        le=MOST_BATCH,
        description="Pictures of each iteration that are kept, one by one and as a grid; 0 keeps none.",
    )
    keep_pictures: int | None = Field(
        None,
        ge=1,
        description="Newest iterations whose pictures stay, one by one and as a grid; older ones are removed from "
        "MLflow, which the run's log and tag say. Tables and metrics stay. Null keeps all.",
    )
    keep_validation_grids: int | None = Field(
        None,
        ge=1,
        description="Newest validation grids that stay beside the first, in MLflow and in the run's folder. Null "
        "keeps all.",
    )
