# SPDX-License-Identifier: Apache-2.0
"""`reward`: reward functions, their workers, and the guards that watch them."""

from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from models.config.bounds import (
    LONGEST_WAIT_S,
    MOST_BATCH,
    MOST_COEFFICIENT,
    MOST_FRAMES,
    MOST_ITERATIONS,
    MOST_PROCESSES,
    MOST_RETRIES,
    MOST_THREADS,
    Gpus,
    Options,
    RewardName,
)
from models.config.section import Later, NotShaping, Section
from tasks.system.credentials import refuse_secret_words


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
    training_share: NotShaping[float] = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of an iteration's pictures that a guard, or a reward of weight 0, measures: the first of "
        "each rollout batch; 0 measures none. A validation's are all measured.",
    )
    frame_interval: Later[int] = Field(
        1,
        ge=1,
        le=MOST_FRAMES,
        description="A reward of pictures scores every so many frames of a video, from the first one on, and the video "
        "gets their mean.",
    )
    options: Options = Field(default_factory=dict, description="Keyword arguments of the reward.")
    num_workers: NotShaping[int] = Field(
        1, ge=1, le=MOST_PROCESSES, description="Worker processes; each loads the reward once."
    )
    num_cpus: NotShaping[float] = Field(
        0.0, ge=0, le=MOST_THREADS, description="CPUs each worker reserves; 0 shares what there is."
    )
    num_gpus: NotShaping[Gpus] = Field(0.0, description="GPUs, or a share of one, each worker takes.")
    placement: NotShaping[Literal["separate", "colocated"]] = Field(
        "separate",
        description="On CUDA: separate takes num_gpus of the cluster; colocated is on the trainer ranks' GPUs, worker "
        "by worker from the first rank's on, and takes none besides.",
    )
    batch_size: NotShaping[Annotated[int, Field(ge=1, le=MOST_BATCH)] | Literal["auto"] | None] = Field(
        "auto",
        description="Pictures a call. auto cuts each rollout batch into a call for each of num_workers, or for its "
        "share of them where several rollout workers finish batches together; a number cuts across prompts and "
        "rollout batches; null is a rollout batch.",
    )
    retries: NotShaping[int] = Field(
        2,
        ge=0,
        le=MOST_RETRIES,
        description="Times a batch is scored again after an error or its worker's death, and what of it has no score "
        "after the reward model's, or after the error of one source of `by_data_source` beside others.",
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
    def _takes_no_gpu_besides(self) -> Self:
        if self.is_colocated and self.num_gpus:
            raise ValueError(
                f"placement is colocated, on the trainer ranks' GPUs, and num_gpus {self.num_gpus:g} asks for others: "
                "leave num_gpus out, or set placement to separate"
            )
        return self

    @model_validator(mode="after")
    def _a_guard_is_not_trained_on(self) -> Self:
        if self.guard and self.weight:
            raise ValueError(
                f"guard is true and weight {self.weight:g}: a guard is never trained on, so leave its weight out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_trained_on_is_measured(self) -> Self:
        if self.training_share < 1 and self.share:
            raise ValueError(
                f"training_share is {self.training_share:g}, but this reward is trained on, so all pictures need it: "
                "leave training_share out, or make it a guard"
            )
        return self

    @property
    def is_colocated(self) -> bool:
        """Are its workers on trainer ranks' GPUs?"""
        return self.placement == "colocated"

    def colocated_workers(self, ranks: int) -> int:
        """Its workers on the GPU of the first of so many trainer ranks, which has the most."""
        return ceil(self.num_workers / ranks) if self.is_colocated else 0

    @property
    def share(self) -> float:
        """Its weight in the trained reward."""
        default = 0.0 if self.guard else 1.0
        return default if self.weight is None else self.weight


class RewardModelConfig(Section):
    """A vision-language model that rewards ask: a server of the run's own, at an address of this machine alone."""

    model_path: str = Field(description="Folder of the model, or its hub id together with its revision.")
    revision: str | None = Field(None, description="Commit of a hub id, 40 hex digits; a folder has none.")
    engine: NotShaping[Literal["vllm", "transformers"]] = Field(
        "vllm",
        description="vllm: `vllm serve`. transformers: `transformers serve`, which knows no sleep.",
    )
    python: NotShaping[Path | None] = Field(
        None,
        description="Python of the environment that has the engine, as in .venv-vllm/bin/python; null is the run's.",
    )
    arguments: list[str] = Field(
        default_factory=list,
        description="Further arguments of the server, as in [--max-model-len, '8192', --tensor-parallel-size, '2'].",
    )
    command: NotShaping[list[str]] = Field(
        default_factory=list,
        description="In place of the engine's own: the program of any server of the OpenAI API and its arguments, in "
        "which {model}, {revision}, {name}, {host} and {port} are filled in. It finds its secret in the environment "
        "variable REWARD_MODEL_KEY.",
    )
    num_gpus: NotShaping[Gpus] = Field(
        0.0,
        description="GPUs, or a share of one, that the server takes of the cluster; 0 hides all GPUs from it.",
    )
    sleep: NotShaping[bool] = Field(
        False,
        description="Send the server to sleep (/sleep, /wake_up) whenever nothing is to be scored, so that others on "
        "its GPU have the memory.",
    )
    start_timeout_s: NotShaping[float] = Field(
        1800.0, gt=0, le=LONGEST_WAIT_S, description="Seconds until it must answer after its start."
    )

    @model_validator(mode="after")
    def _words_hold_no_secret(self) -> Self:
        for field in ("command", "arguments"):
            refuse_secret_words(getattr(self, field), field)
        return self

    @field_validator("model_path")
    @classmethod
    def _is_no_option(cls, path: str) -> str:
        """The server would take it for one of its options, which `arguments` has and a machine may forbid."""
        if path.startswith("-"):
            raise ValueError(f"model_path {path!r} begins with a dash: give a folder as ./{path}, or a hub id")
        return path

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.command and not any("{port}" in word for word in self.command):
            raise ValueError(
                f"command {' '.join(self.command)} has no {{port}}: the run chooses a free one, so put {{port}} where "
                "the server's port stands"
            )
        if self.sleep and self.engine == "transformers" and not self.command:
            raise ValueError("sleep is true, which engine transformers does not offer: take vllm, or leave sleep out")
        return self


class GuardConfig(Section):
    """What tells a better policy from one that found a hole in its reward."""

    statistics: bool = Field(
        True,
        description="Measure edge density, entropy, saturation and diversity of the pictures; all but entropy are "
        "guards too.",
    )
    window: int = Field(20, ge=5, le=MOST_ITERATIONS, description="Iterations over which trends are logged.")
    p_value: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Level of the tests of a validation, shared among the guards: p_value / their number each.",
    )
    validations: int = Field(
        2, ge=1, le=MOST_ITERATIONS, description="Validations in a row that must find a guard fallen, to flag it."
    )
    reward_margin: float = Field(
        0.2,
        ge=0,
        le=MOST_COEFFICIENT,
        description="How far a guard that is a reward may fall, in standard deviations among the prompts of the first "
        "validation.",
    )
    statistics_margin: float = Field(
        2.0, ge=0, le=MOST_COEFFICIENT, description="How far a picture statistic may fall, likewise."
    )
    collapse_margin: float = Field(
        0.5,
        ge=0,
        le=MOST_COEFFICIENT,
        description="How far the held-out reward itself may fall below its highest, likewise; below that in as many "
        "validations in a row the run has collapsed, which is flagged as a fallen guard is.",
    )
    action: Literal["flag", "stop"] = Field(
        "flag",
        description="flag: a warning and a tag. stop: the run also ends with an error after the iteration in which a "
        "guard or a collapse is flagged, and keeps the weights of the last validation that found nothing fallen.",
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
    reward_model: Later[RewardModelConfig | None] = Field(
        None, description="A model served by the run itself, which rewards without a base_url of their own ask."
    )

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> Self:
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
    def is_colocated(self) -> bool:
        """Are any rewards on trainer ranks' GPUs?"""
        return self.colocated_workers(1) > 0

    def colocated_workers(self, ranks: int) -> int:
        """Workers on the GPU of the first of so many trainer ranks, which has the most: each reward begins there."""
        return sum(entry.colocated_workers(ranks) for entry in self.functions.values())

    def gpus_of_processes(self) -> list[float]:
        """GPUs, or the share of one, of each reward worker that is not colocated, and of the reward model."""
        served = [] if self.reward_model is None else [self.reward_model.num_gpus]
        return [entry.num_gpus for entry in self.functions.values() for _ in range(entry.num_workers)] + served

    @property
    def num_cpus(self) -> float:
        """CPUs that all reward workers reserve."""
        return sum(entry.num_workers * entry.num_cpus for entry in self.functions.values())
