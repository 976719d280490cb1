# SPDX-License-Identifier: Apache-2.0
"""A model's text encoders at work: what the `embeddings` stage writes, and what encodes prompts within a run."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.families.base import DiffusionModelBase, DiffusionModelConfig
from models.weights.host_copies import HostCopies
from tasks.config.data import TooLong
from tasks.config.params import EmbeddingsParams
from tasks.data.prompt_files import DatasetError
from tasks.data.prompts import Prompt, check_prompt_lengths


def adapter_of(
    model: str | Path, external_lib: str | None = None, **pipeline: int
) -> tuple[type[DiffusionModelBase], DiffusionModelConfig]:
    """The adapter of a model folder, and its settings; `pipeline` are sampling fields, such as the height."""
    described = ModelConfig(path=str(model), external_lib=external_lib)
    sections = described, DiffusionPipelineConfig(**pipeline), DiffusionRolloutAlgoConfig()
    model_config = DiffusionModelConfig.load(*sections)
    return DiffusionModelBase.get_class(model_config), model_config


def check_adapter_file(adapter: type[DiffusionModelBase], file: str, field: str) -> None:
    """Raise DatasetError unless the adapter's code stands in `file`, which DVC watches in its place."""
    source, named = Path(inspect.getfile(adapter)), Path(file)
    # A folder that has the data alone, and the code where it is installed, names the file as the project does.
    is_it = source.resolve() == named.resolve() if named.exists() else source.parts[-len(named.parts) :] == named.parts
    if not is_it:
        shown = source.relative_to(Path.cwd()) if source.is_relative_to(Path.cwd()) else source
        raise DatasetError(
            f"{field} is {file}, but the model's adapter is in {shown}: name that file, so that DVC sees it change"
        )


@dataclass(frozen=True)
class EncodingSettings:
    """How text encoders encode within a run; the fields are those of `EmbeddingsParams`."""

    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    max_sequence_length: int
    negative_prompt: str | None = None
    threads: int = 1
    external_lib: str | None = None


class CutPrompt(NamedTuple):
    """A prompt of which the beginning alone is encoded, and the tokens that it has with its template."""

    prompt: Prompt
    tokens: int


TOLD = 3
"""Prompts that are named where some are cut."""


def told_of_cut(cut: Sequence[CutPrompt], max_sequence_length: int) -> str:
    """What a user is told of prompts that are cut: how many, and the first few by file and line."""
    named = ", ".join(f"{prompt.source} of {tokens}" for prompt, tokens in cut[:TOLD])
    more = f" and {len(cut) - TOLD} more" if len(cut) > TOLD else ""
    return (
        f"prompts that are cut to max_sequence_length={max_sequence_length} tokens, as the model's pipeline does: "
        f"{len(cut)} ({named}{more})"
    )


def uids_of_cut(cut: Sequence[CutPrompt], prompts: Sequence[Prompt]) -> set[str]:
    """Under which uids a text is stored that is cut: also that of a negative prompt with the text of a prompt."""
    texts = {prompt.prompt for prompt, _ in cut}
    negatives = [negative for prompt in prompts if (negative := prompt.negative) is not None]
    return {prompt.uid for prompt, _ in cut} | {text.uid for text in negatives if text.prompt in texts}


class TextEncoding:
    """The text encoders of a model, loaded. Torch's threads on the CPU are set for the whole process.

    Args:
        model: folder in diffusers format.
        settings: how they encode: number format, device, length, threads.
        asleep: begin in host memory, which they keep for good; `to` takes them to the device.
    """

    def __init__(self, model: str | Path, settings: EmbeddingsParams | EncodingSettings, asleep: bool = False):
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise DatasetError("embeddings.device is cuda, but torch finds no GPU here: set cpu, or run where one is")
        torch.set_num_threads(settings.threads)
        self.adapter, _ = adapter_of(model, settings.external_lib)
        try:
            self.adapter.check_text_length(settings.max_sequence_length, "max_sequence_length")
        except ValueError as error:
            raise DatasetError(str(error)) from error
        self.max_sequence_length = settings.max_sequence_length
        given = settings.negative_prompt
        self.negative_prompt = self.adapter.negative_prompt if given is None else given
        self._pipeline = self.adapter.load_text_pipeline(model, getattr(torch, settings.dtype))
        modules = [part for part in self._pipeline.components.values() if isinstance(part, torch.nn.Module)]
        self._host = HostCopies(modules, away=asleep or settings.device == "cpu")
        if not asleep:
            self._pipeline.to(settings.device)

    def to(self, device: str) -> None:
        """Move the weights; those that leave a GPU leave no memory taken there."""
        if device != "cpu":
            self._host.come_back(device)
            return
        self._host.leave()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def check_lengths(self, prompts: Sequence[Prompt], too_long: TooLong = "refuse") -> list[CutPrompt]:
        """Those of the prompts, and of their own negative prompts, each once, that `encode` will cut.

        Negative prompts are treated like prompts, as the pipelines of diffusers encode both with one length.

        Raises:
            DatasetError: there is one, and it is to be refused.
        """
        texts = {prompt.prompt for prompt in prompts}  # with a negative prompt that `take` wants beside its own prompt
        negatives = [negative for prompt in prompts if (negative := prompt.negative) is not None]
        own = {negative.uid: negative for negative in negatives if negative.prompt not in texts}
        cut: list[CutPrompt] = []
        for part in filter(None, (prompts, list(own.values()))):
            lengths = self.adapter.prompt_lengths(self._pipeline, [text.prompt for text in part])
            if too_long == "refuse":
                check_prompt_lengths(part, lengths, self.max_sequence_length)
            found = zip(part, lengths, strict=True)
            cut += [CutPrompt(text, length) for text, length in found if length > self.max_sequence_length]
        return cut

    @torch.no_grad()
    def encode(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [B, L, D], `prompt_embeds_mask` [B, L] and the family's extras [B, ...] of B texts.

        A text that is too long is cut, as the family's pipeline does; `check_lengths` says which.
        """
        return self.adapter.encode_prompts(self._pipeline, texts, self.max_sequence_length)
