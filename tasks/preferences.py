"""Preference pairs of a model's own: sample it, score the pictures, keep each prompt's best and worst."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from models.base import DiffusionModelConfig
from models.config import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig, ModelConfig
from models.engines.diffusers_rollout import DiffusersRolloutEngine
from models.engines.trajectories import RolloutRequest
from models.schedulers.noise_keys import NoiseKey
from tasks.dataset import Prompt, PromptEmbeddings
from tasks.pairs import best_and_worst
from tasks.rewards import get_reward
from tasks.rollout import prompt_table


def sampled_preferences(
    model: Path,
    embeddings: Path,
    prompts: Sequence[Prompt],
    *,
    reward: str,
    images_per_prompt: int,
    height: int,
    width: int,
    steps: int,
    batch_size: int,
    seed: int,
) -> pd.DataFrame:
    """The preference table of `tasks.pairs` for these prompts; one whose pictures are all worth the same gives no pair.

    Args:
        model: folder in diffusers format.
        embeddings: folder of the `embeddings` stage.
        reward: name of a registered reward.
        images_per_prompt, height, width, steps, batch_size, seed: see `PreferencesParams`.
    """
    pipeline = DiffusionPipelineConfig(height=height, width=width, num_inference_steps=steps)
    config = DiffusionModelConfig.load(ModelConfig(path=str(model)), pipeline, DiffusionRolloutAlgoConfig())
    scorer, store = get_reward(reward), PromptEmbeddings.open(embeddings)
    engine = DiffusersRolloutEngine(config)
    tables = []
    for start in tqdm(range(0, len(prompts), batch_size), desc="preferences", unit="batch"):
        part = prompts[start : start + batch_size]
        keys = tuple(NoiseKey(seed, 0, prompt.uid, i) for prompt in part for i in range(images_per_prompt))
        rows = torch.arange(len(part)).repeat_interleave(images_per_prompt)
        table = prompt_table(store, [prompt.uid for prompt in part], needs_negative=False)
        pictures = engine.generate(RolloutRequest(keys, table, rows, window=()))[0].numpy()
        scores = scorer(pictures, [prompt for prompt in part for _ in range(images_per_prompt)]).scores
        tables.append(
            best_and_worst([prompt.prompt for prompt in part], pictures, np.asarray(scores), images_per_prompt)
        )
    return pd.concat(tables, ignore_index=True)
