# SPDX-License-Identifier: Apache-2.0
"""The run's own text encoders: a Ray actor that encodes prompts."""

from collections.abc import Sequence

from tasks.actors.memory import measures_gpu_memory
from tasks.config.data import TooLong
from tasks.data.embeddings import Row, encoded_rows
from tasks.data.prompts import Prompt
from tasks.data.text_encoding import EncodingSettings, TextEncoding, told_of_cut
from tasks.system.collector import collects_once_loaded


class TextEncoder:
    """One process with the text encoders of a model.

    Args:
        model: folder in diffusers format.
        settings: how they encode.
        batch_size: prompts encoded at once.
        sleeps: the weights begin in host memory, and go to the device when something is to be encoded.
        too_long: what becomes of prompts that are.
    """

    @measures_gpu_memory("load")
    @collects_once_loaded
    def __init__(
        self, model: str, settings: EncodingSettings, batch_size: int, sleeps: bool, too_long: TooLong = "refuse"
    ):
        self.encoding = TextEncoding(model, settings, asleep=sleeps)
        self.device, self.batch_size, self.too_long = settings.device, batch_size, too_long
        self._cut = ""

    def check(self, prompts: Sequence[Prompt]) -> str:
        """What to tell of the prompts, and of their own negative prompts, that are cut; nothing, where none is. Answers
        once all is loaded.

        Raises:
            DatasetError: one is too long, and to be refused.
        """
        cut = self.encoding.check_lengths(prompts, self.too_long) if prompts else []
        return told_of_cut(cut, self.encoding.max_sequence_length) if cut else ""

    def first_cut(self) -> str:
        """What to tell of the first call of `encode` that cut a prompt; nothing, where none did."""
        return self._cut

    @measures_gpu_memory("encode_prompts")
    def encode(self, prompts: Sequence[Prompt]) -> list[Row]:
        """The embedding of each prompt's text, on the CPU.

        Raises:
            DatasetError: a prompt is too long and to be refused, or its embedding is not finite.
        """
        cut = self.check(prompts)
        self._cut = self._cut or cut
        self.encoding.to(self.device)
        rows = encoded_rows({prompt.uid: prompt.prompt for prompt in prompts}, self.encoding.encode, self.batch_size)
        return [rows[prompt.uid] for prompt in prompts]

    def sleep(self) -> None:
        """Give up the GPU's memory until there is something to encode."""
        self.encoding.to("cpu")
