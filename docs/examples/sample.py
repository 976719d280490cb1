# SPDX-License-Identifier: Apache-2.0
"""Sample pictures with a tiny random Qwen-Image, and the log-prob of every stochastic step."""

import argparse

import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.config.view import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers import NoiseKey
from models.tiny_qwen_image.build import build_pipeline
from models.tiny_qwen_image.settings import TinySettings


def main(folder: str) -> None:
    torch.manual_seed(0)  # of the weights and the embeddings; the noise has keys of its own
    build_pipeline(["a red sign"], TinySettings(text_dim=32, text_layers=1, layers=1, heads=2)).save_pretrained(folder)
    config = DiffusionModelConfig.load(
        ModelConfig(path=folder),
        DiffusionPipelineConfig(height=16, width=24, num_inference_steps=4),
        DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7),
    )
    prompts = PromptTable(torch.randn(1, 5, 32), torch.ones(1, 5, dtype=torch.bool))
    keys = tuple(NoiseKey(seed=0, iteration=1, prompt_uid="red", sample_index=i) for i in range(3))
    request = RolloutRequest(keys, prompts, prompt_index=torch.tensor([0, 0, 0]), window=(0, 1))
    pictures, paths = DiffusersRolloutEngine(config).generate(request)
    print("pictures", tuple(pictures.shape), pictures.dtype)  # [B, H, W, 3]
    print("latents", tuple(paths.latents.shape))  # [B, W+1, S, C]: before each step of the window, and after the last
    for key, log_probs in zip(keys, paths.log_probs, strict=True):  # [B, W]
        print("sample", key.sample_index, "log-probs", *(f"{value:.4f}" for value in log_probs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a new folder for the model")
    main(parser.parse_args().folder)
