# SPDX-License-Identifier: Apache-2.0
"""HPSv3's architecture (arXiv 2508.03789): a Qwen2-VL reads prompt and picture, and a head says a mean and a sigma."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
from pydantic import PositiveInt

from tasks.rewards.base import RewardResult, register_reward
from tasks.rewards.errors import RewardError
from tasks.rewards.pretrained import PretrainedOptions, PretrainedReward, to_scores
from tasks.rewards.scored_prompt import ScoredPrompt

if TYPE_CHECKING:
    from torch import Tensor

REWARD_TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Of a picture as the published weights see it, whatever it has: 256 of the model's tokens."""
PICTURE, PICTURE_BEGINS, PICTURE_ENDS = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "<|im_start|>user\n{picture}Judge how well this picture shows what its prompt says, and how good it looks.\n"
    f"Prompt: {{prompt}}\n{REWARD_TOKEN}<|im_end|>\n"
)


class Processor(NamedTuple):
    """Of texts and of pictures; transformers' own of both needs torchvision, for videos."""

    tokenizer: Any
    pictures: Any


@register_reward("hpsv3")
class HumanPreferenceScoreV3(PretrainedReward):
    """The first of the two values that the head makes of the hidden state at the token <|Reward|>, the mean.

    The detail `sigma` is the second value as the head gives it. The head's layers have ReLU in between. Tokens have the
    positions 0, 1, 2, ..., the picture's too, as in the published forward: Qwen2-VL's own are rows and columns.
    """

    architecture = "Qwen2VLModel"

    def __init__(
        self,
        *,
        model: str,
        head: str,
        template: str = TEMPLATE,
        min_pixels: PositiveInt = PIXELS,
        max_pixels: PositiveInt = PIXELS,
        **options: Unpack[PretrainedOptions],
    ) -> None:
        """Load the model and the head.

        Args:
            model, options: see `PretrainedReward`; its tokenizer must know <|Reward|>.
            head: safetensors file of linear layers, from the language model's width to two values.
            template: what the model reads: {picture}, {prompt} and one <|Reward|> after both. Published weights want
                the one that they were trained with.
            min_pixels, max_pixels: to as many a picture is resized, as near as whole patches come; the published
                weights were trained with the defaults.
        """
        from torch import nn

        super().__init__(model=model, **options)
        width = self.model.config.text_config.hidden_size
        self._head = self.load_head(head, width, outputs=2, activation=nn.ReLU)
        self._token = self.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        if self._token in (None, self.processor.tokenizer.unk_token_id) or self._token >= self._vocabulary():
            raise RewardError(
                f"{self.name}: {model} does not know {REWARD_TOKEN}: its tokenizer must, and its embeddings"
            )
        self._template, self._limits = template, {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        self.version += f" positions=sequential pixels={min_pixels},{max_pixels}"
        self.version += f" template={hashlib.sha256(template.encode()).hexdigest()[:12]}"

    @classmethod
    def check_options(cls, name: str, options: Mapping[str, Any]) -> None:
        """The template has its places, in an order in which the reward's token has read both."""
        super().check_options(name, options)
        template = str(options.get("template", TEMPLATE))
        before = template.partition(REWARD_TOKEN)[0]
        if template.count(REWARD_TOKEN) != 1 or before.count("{picture}") != 1 or before.count("{prompt}") != 1:
            raise RewardError(
                f"reward {name!r}: template must have {{picture}} and {{prompt}} once each and after both one "
                f"{REWARD_TOKEN}"
            )
        least, most = (options.get(option, PIXELS) for option in ("min_pixels", "max_pixels"))
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise RewardError(
                f"reward {name!r}: min_pixels {least} is above max_pixels {most}: give one that is not larger"
            )

    def load_processor(self, source: str, revision: str | None) -> Processor:
        """The tokenizer, and the pictures' processor that computes the same with and without torchvision."""
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, padding_side="right")
        return Processor(tokenizer, Qwen2VLImageProcessorPil.from_pretrained(source, revision=revision))

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """Unbounded, as the head gives it."""
        import torch

        pictures = self._pictures(images)
        counts = [self._count(grid) for grid in pictures["image_grid_thw"]]
        texts = [self._text(prompt.prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens = self.processor.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        ids = tokens["input_ids"]
        states = self.model(
            input_ids=ids,
            attention_mask=tokens["attention_mask"],
            pixel_values=pictures["pixel_values"].to(self.device, self.model.dtype),
            image_grid_thw=pictures["image_grid_thw"].to(self.device),
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape),
            use_cache=False,
        ).last_hidden_state
        last = (ids == self._token).int().argmax(-1)
        values = self._head(states[torch.arange(len(ids), device=ids.device), last].float())
        return RewardResult(to_scores(values[:, 0]), {"sigma": to_scores(values[:, 1]).tolist()})

    def _pictures(self, images: np.ndarray) -> Any:
        """`pixel_values`, and of each picture `image_grid_thw`, its patches in time, height and width."""
        return self.processor.pictures(images=list(images), size=self._limits, return_tensors="pt")

    def _count(self, grid: "Tensor") -> int:
        """Tokens of a picture of so many patches."""
        return int(grid.prod()) // self.processor.pictures.merge_size**2

    def _text(self, prompt: str, count: int) -> str:
        """What the model reads; a prompt cannot bring tokens of its own."""
        picture = PICTURE_BEGINS + PICTURE * count + PICTURE_ENDS
        return self._template.replace("{picture}", picture).replace("{prompt}", prompt.replace("<|", "< |"))

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)
