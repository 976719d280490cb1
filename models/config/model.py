# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`: which checkpoint, and which of its weights are trained."""

from typing import Literal, Self

from pydantic import Field, model_validator

from models.config.section import Later, Section


class ModelConfig(Section):
    """Which model is trained, and which of its weights."""

    path: str = Field("data/base_model", description="Folder in diffusers format (model_index.json at its root).")
    initial_weights: Later[str | None] = Field(
        None,
        description="Folder with the weights that another run exported (LoRA or all of them, as this run trains), from "
        "which training starts; null starts from model.path, which stays the reference of KL and losses.",
    )
    transformer_subfolder: Later[str] = Field(
        "transformer",
        pattern=r"^\w[\w.-]*$",
        description="Folder of path with the denoiser's weights: of a checkpoint that has several, as transformer_ema.",
    )
    config_path: Later[str | None] = Field(
        None,
        description="Folder whose config.json says how the denoiser is built; null is the one with its weights.",
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
    frozen_dtype: Later[Literal["float8_forward", "float8"] | None] = Field(
        None,
        description="With LoRA: keep the blocks' frozen matrices in float8 (e4m3, a scale a row) and multiply the "
        "activations, rounded likewise, with them there, in rollout and update alike; float8 also computes the "
        "activations' gradient so, float8_forward in the model's format. Another function than the published model: "
        "see docs/training.md. null is model.dtype.",
    )
    fuse_projections: Later[bool] = Field(
        False,
        description="With LoRA: its A matrices of a stream's queries, keys and values in one matrix product, in "
        "rollout and update alike. Stable Diffusion 3 and Qwen-Image.",
    )
    compile: bool = Field(
        False,
        description="Compile the transformer's blocks in the trainer and in the diffusers rollout, and there the image "
        "decoder: on a GPU about half the time and less memory, for a minute at the first iteration and again at each "
        "new batch size.",
    )

    @property
    def trains_lora(self) -> bool:
        """Are LoRA weights trained, and not all of the transformer's?"""
        return self.lora_rank > 0

    @model_validator(mode="after")
    def _fused_projections_are_loras(self) -> Self:
        if self.fuse_projections and not self.trains_lora:
            raise ValueError(
                "fuse_projections is true, but lora_rank is 0, which trains all weights, and what is fused is LoRA's: "
                "set lora_rank, or leave fuse_projections out"
            )
        return self

    @model_validator(mode="after")
    def _float8_weights_are_frozen(self) -> Self:
        if self.frozen_dtype is not None and not self.trains_lora:
            raise ValueError(
                f"frozen_dtype is {self.frozen_dtype}, but lora_rank is 0, which trains all weights: set lora_rank, or "
                "leave frozen_dtype out"
            )
        return self
