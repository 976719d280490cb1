# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout`: engine, samples, workers, and how validation samples."""

from typing import Literal, Self

from pydantic import Field, model_validator

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.bounds import (
    MOST_BATCH,
    MOST_COUNT,
    MOST_GUIDANCE,
    MOST_MEGABYTES,
    MOST_NOISE_LEVELS,
    MOST_PROCESSES,
    MOST_RETRIES,
    MOST_THREADS,
    Gpus,
)
from models.config.pipeline import DiffusionPipelineConfig, Solver
from models.config.section import AUTO, NotShaping, Samples, Section, known
from models.config.vllm_omni import VllmOmniConfig


class ValidationPipelineConfig(Section):
    """How validation samples: always the ODE, with the same noise for every checkpoint."""

    num_inference_steps: int | None = Field(
        None, ge=1, le=MOST_NOISE_LEVELS, description="Denoising steps; null is the rollout's number."
    )
    true_cfg_scale: float | None = Field(None, ge=1.0, le=MOST_GUIDANCE, description="Guidance; null is the rollout's.")
    guidance_scale: float | None = Field(None, ge=0.0, le=MOST_GUIDANCE, description="Guidance; null is the rollout's.")
    solver: Solver | None = Field(None, description="Of the ODE; null is the rollout's.")


class ValidationConfig(Section):
    """Which held-out pictures measure progress."""

    n: int = Field(1, ge=1, le=MOST_BATCH, description="Pictures per held-out prompt.")
    max_prompts: int | None = Field(
        None,
        ge=1,
        le=MOST_COUNT,
        description="Use only the first so many held-out prompts, in the raw files' order: of files that are sorted by "
        "task, as GenEval's are, those are of one task.",
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
    micro_batch_size: Samples = Field(
        16,
        description="Samples denoised together. A batch of this size is never split or merged afterwards. auto takes "
        "what fits (docs/measuring.md).",
    )
    num_actors: NotShaping[int] = Field(
        1, ge=1, le=MOST_PROCESSES, description="Rollout workers; the pictures do not depend on their number."
    )
    num_gpus_per_actor: NotShaping[Gpus] = Field(
        1.0, description="GPUs (or a share of one) of each worker's process on CUDA."
    )
    num_threads: NotShaping[int] = Field(1, ge=1, le=MOST_THREADS, description="CPU threads of each worker.")
    placement: NotShaping[Literal["separate", "colocated"]] = Field(
        "separate",
        description="colocated puts a worker on each trainer rank's GPU; enable_sleep_mode says whether it gives its "
        "memory up during the update.",
    )
    enable_sleep_mode: NotShaping[bool | Literal["auto"]] = Field(
        True,
        description="A colocated worker's weights go to host memory during the update. false leaves them on the GPU, "
        "which saves the way there and back in each iteration and must hold update and rollout together. auto sleeps "
        "where the estimate says that it does not.",
    )
    cuda_graphs: NotShaping[bool] = Field(
        False,
        description="diffusers on CUDA: replay the denoiser's forward pass as a CUDA graph, one for each shape of its "
        "inputs. The samples stay the same to the bit. For models that are too small to keep a GPU busy "
        "(docs/training.md).",
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
    def _window_fits(self) -> Self:
        steps = self.pipeline.num_inference_steps
        _, high = self.algo.window_bounds(steps)
        if high == steps > 1 and self.algo.sde_type != "cps":
            raise ValueError(
                f"rollout.algo.sde_window_range ends at the last of {steps} steps, where {self.algo.sde_type} would "
                f"leave noise in the finished picture: let it end at {steps - 1} or before"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_has_one_window(self) -> Self:
        if self.algo.sde_window_per == "prompt" and self.micro_batch_size != AUTO and self.n % self.micro_batch_size:
            raise ValueError(
                f"rollout.algo.sde_window_per is prompt and all samples of a batch share a window, but "
                f"rollout.micro_batch_size {self.micro_batch_size} does not divide rollout.n {self.n}, so batches "
                "would hold samples of several prompts: set micro_batch_size to rollout.n or a divisor of it"
            )
        return self

    @model_validator(mode="after")
    def _whole_workers(self) -> Self:
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

    @model_validator(mode="after")
    def _graphs_have_an_engine(self) -> Self:
        if self.cuda_graphs and self.name != "diffusers":
            raise ValueError(
                f"rollout.cuda_graphs is true, but rollout.name is {self.name}, which captures by its own settings: "
                "set cuda_graphs to false, or name to diffusers"
            )
        return self

    @property
    def batch_size(self) -> int:
        """`micro_batch_size`, once it is a number."""
        return known(self.micro_batch_size, "rollout.micro_batch_size")

    @property
    def sleeps(self) -> bool:
        """Do the workers give their memory up during the update? Once `enable_sleep_mode` is no longer auto."""
        return self.placement == "colocated" and known(self.enable_sleep_mode, "rollout.enable_sleep_mode")

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
