# SPDX-License-Identifier: Apache-2.0
"""`algorithm`: advantages, trainer type and what decides which samples are learnt from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from models.config.actor import ForwardProcessConfig
from models.config.bounds import MOST_BATCH, Options
from models.config.rollout_correction import RolloutCorrectionConfig
from models.config.section import ANY_NAME, Later, NotShaping, choices
from tasks.config.presets import PRESETS


class DiffusionAlgoConfig(ForwardProcessConfig):
    """The algorithm: what its name stands for, which stages it chains, and how rewards become advantages."""

    name: NotShaping[str] = Field(
        "flow_grpo",
        description="flow_grpo, dance_grpo, mix_grpo, grpo_guard, flow_dppo, dpo, diffusion_nft, awm, distill_kl or "
        "distill_fm_mse: sets kernel, window, advantage and loss with their defaults, wherever such a field is not "
        "given itself.",
        json_schema_extra=choices(*PRESETS),
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
    adv_estimator: str = Field(
        "flow_grpo",
        description="Advantage estimator, or package.module:function.",
        json_schema_extra=choices("flow_grpo", "dance_grpo", "mix_grpo", "gdpo", own=ANY_NAME),
    )
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
    best_worst_k: Later[int | None] = Field(
        None,
        ge=1,
        le=MOST_BATCH,
        description="Learn from the K best and the K worst samples of each group alone; the others' rewards count as "
        "missing, so advantages compare these 2K with each other. null learns from all.",
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig, description="Rollout log-probs that are not the trainer's."
    )

    @model_validator(mode="after")
    def _offline_has_pairs(self) -> Self:
        if self.sample_source == "offline" and not self.paired_preference:
            raise ValueError(
                "algorithm.sample_source is offline, which reads preference pairs, but paired_preference is false: use "
                "a loss that compares pairs (algorithm.name dpo) or sample online"
            )
        return self

    @model_validator(mode="after")
    def _only_finished_samples_are_noised(self) -> Self:
        if self.trainer_type == "policy_gradient" and (
            self.share_noise_in_group or self.timestep_sampling == "stratified"
        ):
            raise ValueError(
                f"algorithm.share_noise_in_group is {self.share_noise_in_group} and timestep_sampling "
                f"{self.timestep_sampling}, but trainer_type policy_gradient trains on the sampler's own steps and "
                "noises nothing: leave them out, or choose diffusion_nft or awm"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_chosen_and_noised_by_the_loss(self) -> Self:
        named = {"share_noise_in_group": self.share_noise_in_group, "best_worst_k": self.best_worst_k is not None}
        for field, given in named.items():
            if self.paired_preference and given:
                raise ValueError(
                    f"algorithm.{field} is {getattr(self, field)}, but a loss that compares pairs takes the best and "
                    "the worst sample of a group and noises them alike by itself: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _pairs_are_the_best_and_the_worst(self) -> Self:
        if self.paired_preference and self.sample_source == "online" and self.adv_mode != "continuous":
            raise ValueError(
                f"algorithm.adv_mode is {self.adv_mode}, but a loss that compares pairs takes the best and the worst "
                "sample of a group by their advantages, which that makes equal: set it to continuous, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_chooses_its_own_deviations(self) -> Self:
        if self.adv_estimator == "gdpo" and not (self.norm_adv_by_std_in_grpo and self.global_std):
            raise ValueError(
                "algorithm.adv_estimator gdpo divides by the group's and then by the batch's standard deviation: leave "
                "norm_adv_by_std_in_grpo and global_std true"
            )
        return self
