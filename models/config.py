"""Settings that the models floor reads, of the model and its sampling; the update's are in `models.actor_config`.

`flows.config` composes them into the one tree.

The other modules of this package name these classes in annotations only, so the engines run on a machine that
has torch, diffusers, peft and tensordict but no pydantic: any object with the same attributes will do.
Field names are the reference system's (VeRL-Omni) wherever it has one.
"""

from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from models.bounds import (
    LONGEST_WAIT_S,
    MOST_GUIDANCE,
    MOST_ITERATIONS,
    MOST_NOISE_LEVELS,
    MOST_PIXELS,
    MOST_PROCESSES,
    MOST_RATIO,
    MOST_TOKENS,
    Options,
    check_texts,
    check_truth,
)

WindowMode = Literal["random", "progressive", "decay"]
NoiseLevel = Annotated[int, Field(ge=0, le=MOST_NOISE_LEVELS)]


T = TypeVar("T")


class Mark(Enum):
    """What a field's annotation says of the run's name (`flows.identity`); it is in no schema and checks nothing."""

    NOT_SHAPING = "not shaping"
    LATER = "later"


NotShaping = Annotated[T, Mark.NOT_SHAPING]
"""A setting that leaves the trained weights as they are, up to rounding: a run may go on with another value."""
Later = Annotated[T, Mark.LATER]
"""A setting that shapes the weights and is younger than runs that are to be continued. It counts only where it differs
from its default, which must be what the code did before the field was there."""


class Section(BaseModel):
    """A part of the tree: immutable, and a misspelt field is an error rather than a silent default.

    No number is NaN, infinite or a bool, and text can be written into paths, databases and a terminal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        return check_truth(value, cls.model_fields[str(info.field_name)].annotation)

    @field_validator("*")
    @classmethod
    def _texts_can_be_written(cls, value: Any) -> Any:
        return check_texts(value)


class DiffusionPipelineConfig(Section):
    """How a picture is sampled. Start from the model card's values, so that exploration begins at a good point."""

    height: int = Field(
        512, ge=8, le=MOST_PIXELS, description="Picture height in pixels, a multiple of the model's patch."
    )
    width: int = Field(
        512, ge=8, le=MOST_PIXELS, description="Picture width in pixels, a multiple of the model's patch."
    )
    num_inference_steps: int = Field(10, ge=1, le=MOST_NOISE_LEVELS, description="Denoising steps of one sample.")
    true_cfg_scale: float = Field(
        1.0,
        ge=1.0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance of Qwen-Image and FLUX.1; 1 turns it off and halves the work.",
    )
    guidance_scale: float | None = Field(
        None,
        ge=0.0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance of Stable Diffusion 3, Wan (off up to 1) and Z-Image (off at 0), where "
        "null turns it off; for FLUX.1-dev the scale that the model was distilled with, which it must be given.",
    )
    num_frames: int | None = Field(None, ge=1, le=10_000, description="Frames of a video; null for models of pictures.")
    max_sequence_length: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens of a prompt with which the embeddings must have been made; null takes them as they are.",
    )


