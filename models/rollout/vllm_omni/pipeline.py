# SPDX-License-Identifier: Apache-2.0
"""A model family inside vLLM-Omni's worker: its transformer there, the project's adapter and denoising loop around it.

Nothing of the loop is written again: kernels, windows, guidance and noise keys are `models.rollout.sampling`'s. What a
family writes is which transformer vLLM-Omni has for it, and where that one's arguments or names differ from
diffusers'. No text encoder is loaded: prompts arrive as embeddings.
"""

import inspect
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.rollout.sampling import Sampler
from models.rollout.vllm_omni.sample_request import SampleRequest, check_alike, join, sample_of
from models.rollout.vllm_omni.steps import NOTHING, StepExecution
from models.samples.trajectories import Generated, PromptTable, Trajectories


class RolloutPipeline(StepExecution, nn.Module):
    """Base of the rollout pipelines; vLLM-Omni builds it, loads `transformer` by its own loader and calls `forward`
    for whole batches, or `StepExecution`'s methods.

    Args:
        od_config: vLLM-Omni's settings; `custom_pipeline_args["model_config"]` holds `DiffusionModelConfig`'s fields.
        prefix: unused, part of vLLM-Omni's signature.
    """

    supports_request_batch = True
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self, *, od_config: Any, prefix: str = ""):
        from vllm_omni.diffusion.distributed.utils import get_local_device
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

        super().__init__()
        self.od_config, self.device = od_config, get_local_device()
        self.model_config = DiffusionModelConfig(**od_config.custom_pipeline_args["model_config"])
        adapter = DiffusionModelBase.get_class(self.model_config)
        self.transformer = self.build_transformer(od_config)
        self.vae = adapter.load_vae(self.model_config).to(self.device)
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model,
                subfolder="transformer",
                revision=None,
                prefix="transformer.",
                fall_back_to_pt=True,
            )
        ]
        self.sampler = Sampler(adapter, Denoiser(self), self.vae, self.model_config, self.device)
        self.prompt_tables: dict[str, PromptTable] = {}

    # ---- what a family writes

    @classmethod
    def transformer_class(cls) -> type[nn.Module]:
        """vLLM-Omni's transformer of this family."""
        raise NotImplementedError

    def denoise(self, **inputs: Any) -> Any:
        """Call the transformer with the keyword arguments that diffusers' transformer takes."""
        return self.transformer(**inputs)

    @classmethod
    def lora_module(cls, name: str) -> str:
        """vLLM-Omni's name of a module that gets LoRA weights, from diffusers' name (or the end of it)."""
        return name

    lora_packs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """A matrix of the transformer's -> the ends of diffusers' names that it packs, one below the other and all of one
    size, where vLLM-Omni's own server does not find these in it."""

    unserved: ClassVar[tuple[str, ...]] = ()
    """Modules, by diffusers' names, whose LoRA weights vLLM-Omni's own server takes and leaves out without a word."""

    blank_shape: ClassVar[tuple[int, ...]] = (1, 3, 1, 1)
    """Of what vLLM-Omni's own post-processing is given; the picture travels beside it as it is."""

    # ---- what all families share

    def build_transformer(self, od_config: Any) -> nn.Module:
        """The transformer by its folder's config, without weights yet."""
        from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

        kind = self.transformer_class()
        settings = get_transformer_config_kwargs(od_config.tf_model_config, kind)
        if "od_config" in inspect.signature(kind).parameters:
            settings["od_config"] = od_config
        return kind(**settings)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy weights by diffusers' names and in its shapes, each behind `transformer.`; names of the parameters that
        got theirs."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        loaded = AutoWeightsLoader(self).load_weights(weights)
        if not hasattr(self.transformer, "stacked_params_mapping"):  # what the LoRA manager reads
            packed: Any = getattr(self.transformer, "packed_modules_mapping", {})
            self.transformer.stacked_params_mapping = [  # type: ignore[assignment]
                (f".{whole}", f".{part}", part) for whole, parts in packed.items() for part in parts
            ]
        return loaded | {f"vae.{name}" for name, _ in self.vae.named_parameters()}  # loaded in the constructor

    def forward(self, req: Any) -> list[Any]:
        """Sample one of vLLM-Omni's batches; one output a request, in the batch's order.

        Raises:
            ValueError: a request without a sample, samples that cannot share a batch, or an unknown prompt table.
        """
        if req.is_dummy_run():
            return [self.output_of(NOTHING) for _ in req.requests]
        samples = [sample_of(parameters) for parameters in req.sampling_params_list]
        check_alike(samples)
        outputs: list[Any] = [None] * len(samples)
        for table in dict.fromkeys(sample.table for sample in samples):
            places = sorted(
                (i for i, sample in enumerate(samples) if sample.table == table), key=lambda i: samples[i].place
            )
            request = join([samples[i] for i in places], self.table_of(samples[places[0]]))
            made = self.sampler.produce(request, samples[0].pipeline, samples[0].algo)
            for row, i in enumerate(places):
                outputs[i] = self.output_of(_row(made, row))
        return outputs

    def table_of(self, sample: SampleRequest) -> PromptTable:
        """The prompts of a sample."""
        if sample.table not in self.prompt_tables:
            raise ValueError(f"prompt table {sample.table} is not in this worker: put it there before its samples")
        return self.prompt_tables[sample.table]

    def output_of(self, made: Generated) -> Any:
        """One sample's, as vLLM-Omni carries it; the lists' order is what `answers.join_answers` reads."""
        from vllm_omni.diffusion.data import DiffusionOutput

        recorded = made.recorded
        path = recorded if isinstance(recorded, Trajectories) else None
        return DiffusionOutput(
            output=torch.zeros(self.blank_shape),
            trajectory_latents=None if recorded is None else recorded.latents,
            trajectory_timesteps=None if path is None else path.timesteps,
            trajectory_log_probs=None if path is None else path.log_probs,
            trajectory_decoded=[
                made.pictures,
                made.latents,
                None if path is None else path.means,
                None if path is None else path.unconditional,
                made.finite,
            ],
            to_cpu=True,
        )

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        """vLLM-Omni's hook for LoRA weights that are not in a folder; None lets it read the folder."""
        tensors = getattr(lora_request, "lora_tensors", None)
        if tensors is None:
            return None
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_dict(lora_request.peft_config)
        loaded = LoRAModel.from_lora_tensors(
            # The manager multiplies the B matrices by alpha / rank in place.
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            peft_helper=helper,
            lora_model_id=lora_request.lora_int_id,
            device="cpu",
            dtype=dtype,
            model_vocab_size=None,
            weights_mapper=None,
        )
        return loaded, helper


class Denoiser:
    """The pipeline's transformer behind diffusers' interface: keyword arguments, and a `config` with attributes."""

    def __init__(self, pipeline: RolloutPipeline):
        self._denoise = pipeline.denoise
        self.config = SimpleNamespace(**pipeline.od_config.tf_model_config.to_dict())

    def __call__(self, **inputs: Any) -> Any:
        """What the pipeline's `denoise` gives."""
        return self._denoise(**inputs)


def _row(made: Generated, row: int) -> Generated:
    """One sample of a batch."""
    pictures, latents = (None if kept is None else kept[row : row + 1] for kept in (made.pictures, made.latents))
    recorded = made.recorded and made.recorded.rows(torch.tensor([row]))
    return Generated(pictures, latents, recorded, made.finite[row : row + 1])
