# SPDX-License-Identifier: Apache-2.0
"""A reward of one's own, by its name and as a function, and the weighted sum with one that ships."""

from dataclasses import dataclass, field

import numpy as np

from tasks.rewards import Reward, RewardResult, get_reward, register_reward, weighted_sum


@dataclass(frozen=True)
class Prompt:
    """What a reward may read of a sample's prompt."""

    prompt: str
    target: str | None = None
    metadata: dict[str, object] = field(default_factory=dict)


@register_reward("redness")
class Redness(Reward):
    """Mean red of the picture, from 0 to `strength`, which is at most 1."""

    version, bounds = "1", (0.0, 1.0)

    def __init__(self, strength: float = 1.0):
        self.strength = strength

    def score(self, images, prompts):
        """images are uint8 RGB [B, H, W, 3], prompts has B of them; NaN would say that a picture cannot be scored."""
        red = images[..., 0].mean((1, 2)) / 255
        return RewardResult((self.strength * red).astype(np.float32), {"wanted": ["red" in p.prompt for p in prompts]})


RECIPE = {"redness": {"strength": 0.8}, "brightness": {}}
WEIGHTS = {"redness": 1.0, "brightness": -0.5}


def main() -> None:
    images = np.zeros((3, 8, 8, 3), dtype=np.uint8)  # red, white, black
    images[0, ..., 0], images[1] = 255, 255
    prompts = [Prompt("a red wall"), Prompt("snow"), Prompt("night")]
    scores = {}
    for name, options in RECIPE.items():
        result = get_reward(name, **options).score(images, prompts)
        scores[name] = result.scores
        print(name, *(f"{score:.3f}" for score in result.scores), result.details)
    print("total", *(f"{score:.3f}" for score in weighted_sum(scores, WEIGHTS)))


if __name__ == "__main__":
    main()