class DiffusionRolloutAlgoConfig(Section):
    """How a sample explores: the reverse-process kernel and the window of steps that are stochastic and trained."""

    sde_type: str = Field(
        "sde",
        description="Reverse-process kernel: sde (Flow-GRPO), cps, dance_sde, or one of your own by its registered "
        "name or as package.module:function.",
        examples=["sde", "cps", "dance_sde"],
    )
    sde_options: Later[Options] = Field(
        default_factory=dict, description="Keyword arguments of a kernel of your own; sde, cps and dance_sde take none."
    )
    noise_level: float = Field(
        0.7,
        ge=0.0,
        le=10.0,
        description="Noise of the kernel: a for sde and cps (there at most 1, all of the noise anew), eta for "
        "dance_sde. 0 is the ODE.",
    )
    max_leftover_noise: NotShaping[float] = Field(
        0.5,
        gt=0,
        le=100.0,
        description="Largest standard deviation of the noise that exploring may leave in the finished latents, "
        "predicted from the schedule before the run (docs/algorithms.md); above it the run is refused. Published "
        "settings leave up to 0.21.",
    )
    sde_window_size: int | None = Field(
        None, ge=1, le=MOST_NOISE_LEVELS, description="Number of stochastic, trained steps; null takes the whole range."
    )
    sde_window_range: tuple[NoiseLevel, NoiseLevel] | None = Field(
        None,
        description="Steps [lo, hi) that the window may cover; null is every step but the last, which would add "
        "noise to the finished picture.",
    )
    sde_window_mode: WindowMode = Field(
        "random",
        description="Where the window is: random draws its place each iteration; progressive moves it by its size "
        "every iters_per_group iterations and past the end back to lo; decay does so faster and faster.",
    )
    iters_per_group: int = Field(
        25,
        ge=1,
        le=MOST_ITERATIONS,
        description="Iterations at one place, for progressive and decay; decay lets it fall linearly to a quarter.",
    )
    sde_contiguous: bool = Field(
        True, description="Consecutive steps; false draws any sde_window_size steps of the range."
    )

    @model_validator(mode="after")
    def _cps_turns_by_a_right_angle_at_most(self):
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ValueError(
                f"noise_level is {self.noise_level:g}, but cps takes the noise's share sin(noise_level pi/2), which "
                "falls again above 1: give it at most 1"
            )
        return self

    @model_validator(mode="after")
    def _window_is_defined(self):
        moves = self.sde_window_mode != "random"
        if moves and self.sde_window_size is None:
            raise ValueError(f"sde_window_mode {self.sde_window_mode} moves a window: give it a sde_window_size")
        if moves and not self.sde_contiguous:
            raise ValueError(
                f"sde_contiguous is false but sde_window_mode is {self.sde_window_mode}: single steps are drawn, use "
                "random"
            )
        if not self.sde_contiguous and self.sde_window_size is None:
            raise ValueError("sde_contiguous is false but sde_window_size is null: say how many steps to draw")
        return self

    def window_bounds(self, num_inference_steps: int) -> tuple[int, int]:
        """The half-open range of steps that the window may cover, for a sampler of that many steps."""
        return self.sde_window_range or (0, max(num_inference_steps - 1, 1))


class VllmOmniConfig(Section):
    """The vLLM-Omni rollout engine; read when `rollout.name` is vllm_omni."""

    attention_backend: Literal["FLASH_ATTN", "TORCH_SDPA"] | None = Field(
        None, description="Attention kernels on a GPU; null is vLLM-Omni's choice. The CPU has one."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="GPUs that a worker spreads the transformer over, a process on each (docs/vllm-omni.md).",
    )
    enforce_eager: bool = Field(True, description="false compiles the transformer's blocks at the first request.")
    step_execution: bool = Field(
        False,
        description="Let a sample join those that are being denoised, instead of waiting until they are finished; each "
        "picture is then decoded alone.",
    )
    request_batch_max_wait_ms: float = Field(
        100.0,
        ge=0,
        le=1000 * LONGEST_WAIT_S,
        description="Longest wait for a batch to fill; a full one starts at once.",
    )
    request_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Longest time for one batch, or for one order to the engine; then the run fails.",
    )


class ModelConfig(Section):
    """Which model is trained, and which of its weights."""

    path: str = Field("data/base_model", description="Folder in diffusers format (model_index.json at its root).")
    initial_weights: Later[str | None] = Field(
        None,
        description="Folder with the weights that another run exported (LoRA or all of them, as this run trains), from "
        "which training starts; null starts from model.path, which stays the reference of KL and losses.",
    )
    algorithm: str = Field(
        "flow_grpo", description="Adapter key beside the architecture; an adapter may serve every algorithm."
    )
    lora_rank: int = Field(0, ge=0, le=65_536, description="LoRA rank; 0 trains all of the transformer's weights.")
    lora_alpha: int = Field(
        64, ge=1, le=1_000_000, description="LoRA scale numerator: the update is scaled by alpha / rank."
    )
    external_lib: Later[str | None] = Field(
        None,
        description="Python modules, separated by commas, that are imported wherever the model is used: they register "
        "families, kernels, losses and advantages of your own.",
    )
    target_modules: tuple[str, ...] | None = Field(
        None, description="Module names that get LoRA weights; null takes the model family's own list."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of the frozen weights and of the denoiser's forward."
    )
    compile: bool = Field(
        False,
        description="Compile the transformer's blocks in the trainer and in the diffusers rollout, and there the image "
        "decoder: on a GPU about half the time and less memory, for a minute at the first iteration and again at each "
        "new batch size.",
    )


