# SPDX-License-Identifier: Apache-2.0
"""What a model family must tell the engines, and the two registries that find it.

A family registers a training adapter (`DiffusionModelBase`) and, for the vLLM-Omni rollout engine, a pipeline class
(`VllmOmniPipelineBase`). Both are keyed on (architecture, algorithm): the architecture is `_class_name` of the
folder's model_index.json. Registered for an architecture alone, an adapter serves every algorithm.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from models.config.view import DiffusionModelConfig, read_architecture
from models.families import load_families
from models.families.guidance import in_one_pass
from models.families.latents import text_width, transformer_config, vae_factor
from models.families.loading import load_network, load_text_encoders
from models.families.operations import Config
from models.registry import C, Registry

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from tensordict import TensorDict

    from models.config.pipeline import DiffusionPipelineConfig

UNCONDITIONAL = "unconditional"
"""Name under which samples carry the half of the guidance without the prompt."""

TAKEN_AS_IT_IS = {"timestep", "t", "guidance", "img_ids", "txt_ids"}
"""Inputs of diffusers' networks that are numbers and places, and no activations: rounded, they would be others."""
TEXT = ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")
"""What `prepare_model_inputs` takes of every family's text by name."""

OPTIONAL_PIPELINE_FIELDS: dict[str, float | None] = {"true_cfg_scale": 1.0, "guidance_scale": None, "num_frames": None}
"""Fields of `rollout.pipeline` that only some families read, and the value with which each says nothing."""


_ADAPTERS = Registry("A training adapter")


def _in_format(inputs: dict[str, Any], model_config: DiffusionModelConfig) -> dict[str, Any]:
    """A family's own adapter has cast them; one that was written for another system may leave that to what calls it."""

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(item) for item in value]
        return value.to(model_config.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: value if name in TAKEN_AS_IT_IS else cast(value) for name, value in inputs.items()}


