# SPDX-License-Identifier: Apache-2.0
"""ImageReward (arXiv 2304.05977) with the BLIP of transformers: a head on the text as the picture makes it read."""

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from pydantic import PositiveFloat

from tasks.rewards.base import RewardResult, register_reward
from tasks.rewards.pretrained import PretrainedOptions, PretrainedReward, to_scores
from tasks.rewards.scored_prompt import ScoredPrompt

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the published head over its training set."""
TOKENS = 35
"""Of a prompt; what comes after them the published head never saw."""


@register_reward("image_reward")
class ImageReward(PretrainedReward):
    """(head(text) - mean) / std, where `text` is the first token of BLIP's text encoder, which attends to the picture.

    The published checkpoint is one file of another code's BLIP, which transformers does not load. Its weights have
    to be renamed into a folder of BlipForImageTextRetrieval and a safetensors file of the head.
    """

    architecture = "BlipForImageTextRetrieval"
    unused = ("itm_head.", "vision_proj.", "text_proj.")

    def __init__(
        self,
        *,
        model: str,
        head: str,
        mean: float = MEAN,
        std: PositiveFloat = STD,
        **options: Unpack[PretrainedOptions],
    ) -> None:
        """Load the model and the head.

        Args:
            model, options: see `PretrainedReward`.
            head: safetensors file of linear layers, from the text encoder's width to one value.
            mean, std: of the head's values over its training set.
        """
        super().__init__(model=model, **options)
        self.version += f" tokens={TOKENS}"  # there were as many as BLIP takes
        self._head, self._mean, self._std = self.load_head(head, self.model.config.text_config.hidden_size), mean, std

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """About -2 to 2 with the published weights."""
        import torch

        seen = self.model.vision_model(self.pixels(images)).last_hidden_state
        inputs, rows = self.tokens(prompts, TOKENS)
        read = self.model.text_encoder(
            **{name: values[rows] for name, values in inputs.items()},
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state
        return RewardResult(to_scores((self._head(read[:, 0].float()) - self._mean) / self._std))
