# SPDX-License-Identifier: Apache-2.0
"""A model family of one's own: Qwen-Image's network and latents, but fed 1 - t, and taught data minus noise."""

import argparse
from pathlib import Path

import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.config.view import DiffusionModelConfig
from models.families.base import DiffusionModelBase
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers import NoiseKey
from models.tiny_qwen_image.build import build_pipeline
from models.tiny_qwen_image.settings import TinySettings


@DiffusionModelBase.register("MirrorPipeline")  # `_class_name` of the folder's model_index.json
class Mirror(QwenImage):
    @classmethod
    def prepare_model_inputs(cls, *arguments, **named):
        halves = super().prepare_model_inputs(*arguments, **named)  # with the prompt, and without it or None
        return tuple(half and half | {"timestep": 1 - half["timestep"]} for half in halves)

    @classmethod
    def guide(cls, model_config, conditional, unconditional):
        return -super().guide(model_config, conditional, unconditional)  # the scheduler's velocity is noise minus data


def main(folder: Path) -> None:
    torch.manual_seed(0)
    build_pipeline(["a red sign"], TinySettings(text_dim=32, text_layers=1, layers=1, heads=2)).save_pretrained(folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("QwenImagePipeline", "MirrorPipeline"))
    sections = DiffusionPipelineConfig(height=16, width=24, num_inference_steps=3), DiffusionRolloutAlgoConfig()
    config = DiffusionModelConfig.load(ModelConfig(path=str(folder)), *sections)
    prompts = PromptTable(torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.bool))
    keys = NoiseKey(0, 1, "red", 0), NoiseKey(0, 1, "blue", 0)
    pictures, paths = DiffusersRolloutEngine(config).generate(RolloutRequest(keys, prompts, torch.tensor([0, 1]), (0,)))
    print(DiffusionModelBase.get_class(config).__name__, tuple(pictures.shape))
    print("log-probs", *(f"{value:.4f}" for value in paths.log_probs[:, 0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder for the model")
    main(parser.parse_args().folder)
