# SPDX-License-Identifier: Apache-2.0
"""`algorithm.rollout_correction`: what is done where rollout and trainer disagree about a log-prob."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from models.config.bounds import MOST_RATIO
from models.config.section import Ratio, Section


def _step(value: Any) -> Any:
    """A step of a path is what verl calls a token."""
    return "step" if value == "token" else value


def _bounds(value: Any) -> Any:
    """verl writes two bounds as one text, lo_hi."""
    return value.split("_") if isinstance(value, str) and "_" in value else value


ImportanceMode = Annotated[
    Literal["step", "sequence"], BeforeValidator(_step, json_schema_input_type=Literal["step", "token", "sequence"])
]
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
    def _settings_act(self) -> Self:
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
