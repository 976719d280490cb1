# SPDX-License-Identifier: Apache-2.0
"""Rewards by a CLIP model: likeness of picture and prompt, human preference, aesthetic heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
from pydantic import PositiveFloat

from tasks.rewards.base import RewardResult, register_reward
from tasks.rewards.pretrained import LoadingOptions, PretrainedOptions, PretrainedReward, to_scores
from tasks.rewards.scored_prompt import ScoredPrompt

if TYPE_CHECKING:
    from torch import Tensor


class ClipReward(PretrainedReward):
    """A CLIPModel, whose embeddings have length 1 and are float32, whatever its forward has.

    In bfloat16 a cosine of .2 is exact to .001 alone, a quarter of what pictures of a group differ by.
    """

    architecture = "CLIPModel"

    def arithmetic(self, dtype: str) -> str:
        """As given, and the cosine's where that is another."""
        return dtype if dtype == "float32" else f"{dtype} cosine=float32"

    def image_embeds(self, images: np.ndarray | Sequence[np.ndarray]) -> "Tensor":
        """[B, D]."""
        found = self.model.get_image_features(self.pixels(images)).pooler_output.float()
        return found / found.norm(dim=-1, keepdim=True)

    def text_embeds(self, prompts: Sequence[ScoredPrompt]) -> "Tensor":
        """[B, D]; each different prompt is encoded once."""
        inputs, rows = self.tokens(prompts)
        found = self.model.get_text_features(**inputs).pooler_output.float()
        return (found / found.norm(dim=-1, keepdim=True))[rows]

    def cosine(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> "Tensor":
        """Cosine [B] of picture and prompt."""
        return (self.image_embeds(images) * self.text_embeds(prompts)).sum(-1)


@register_reward("clip_score")
class ClipScore(ClipReward):
    """Cosine of the embeddings of picture and prompt (CLIPScore, arXiv 2104.08718, without its factor 2.5)."""

    def __init__(self, *, model: str = "openai/clip-vit-large-patch14", **options: Unpack[PretrainedOptions]) -> None:
        """Load the model.

        Args:
            model, options: see `PretrainedReward`.
        """
        super().__init__(model=model, **options)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """In [-1, 1]; of good pictures about 0.3."""
        return RewardResult(to_scores(self.cosine(images, prompts)))


@register_reward("hps")
class HumanPreferenceScore(ClipReward):
    """Cosine of a CLIPModel that was trained on human choices (HPSv2, arXiv 2306.09341); about 0.2 to 0.35.

    HPSv2 itself is published for open_clip: `model` must be a conversion of it, or any CLIP trained likewise.
    """

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """In [-1, 1]."""
        return RewardResult(to_scores(self.cosine(images, prompts)))


@register_reward("pickscore")
class PickScore(ClipReward):
    """Cosine times the model's own logit scale (PickScore, arXiv 2305.01569), divided by `divide_by`.

    The scale is of the power that the files hold: rounded to bfloat16, PickScore_v1's 100 would be 98.9.
    """

    kept_in_fp32 = ("logit_scale",)

    def arithmetic(self, dtype: str) -> str:
        """That of the scale, too."""
        return dtype if dtype == "float32" else f"{super().arithmetic(dtype)} scale=float32"

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divide_by: PositiveFloat = 1.0,
        **options: Unpack[LoadingOptions],
    ) -> None:
        """Load the model with the other one's processor.

        Args:
            model, processor, options: see `PretrainedReward`. PickScore_v1 uses another model's processor; null is
                the model's own.
            divide_by: 26 gives about 0.7 to 1, Flow-GRPO's scale.
        """
        super().__init__(model=model, processor=processor, **options)
        self._divide_by = divide_by

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """About 18 to 24 undivided."""
        scale = self.model.logit_scale.float().exp() / self._divide_by
        return RewardResult(to_scores(scale * self.cosine(images, prompts)))


@register_reward("aesthetic")
class AestheticScore(ClipReward):
    """A head on the picture's embedding: how pleasing, 1 to 10 with LAION's predictors. The prompt does not matter."""

    unused = ("text_model.", "text_projection.", "logit_scale")

    def __init__(
        self, *, head: str, model: str = "openai/clip-vit-large-patch14", **options: Unpack[PretrainedOptions]
    ) -> None:
        """Load the model and the head.

        Args:
            head: safetensors file of linear layers, from the embedding to one value: LAION's linear head, or the five
                layers of its improved predictor.
            model, options: see `PretrainedReward`; the head must have been trained on this model's embeddings.
        """
        super().__init__(model=model, **options)
        self._head = self.load_head(head, self.model.config.projection_dim)

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """What the head says."""
        return RewardResult(to_scores(self._head(self.image_embeds(images))))


@register_reward("clip_preference")
class ClipPreference(ClipReward):
    """A preference head on the embeddings of picture and prompt, one after the other: (head - mean) / std."""

    def __init__(
        self,
        *,
        model: str,
        head: str,
        mean: float = 0.0,
        std: PositiveFloat = 1.0,
        **options: Unpack[PretrainedOptions],
    ) -> None:
        """Load the model and the head.

        Args:
            model, options: see `PretrainedReward`.
            head: safetensors file of linear layers, from twice the embedding's width to one value.
            mean, std: of the head's values over its training set, to bring rewards to a common scale.
        """
        super().__init__(model=model, **options)
        self._head, self._mean, self._std = self.load_head(head, 2 * self.model.config.projection_dim), mean, std

    def score(self, images: np.ndarray, prompts: Sequence[ScoredPrompt]) -> RewardResult:
        """What the head says, standardised."""
        import torch

        both = torch.cat([self.image_embeds(images), self.text_embeds(prompts)], dim=1)
        return RewardResult(to_scores((self._head(both) - self._mean) / self._std))
