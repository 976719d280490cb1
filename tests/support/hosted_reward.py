# SPDX-License-Identifier: Apache-2.0
"""A user's own reward for the HTTP scorer: latents in; details, NaN and both kinds of error out."""

import numpy as np

from tasks.rewards import RewardError, RewardResult


def peculiar(latents, prompts, scale=1.0):
    """Mean of each latent, times `scale`."""
    if not any(prompt.prompt for prompt in prompts):
        raise RewardError("peculiar: no prompt says anything")
    if prompts[0].prompt == "divide":
        raise ZeroDivisionError("division by zero")
    scores = scale * latents.mean(axis=(1, 2))
    levels = np.where(np.isfinite(scores), [prompt.metadata["level"] for prompt in prompts], np.nan)
    return RewardResult(scores, {"target": [prompt.target for prompt in prompts], "level": list(levels)})


peculiar.wants = "latents"
