# SPDX-License-Identifier: Apache-2.0
"""A model family of one's own: all hooks that every family writes, for a denoiser of one linear layer."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from models.config.algo import DiffusionRolloutAlgoConfig
from models.config.model import ModelConfig
from models.config.pipeline import DiffusionPipelineConfig
from models.config.view import DiffusionModelConfig
from models.families.base import DiffusionModelBase, select_step
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers import FlowMatchSDEDiscreteScheduler, NoiseKey


class Denoiser(nn.Module):
    """v = W x + text, of latents [B, 3, h, w]."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)

    def forward(self, hidden_states, text):
        return (self.mix(hidden_states) + text.mean((1, 2))[:, None, None, None],)


@DiffusionModelBase.register("ToyPipeline")
class Toy(DiffusionModelBase):
    """Latents are the picture itself, [B, 3, H, W], from -1 to 1."""

    @classmethod
    def latent_shape(cls, model_config):
        return 3, model_config.pipeline.height, model_config.pipeline.width

    @classmethod
    def set_timesteps(cls, scheduler, model_config, device):
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, device=device)

    @classmethod
    def prepare_model_inputs(cls, module, model_config, latents, timesteps, *, prompt_embeds, step, **unread):
        latent, _ = select_step(latents, timesteps, step)
        return {"hidden_states": latent, "text": prompt_embeds}, None  # the toy reads no time and is not guided

    @classmethod
    def guide(cls, model_config, conditional, unconditional):
        return conditional.float()

    @classmethod
    def decode(cls, vae, model_config, latents):
        return ((latents.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)

    @classmethod
    def encode(cls, vae, model_config, images):
        return images.permute(0, 3, 1, 2) / 127.5 - 1

    @classmethod
    def encode_prompts(cls, pipeline, prompts, max_sequence_length):
        lengths = torch.tensor(cls.prompt_lengths(pipeline, prompts))
        mask = torch.arange(max_sequence_length) < lengths[:, None]
        return {"prompt_embeds": mask[..., None].float(), "prompt_embeds_mask": mask}

    @classmethod
    def prompt_lengths(cls, pipeline, prompts):
        return [len(prompt) for prompt in prompts]

    @classmethod
    def load_transformer(cls, model_config, dtype):  # inherited: the folder's weights, by diffusers
        return Denoiser().to(dtype)

    @classmethod
    def load_vae(cls, model_config):
        return nn.Identity()

    @classmethod
    def build_scheduler(cls, model_config):
        scheduler = FlowMatchSDEDiscreteScheduler(shift=3.0)
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler


def main(folder: Path) -> None:
    (folder / "vae").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    (folder / "vae" / "config.json").write_text(json.dumps({"scale_factor_spatial": 1}))
    torch.manual_seed(0)
    sections = DiffusionPipelineConfig(height=8, width=8, num_inference_steps=3), DiffusionRolloutAlgoConfig()
    config = DiffusionModelConfig.load(ModelConfig(path=str(folder)), *sections)
    prompts = PromptTable.of(Toy.encode_prompts(None, ["red", "blue"], 8))
    request = RolloutRequest((NoiseKey(0, 1, "r", 0), NoiseKey(0, 1, "b", 0)), prompts, torch.tensor([0, 1]), (0,))
    pictures, paths = DiffusersRolloutEngine(config).generate(request)
    print(DiffusionModelBase.get_class(config).__name__, tuple(pictures.shape))
    print("log-probs", *(f"{value:.4f}" for value in paths.log_probs[:, 0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))  # a new folder for the model's config files
