"""What passes between rollout and update."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from models.schedulers.noise_keys import NoiseKey


@dataclass(frozen=True)
class PromptTable:
    """Encoded prompts, one row a prompt and not one a sample: embeddings travel once.

    Attributes:
        prompt_embeds: [P, L, D].
        prompt_embeds_mask: [P, L], true at real tokens.
        negative_prompt_embeds: [1, L', D] or None without guidance.
        negative_prompt_embeds_mask: [1, L'] or None.
    """

    prompt_embeds: Tensor
    prompt_embeds_mask: Tensor
    negative_prompt_embeds: Tensor | None = None
    negative_prompt_embeds_mask: Tensor | None = None

    def expand(self, index: Tensor) -> dict[str, Any]:
        """Rows for samples: `index` [B] points into the P prompts; keys as `prepare_model_inputs` names them."""
        batch = len(index)
        negative, negative_mask = self.negative_prompt_embeds, self.negative_prompt_embeds_mask
        return {
            "prompt_embeds": self.prompt_embeds[index],
            "prompt_embeds_mask": self.prompt_embeds_mask[index],
            "negative_prompt_embeds": None if negative is None else negative.expand(batch, -1, -1),
            "negative_prompt_embeds_mask": None if negative_mask is None else negative_mask.expand(batch, -1),
        }

    def to(self, device: torch.device | str) -> "PromptTable":
        """The same table on another device."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: tensor.to(device) for name, tensor in present.items()})


@dataclass(frozen=True)
class RolloutRequest:
    """One batch to sample; it is never split or merged, so that its arithmetic is the same wherever it runs.

    Attributes:
        keys: B noise keys, one a sample.
        prompts: the prompts they use.
        prompt_index: [B], each sample's row in `prompts`.
        window: stochastic steps, ascending and consecutive; empty samples the ODE and records nothing.
    """

    keys: tuple[NoiseKey, ...]
    prompts: PromptTable
    prompt_index: Tensor
    window: tuple[int, ...]


@dataclass(frozen=True)
class Trajectories:
    """B sampled paths, restricted to the window's W steps; fp32, on the CPU.

    Attributes:
        keys: noise key of each sample.
        prompts: the prompts.
        prompt_index: [B], row of each sample's prompt.
        latents: [B, W+1, ...]: x before each step of the window, and x after the last.
        timesteps: [B, W].
        log_probs: [B, W], of the policy that sampled.
    """

    keys: tuple[NoiseKey, ...]
    prompts: PromptTable
    prompt_index: Tensor
    latents: Tensor
    timesteps: Tensor
    log_probs: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, index: Tensor) -> "Trajectories":
        """The samples at `index` [b], with the whole prompt table."""
        return replace(
            self,
            keys=tuple(self.keys[i] for i in index.tolist()),
            prompt_index=self.prompt_index[index],
            latents=self.latents[index],
            timesteps=self.timesteps[index],
            log_probs=self.log_probs[index],
        )

    def to(self, device: torch.device | str) -> "Trajectories":
        """The same samples on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("prompt_index", "latents", "timesteps", "log_probs")}
        return replace(self, prompts=self.prompts.to(device), **moved)