class DiffusionModelBase(ABC):
    """Training and in-process sampling hooks of one model family; all are classmethods, an adapter has no state.

    A family writes what is its own: the scheduler's shift, the denoiser's keyword arguments, guidance, latent shape
    and decoding. The reverse step itself stands here once, and rollout and update both go through it.
    """

    lora_target_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that get LoRA weights unless the config names others."""

    pipeline_fields: ClassVar[tuple[str, ...]] = ()
    """Which of `OPTIONAL_PIPELINE_FIELDS` the family reads; the first one turns classifier-free guidance on."""

    prompt_extras: ClassVar[tuple[str, ...]] = ()
    """What `encode_prompts` returns besides the sequence and its mask."""

    negative_prompt: ClassVar[str] = ""
    """What guidance contrasts with unless the data stage is given another text: the model card's."""

    guides_in_one_pass: ClassVar[bool] = False
    """The family's pipeline computes both halves of the guidance in one batch, in the order of `negative_first`."""

    negative_first: ClassVar[bool] = True

    one_text_length: ClassVar[bool] = False
    """The texts of both halves of the guidance are filled up to the longest."""

    cuda_attention: ClassVar[str | None] = None
    """diffusers' name of the attention kernel on a GPU in bf16 and fp16, where torch's own choice will not do."""

    projects_streams: ClassVar[bool] = False
    """Queries, keys and values of a stream are made of the same tensor, by diffusers' names of these layers."""

    most_text_tokens: ClassVar[int | None] = None
    """Beyond which the pipeline cuts a text whatever length it is given; None where it does not."""

    samples_video: ClassVar[bool] = False
    """`decode` returns [B, F, H, W, 3] instead of [B, H, W, 3]."""

    @classmethod
    def register(cls, architecture: str, algorithm: str | None = None) -> Callable[[C], C]:
        """Class decorator; without `algorithm` the adapter serves every algorithm of the architecture."""
        return _ADAPTERS.register(architecture, algorithm)

    @classmethod
    def get_class(cls, model_config: DiffusionModelConfig) -> type["DiffusionModelBase"]:
        """The adapter of (architecture, algorithm).

        Raises:
            ValueError: no adapter is registered, the message lists the known architectures; it lacks a hook that every
                family writes; or a module that registers families cannot be imported.
        """
        load_families(model_config.external_lib)
        found = _ADAPTERS.find(model_config.architecture, model_config.algorithm)
        if found is None:
            known = ", ".join(sorted({architecture for architecture, _ in _ADAPTERS.entries}))
            raise ValueError(
                f"no adapter for architecture {model_config.architecture!r} (algorithm {model_config.algorithm!r}) "
                f"of {model_config.path}; known architectures: {known}"
            )
        lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        if lacking:
            raise ValueError(
                f"{found.__module__}.{found.__qualname__}, the adapter of {model_config.architecture}, lacks "
                f"{lacking}: write what docs/add-a-model.md says of them"
            )
        return found

    # ---- what a family writes

    @classmethod
    @abstractmethod
    def set_timesteps(cls, scheduler: "SchedulerMixin", model_config: DiffusionModelConfig, device: str) -> None:
        """Set timesteps and sigmas exactly as the family's diffusers pipeline does, on `device`."""

    @classmethod
    @abstractmethod
    def prepare_model_inputs(
        cls,
        module: nn.Module,
        model_config: DiffusionModelConfig,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        prompt_embeds_mask: Tensor,
        negative_prompt_embeds: Tensor | None,
        negative_prompt_embeds_mask: Tensor | None,
        micro_batch: "TensorDict | dict[str, Any] | None",
        step: int,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Keyword arguments of the denoiser's forward, positive and (with guidance) negative.

        Args:
            module: the denoiser.
            model_config: the model's settings.
            latents: a trajectory [B, W+1, ...] or one selected latent [B, ...].
            timesteps: [B, W] with a trajectory, [B] with a selected latent.
            prompt_embeds: [B, L, D].
            prompt_embeds_mask: [B, L], true at real tokens.
            negative_prompt_embeds: [B, L', D], or None without guidance.
            negative_prompt_embeds_mask: [B, L'].
            micro_batch: further inputs of the samples by name, for families that need them: at least the prompt
                table's extras, such as `pooled_prompt_embeds` [B, D], and the numbers `height`, `width` and
                `vae_scale_factor`.
            step: index into the trajectory; ignored for a selected latent.
        """

    @classmethod
    @abstractmethod
    def guide(cls, model_config: DiffusionModelConfig, conditional: Tensor, unconditional: Tensor | None) -> Tensor:
        """The velocity v = e - x0 in fp32, [B, ...] like the latent.

        Args:
            conditional: [B, ...], what `denoise` gave with the prompt.
            unconditional: [B, ...], what it gave without, or None without guidance.
        """

    @classmethod
    @abstractmethod
    def latent_shape(cls, model_config: DiffusionModelConfig) -> tuple[int, ...]:
        """Shape of one sample's latent, without the batch.

        Raises:
            ValueError: height or width does not divide into the model's patches.
        """

    @classmethod
    @abstractmethod
    def decode(cls, vae: nn.Module, model_config: DiffusionModelConfig, latents: Tensor) -> Tensor:
        """Finished latents [B, ...] to what the decoder makes of them, [B, 3, H, W] in [-1, 1], not clamped.

        Video is [B, 3, F, H, W].
        """

    @classmethod
    @abstractmethod
    def encode(cls, vae: nn.Module, model_config: DiffusionModelConfig, images: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] uint8 to latents [B, ...] fp32: the inverse of `decode`, for data sets of pictures."""

    @classmethod
    @abstractmethod
    def encode_prompts(
        cls, pipeline: "DiffusionPipeline", prompts: list[str], max_sequence_length: int
    ) -> dict[str, Tensor]:
        """Text as the family's own pipeline encodes it: its template, its text encoders, its layers.

        Args:
            pipeline: from `load_text_pipeline`.
            prompts: B texts.
            max_sequence_length: tokens of a prompt; families that pad do so up to this number. Longer texts are cut as
                the pipeline does, at their end or before the token that ends a text.

        Returns:
            `prompt_embeds` [B, L, D], `prompt_embeds_mask` [B, L] (true at what the denoiser sees), and further
            tensors with a row for each prompt under the names that `prepare_model_inputs` looks for.
        """

    @classmethod
    @abstractmethod
    def prompt_lengths(cls, pipeline: "DiffusionPipeline", prompts: list[str]) -> list[int]:
        """Tokens of each prompt that count against max_sequence_length; above it the text would be cut."""

    # ---- what all families share; a family may have its own

    @classmethod
    def model_inputs(
        cls,
        module: nn.Module,
        model_config: DiffusionModelConfig,
        latents: Tensor,
        timesteps: Tensor,
        micro_batch: "TensorDict | dict[str, Any]",
        step: int = 0,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """`prepare_model_inputs` as every engine asks for it: with the text out of the micro-batch, the picture's size
        in it, all in the model's number format but what networks take as it is (`TAKEN_AS_IT_IS`), and nothing for a
        negative prompt where there is no guidance.

        Args:
            latents: [B, W+1, ...] or [B, ...], as `prepare_model_inputs` takes them.
            timesteps: [B, W] or [B], likewise.
            micro_batch: at least the samples' rows of a prompt table, `PromptTable.expand`.
        """
        text: dict[str, Any] = {name: micro_batch.get(name) for name in TEXT}
        size = {"height": model_config.pipeline.height, "width": model_config.pipeline.width}
        given = micro_batch.copy()
        for name, number in (size | {"vae_scale_factor": vae_factor(model_config.path)}).items():
            given.set_non_tensor(name, number) if hasattr(given, "set_non_tensor") else given.update({name: number})
        inputs, negative = cls.prepare_model_inputs(
            module, model_config, latents, timesteps, **text, micro_batch=given, step=step
        )
        guided = cls.is_guided(model_config.pipeline)
        return _in_format(inputs, model_config), _in_format(negative, model_config) if guided and negative else None

    @classmethod
    def denoise(cls, module: nn.Module, model_inputs: dict[str, Any]) -> Tensor:
        """What the network says of one batch, [B, ...] in its own number format."""
        return module(**model_inputs)[0]

    @classmethod
    def predict_halves(
        cls,
        module: nn.Module,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
        one_pass: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """`denoise` with the prompt and, with guidance, without it; in one pass where the family's pipeline does so.

        Both are [B, ...] like the latent, in the network's number format; the second is None without guidance.

        Args:
            one_pass: false computes them apart wherever the pipeline would join them, as an update does that takes
                one of them as given: a batch of another size is rounded otherwise.
        """

        def forward(inputs: dict[str, Any]) -> Tensor:
            return cls.denoise(module, inputs)

        if negative_model_inputs is None:
            return forward(model_inputs), None
        if cls.guides_in_one_pass and one_pass:
            return in_one_pass(forward, model_inputs, negative_model_inputs, cls.negative_first)
        return forward(model_inputs), forward(negative_model_inputs)

    @classmethod
    def predict_velocity(
        cls,
        module: nn.Module,
        model_config: DiffusionModelConfig,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
        unconditional: Tensor | None = None,
    ) -> Tensor:
        """The guided velocity v = e - x0 in fp32, [B, ...] like the latent.

        Args:
            unconditional: [B, ...], the half without the prompt, where it is known already and not computed again.
        """
        if unconditional is None:
            return cls.guide(model_config, *cls.predict_halves(module, model_inputs, negative_model_inputs))
        return cls.guide(model_config, cls.denoise(module, model_inputs), unconditional)

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig) -> "SchedulerMixin":
        """The family's scheduler from the model's folder, with timesteps and sigmas already set (CPU)."""
        from models.schedulers import FlowMatchSDEDiscreteScheduler

        scheduler = FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.path, subfolder="scheduler")
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler

    @classmethod
    def load_transformer(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> nn.Module:
        """The denoiser with the folder's weights; ValueError where these lack some."""
        subfolder, built_by = model_config.transformer_subfolder, model_config.model.config_path
        return load_network(model_config.path, subfolder, dtype, built_by)

    @classmethod
    def load_vae(cls, model_config: DiffusionModelConfig) -> nn.Module:
        """The decoder with the folder's weights, in eval mode and without gradients."""
        vae = load_network(model_config.path, "vae", model_config.dtype)
        return vae.eval().requires_grad_(False)

    @classmethod
    def text_shapes(cls, model_config: DiffusionModelConfig, max_sequence_length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_prompts` returns for one prompt of that many tokens, the mask left out.

        Empty where the config files do not say: a run that encodes its prompts itself then does not check whether it
        fits the GPU before it has encoded.
        """
        width, config = text_width(model_config), transformer_config(model_config)
        sizes: dict[str, int] = {}
        if "pooled_projection_dim" in config:
            sizes["pooled_prompt_embeds"] = config["pooled_projection_dim"]
        if width is None or not sizes.keys() >= set(cls.prompt_extras):
            return {}
        return {"prompt_embeds": (max_sequence_length, width)} | {name: (sizes[name],) for name in cls.prompt_extras}

    @classmethod
    def load_text_pipeline(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "DiffusionPipeline":
        """The family's pipeline with its text side alone: of a large model the rest would be most of the memory."""
        pipeline_class = getattr(importlib.import_module("diffusers"), read_architecture(path))
        left_out: dict[str, Any] = {"transformer": None, "vae": None, "scheduler": None}
        return pipeline_class.from_pretrained(path, **left_out, **load_text_encoders(path, dtype), dtype=dtype)

    @classmethod
    def transformer_blocks(cls, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks: units of sharding and of compilation."""
        return list(module.transformer_blocks)  # type: ignore[arg-type]

    @classmethod
    def lengths_of_text(cls, inputs: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The tensors among a block's inputs that are as long as the text, such as its states [B, tokens, C], and the
        dimension along which they are: compiled code serves every length. Empty where all prompts have the same.

        Args:
            inputs: of the block's forward, by name.
        """
        return []

    @classmethod
    def split_sequences(cls, model_config: DiffusionModelConfig, text_tokens: int) -> dict[str, int]:
        """Lengths of what sequence parallelism divides: of "a sample", and of "a prompt" where that is divided as it
        is; empty where the family's attention cannot be split."""
        return {}

    @classmethod
    def padded_text(cls, model_inputs: dict[str, Any], multiple: int) -> dict[str, Any]:
        """The denoiser's inputs with a text of a multiple of so many tokens, where the family masks what is added."""
        return model_inputs

    @classmethod
    def multiplications(cls, config: Config, image_tokens: int, text_tokens: int, timesteps: int) -> int | None:
        """Multiplications of one forward of one sample, out of the transformer's config.json; see `operations`.

        None: not known, and a run has no perf/mfu and does not check whether it fits the GPU.

        Args:
            image_tokens, text_tokens: of one sample, with what the denoiser sees of padding.
            timesteps: how many timesteps are embedded: one, or one for each image token.
        """
        return None

    @classmethod
    def is_guided(cls, pipeline: "DiffusionPipelineConfig") -> bool:
        """Whether these settings ask for classifier-free guidance, which needs negative embeddings."""
        scale = getattr(pipeline, cls.pipeline_fields[0]) if cls.pipeline_fields else None
        return scale is not None and scale > 1

    @classmethod
    def check_pipeline(cls, model_config: DiffusionModelConfig) -> None:
        """What can be said about the sampling settings before a model loads; reads config files only.

        Raises:
            ValueError: a field is set that the family does not read, the size does not suit the model, or its pipeline
                reads fewer tokens.
        """
        for name, nothing in OPTIONAL_PIPELINE_FIELDS.items():
            value = getattr(model_config.pipeline, name)
            if value != nothing and name not in cls.pipeline_fields:
                raise ValueError(
                    f"rollout.pipeline.{name} is {value}, which {model_config.architecture} does not read: leave it "
                    f"out (this model reads {', '.join(cls.pipeline_fields)})"
                )
        cls.latent_shape(model_config)
        length = model_config.pipeline.max_sequence_length
        if length is not None:
            cls.check_text_length(length, "rollout.pipeline.max_sequence_length")

    @classmethod
    def check_text_length(cls, tokens: int, field: str) -> None:
        """Raise ValueError where the family's pipeline reads fewer tokens of a text than `field` gives it."""
        if cls.most_text_tokens is not None and tokens > cls.most_text_tokens:
            raise ValueError(
                f"{field} is {tokens}, but {cls.__name__}'s pipeline reads no more than {cls.most_text_tokens} tokens "
                "of a prompt: give that, or fewer"
            )

    @classmethod
    def forward_and_sample_previous_step(
        cls,
        module: nn.Module,
        scheduler: "SchedulerMixin",
        model_config: DiffusionModelConfig,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
        scheduler_inputs: "TensorDict | dict[str, Tensor] | None",
        step: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Replay one step of a rollout under the module's present weights.

        Args:
            scheduler_inputs: `latents` [B, W+1, ...] and `timesteps` [B, W] of the rollout, also as `all_latents` and
                `all_timesteps`; with `unconditional`
                [B, ...] this step's half of the guidance without the prompt is taken as given.
            step: which of the W steps.

        Returns:
            (log_prob [B], prev_sample_mean [B, ...], std_dev_t [B, 1, ...], sqrt_dt [B]), fp32. An adapter of one's own
            may leave the last one out.
        """
        if scheduler_inputs is None:
            raise ValueError("forward_and_sample_previous_step needs scheduler_inputs with latents and timesteps")
        velocity = cls.predict_velocity(
            module, model_config, model_inputs, negative_model_inputs, scheduler_inputs.get(UNCONDITIONAL)
        )
        latents, timesteps = scheduler_inputs["latents"], scheduler_inputs["timesteps"]
        _, log_prob, mean, std_dev_t, sqrt_dt = scheduler.sample_previous_step(
            latents[:, step],
            velocity,
            timestep=timesteps[:, step],
            noise_level=model_config.algo.noise_level,
            sde_type=model_config.algo.sde_type,
            sde_options=getattr(model_config.algo, "sde_options", None),
            prev_sample=latents[:, step + 1],
            return_sqrt_dt=True,
        )
        return log_prob, mean, std_dev_t, sqrt_dt


def select_step(latents: Tensor, timesteps: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(latent [B, ...], timestep [B]) of a trajectory at `step`, or the given pair if it is selected already."""
    return (latents[:, step], timesteps[:, step]) if timesteps.ndim == 2 else (latents, timesteps)
