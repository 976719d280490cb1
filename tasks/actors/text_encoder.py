# SPDX-License-Identifier: Apache-2.0
"""The run's own text encoders: a Ray actor that encodes prompts."""

from collections.abc import Sequence

from tasks.actors.memory import measures_gpu_memory
from tasks.data.embeddings import Row, encoded_rows
from tasks.data.prompts import Prompt
from tasks.data.text_encoding import EncodingSettings, TextEncoding
from tasks.system.collector import collects_once_loaded


class TextEncoder:
    """One process with the text encoders of a model.

    Args:
        model: folder in diffusers format.
        settings: how they encode.
        batch_size: prompts encoded at once.
        sleeps: the weights begin in host memory, and go to the device when something is to be encoded.
    """

    @measures_gpu_memory("load")
    @collects_once_loaded
    def __init__(self, model: str, settings: EncodingSettings, batch_size: int, sleeps: bool):
        self.encoding = TextEncoding(model, settings, asleep=sleeps)
        self.device, self.batch_size = settings.device, batch_size

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DatasetError for a prompt, or its own negative prompt, that is too long; answers once all is loaded."""
        if prompts:
            self.encoding.check_lengths(prompts)

    @measures_gpu_memory("encode_prompts")
    def encode(self, prompts: Sequence[Prompt]) -> list[Row]:
        """The embedding of each prompt's text, on the CPU.

        Raises:
            DatasetError: a prompt is too long, or its embedding is not finite.
        """
        self.check(prompts)
        self.encoding.to(self.device)
        rows = encoded_rows({prompt.uid: prompt.prompt for prompt in prompts}, self.encoding.encode, self.batch_size)
        return [rows[prompt.uid] for prompt in prompts]

    def sleep(self) -> None:
        """Give up the GPU's memory until there is something to encode."""
        self.encoding.to("cpu")