def _step(value: Any) -> Any:
    """A step of a path is what verl calls a token."""
    return "step" if value == "token" else value


def _bounds(value: Any) -> Any:
    """verl writes two bounds as one text, lo_hi."""
    return value.split("_") if isinstance(value, str) and "_" in value else value


ImportanceMode = Annotated[
    Literal["step", "sequence"], BeforeValidator(_step, json_schema_input_type=Literal["step", "token", "sequence"])
]
Ratio = Annotated[float, Field(ge=0, le=MOST_RATIO)]
RejectionThreshold = Annotated[
    Ratio | tuple[Ratio, Ratio], BeforeValidator(_bounds, json_schema_input_type=Ratio | tuple[Ratio, Ratio] | str)
]
RejectionMode = Literal[
    "step_k1",
    "step_k2",
    "step_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]


class RolloutCorrectionConfig(Section):
    """What to do about a rollout engine whose log-probs are not the trainer's.

    lr = log_prob of the trainer's old policy - log_prob of the rollout, clamped to plus or minus 20.
    """

    bypass_mode: bool = Field(
        True,
        description="Take the rollout's log-probs as the old ones. false computes them again before the first "
        "optimiser step: another forward pass over all samples, which rollout_is and rollout_rs need.",
    )
    rollout_is: ImportanceMode | None = Field(
        None,
        description="Weigh the loss by exp(lr) of the step (also called token), or exp(sum of lr) of the sample; null "
        "does not.",
    )
    rollout_is_threshold: float = Field(
        2.0, gt=0, le=MOST_RATIO, description="Importance weights are truncated at this."
    )
    rollout_is_bounds: tuple[Ratio, Ratio] | None = Field(
        None, description="Weights outside [lo, hi], before truncation, become 0 and still count in the mean."
    )
    rollout_is_batch_normalize: bool = Field(False, description="Divide the weights by their mean.")
    rollout_rs: RejectionMode | None = Field(
        None,
        description="Leave out steps (step_) or whole samples (seq_: by the sum, mean or worst of their steps) whose "
        "k1 = lr, k2 = lr^2/2 or k3 = exp(lr) - 1 - lr exceeds the threshold; null keeps all.",
    )
    rollout_rs_threshold: RejectionThreshold | None = Field(
        None,
        description="k1: [lo, hi], or the text lo_hi, that exp(lr) must lie in; verl bounds exp(-lr), so its [lo, hi] "
        "is [1/hi, 1/lo] here. k2 and k3: the largest value kept.",
    )

    @model_validator(mode="after")
    def _settings_act(self):
        if self.bypass_mode and (self.rollout_is or self.rollout_rs):
            raise ValueError(
                "rollout_correction.bypass_mode is true, so old and rollout log-probs are the same numbers and "
                "rollout_is and rollout_rs would do nothing: set bypass_mode to false"
            )
        if self.rollout_is is None and (self.rollout_is_bounds or self.rollout_is_batch_normalize):
            raise ValueError(
                "rollout_correction.rollout_is is null, so there are no weights for rollout_is_bounds or "
                "rollout_is_batch_normalize: set rollout_is to step or sequence"
            )
        for name in ("rollout_is_bounds", "rollout_rs_threshold"):
            bounds = getattr(self, name)
            if isinstance(bounds, tuple) and not 0 < bounds[0] < bounds[1]:
                raise ValueError(f"rollout_correction.{name} is {list(bounds)}: give [lo, hi] with 0 < lo < hi")
        self._check_rejection()
        return self

    def _check_rejection(self) -> None:
        mode, threshold = self.rollout_rs, self.rollout_rs_threshold
        if mode is None and threshold is not None:
            raise ValueError("rollout_correction.rollout_rs_threshold is given but rollout_rs is null: name a mode")
        wanted = tuple if mode and mode.endswith("k1") else float
        if mode and not isinstance(threshold, wanted):
            right = "[lo, hi] of ratios" if wanted is tuple else "one number"
            raise ValueError(f"rollout_correction.rollout_rs_threshold is {threshold}: {mode} needs {right}")
