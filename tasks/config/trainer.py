# SPDX-License-Identifier: Apache-2.0
"""`trainer` and `ray_init`: steps, seeds, checkpoints, placement, and the cluster that a run starts on."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from models.config.bounds import (
    LONGEST_WAIT_S,
    MOST_BATCH,
    MOST_COEFFICIENT,
    MOST_ITERATIONS,
    MOST_NOISE_LEVELS,
    MOST_PROCESSES,
    MOST_SEED,
    MOST_STEPS,
    MOST_THREADS,
    PoolName,
)
from models.config.section import NotShaping, Section


class RayConfig(Section):
    """The cluster. With RAY_ADDRESS set the run joins that one, otherwise it starts its own on this machine."""

    num_cpus: int | None = Field(
        None, ge=1, le=MOST_THREADS, description="CPUs of a cluster started here; null is what there is."
    )
    log_to_driver: bool = Field(False, description="Show the workers' output in the driver's terminal.")
    forked_workers: bool | Literal["auto"] = Field(
        "auto",
        description="Workers of a cluster started here begin as forks of a process that has done their imports. auto: "
        "on Linux, where the run uses no GPU; with one, workers of a whole run were there after 15 s in place of 20.",
    )
    worker_niceness: int = Field(
        0,
        ge=0,
        le=19,
        description="What a cluster started here adds to its workers' niceness: 0 competes as any other program; Ray's "
        "own 15 leaves a busy machine to all others.",
    )
    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that each worker and trainer rank may take to load its models once its process is there; "
        "then the run fails. Waiting for room on the cluster is not counted.",
    )
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


class TrainerConfig(Section):
    """The loop: how long, how often it measures and saves, and on what."""

    experiment_name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        max_length=100,
        description="Name of the run; a digest of the config is appended.",
    )
    total_training_steps: NotShaping[int] = Field(100, ge=1, le=MOST_ITERATIONS, description="Iterations.")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="Seed of every random draw of the run.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where rollout and update compute.")
    nnodes: NotShaping[int] = Field(1, ge=1, le=MOST_PROCESSES, description="Machines of the trainer.")
    n_gpus_per_node: NotShaping[int] = Field(
        1, ge=1, le=MOST_PROCESSES, description="Trainer ranks a machine: GPUs, or CPU processes."
    )
    num_threads: NotShaping[int] = Field(1, ge=1, le=MOST_THREADS, description="CPU threads of each trainer rank.")
    one_step_off_policy: bool = Field(
        False,
        description="Sample the next iteration during the update, with weights that are one update older. Needs "
        "rollout.placement separate, and a loss that compares with old log-probs.",
    )
    val_before_train: NotShaping[bool] = Field(True, description="Validate the starting weights.")
    test_freq: NotShaping[int] = Field(
        10, ge=0, le=MOST_ITERATIONS, description="Iterations between validations; 0 validates only at the end."
    )
    save_freq: NotShaping[int] = Field(
        10, ge=0, le=MOST_ITERATIONS, description="Iterations between checkpoints; 0 saves only at the end."
    )
    export_freq: NotShaping[int] = Field(
        0,
        ge=0,
        le=MOST_ITERATIONS,
        description="Iterations between versions in MLflow's model registry; 0 registers only the end.",
    )
    max_actor_ckpt_to_keep: NotShaping[int] = Field(
        2, ge=1, le=MOST_ITERATIONS, description="Newest checkpoints kept; older ones are deleted."
    )
    async_checkpoint: NotShaping[bool] = Field(
        True,
        description="Write checkpoints in the background, from a copy in host memory of weights and optimiser, which "
        "stays there for the next. The iteration does not wait; killed then, the run continues from the one before.",
    )
    keep_stages: NotShaping[bool] = Field(
        True,
        description="Keep finished rollouts in the run's folder until a checkpoint has their iteration, so that a run "
        "started again need not sample them again.",
    )
    early_steps: NotShaping[bool] = Field(
        True,
        description="Take an optimiser step as soon as its own samples are scored, while others still are: the same "
        "numbers, sooner. It needs several steps an iteration, a loss of sampled steps without "
        "rollout_correction.rollout_is and rollout_rs, ppo_epochs 1, advantages of each group by itself (global_std "
        "false), rewards beside the trainer's GPUs, and a rollout that neither sleeps nor samples ahead.",
    )
    full_determinism: NotShaping[bool] = Field(
        False,
        description="Only deterministic kernels in every actor: on one machine a run repeats to the last bit on CUDA "
        "too, more slowly. An operation that has none is an error.",
    )
    compile_cache: NotShaping[Path | None] = Field(
        None,
        description="With model.compile: folder in which compiled code is kept for the run's other processes and for "
        "later runs, this user's alone; null is TORCHINDUCTOR_CACHE_DIR, or doubleflow/compiled in the user's cache.",
    )
    resume_mode: NotShaping[Literal["auto", "disable"]] = Field(
        "auto", description="auto continues a run of the same name and config; disable refuses if there is one."
    )
    default_local_dir: NotShaping[Path] = Field(Path("runs"), description="Folder of checkpoints and stage results.")
    canary_tolerance: NotShaping[float | None] = Field(
        None,
        ge=0,
        le=1.0,
        description="Largest relative difference of velocities after a weight sync; null is 0.01 on CUDA; on "
        "the CPU 0, or 1e-4 where the rollout engine is vLLM-Omni or trainer ranks share a sequence.",
    )
    canary_missing_share: NotShaping[float] = Field(
        0.75,
        gt=0,
        lt=1,
        description="Largest share of the trainer's own change of velocity since the last weight sync that may be "
        "missing from a rollout worker's: 0 where it holds the new weights, 1 where it holds older ones, 1/2 for both "
        "where rounding is larger than the change.",
    )
    canary_timesteps: NotShaping[int] = Field(
        3,
        ge=1,
        le=MOST_NOISE_LEVELS,
        description="Timesteps of the rollout's schedule that a weight sync is checked at, first and last included.",
    )
    canary_batch: NotShaping[int | None] = Field(
        None,
        ge=1,
        le=MOST_BATCH,
        description="Samples that a weight sync is checked with; null is rollout.micro_batch_size.",
    )
    max_logprob_difference: NotShaping[float | None] = Field(
        0.5,
        gt=0,
        le=MOST_COEFFICIENT,
        description="Share of diffusion_loss.clip_ratio by which a clipped loss's ratios may differ from 1 on "
        "average before the weights move; more stops the run at its first update. null only warns, above a third.",
    )
    device_peak_tflops: NotShaping[float | None] = Field(
        None,
        gt=0,
        le=1e6,
        description="1e12 operations a second that a device can do at most, for perf/mfu; null takes the data sheet of "
        "the GPU, where its name is known.",
    )
    gpu_memory_gib: NotShaping[float | None] = Field(
        None,
        gt=0,
        le=1e5,
        description="Memory of a GPU that the run must fit into; null is that of the driver's own GPU, and without one "
        "nothing is checked.",
    )
    host_memory_gib: NotShaping[float | None] = Field(
        None,
        gt=0,
        le=1e5,
        description="Memory of each machine that the run must fit into; null is that of the driver's own, or of its "
        "container or batch job, and in a cluster that the run joins nothing is checked.",
    )
    on_nonfinite: NotShaping[Literal["stop", "skip"]] = Field(
        "stop",
        description="What to do about an optimiser step whose gradient is not finite: stop the run before it, or skip "
        "the step, which leaves weights and optimiser as they were. A stopped run may go on with skip.",
    )
    max_nonfinite_steps: NotShaping[int] = Field(
        3,
        ge=1,
        le=MOST_STEPS,
        description="With on_nonfinite skip: so many steps in a row are left out; the next one stops the run.",
    )
    profile: NotShaping[ProfileConfig] = Field(
        default_factory=ProfileConfig, description="Traces of chosen iterations."
    )

    @property
    def skippable_steps(self) -> int:
        """Optimiser steps in a row that may be left out."""
        return self.max_nonfinite_steps if self.on_nonfinite == "skip" else 0

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.nnodes * self.n_gpus_per_node
