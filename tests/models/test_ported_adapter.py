# SPDX-License-Identifier: Apache-2.0
"""An adapter in the form that VeRL-Omni documents: its four hooks as they are there, imports changed."""

from pathlib import Path

import numpy as np
import pytest
import torch

import models.families.base
from models.families.base import DiffusionModelBase
from models.families.qwen_image import QwenImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import actor_config, model_config, rollout_request


class Ported(QwenImage):
    """It indexes whole paths, takes the picture's size from the micro-batch, gives a negative half in any case, and
    samples through the reference's names. What is not among the four hooks is the adapter's here."""

    @classmethod
    def build_scheduler(cls, model_config):
        scheduler = FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.local_path, subfolder="scheduler")
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler

    @classmethod
    def set_timesteps(cls, scheduler, model_config, device):
        steps, size = model_config.pipeline.num_inference_steps, model_config.pipeline
        tokens = (size.height // 2 // 2) * (size.width // 2 // 2)
        sigmas = np.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=image_shift(scheduler.config, tokens), device=device)

    @classmethod
    def prepare_model_inputs(
        cls,
        module,
        model_config,
        latents,
        timesteps,
        prompt_embeds,
        prompt_embeds_mask,
        negative_prompt_embeds,
        negative_prompt_embeds_mask,
        micro_batch,
        step,
    ):
        factor = 2 * micro_batch["vae_scale_factor"]
        shape = (1, micro_batch["height"] // factor, micro_batch["width"] // factor)

        def with_text(embeds, mask):
            return {
                "hidden_states": latents[:, step],
                "timestep": timesteps[:, step] / 1000.0,
                "encoder_hidden_states": embeds,
                "encoder_hidden_states_mask": mask,
                "img_shapes": [[shape]] * len(latents),
                "return_dict": False,
            }

        return with_text(prompt_embeds, prompt_embeds_mask), with_text(
            negative_prompt_embeds, negative_prompt_embeds_mask
        )

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        latents, timesteps = scheduler_inputs["all_latents"], scheduler_inputs["all_timesteps"]
        _, log_prob, mean, std_dev_t, sqrt_dt = scheduler.sample_previous_step(
            sample=latents[:, step].float(),
            model_output=module(**model_inputs)[0].float(),
            timestep=timesteps[:, step],
            noise_level=model_config.algo.noise_level,
            prev_sample=latents[:, step + 1].float(),
            sde_type=model_config.algo.sde_type,
            return_logprobs=True,
            return_sqrt_dt=True,
        )
        return log_prob, mean, std_dev_t, sqrt_dt


@pytest.fixture
def ported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as there, for one algorithm; forgotten after the test."""
    monkeypatch.setattr(models.families.base._ADAPTERS, "entries", dict(models.families.base._ADAPTERS.entries))
    DiffusionModelBase.register("QwenImagePipeline", algorithm="flow_grpo")(Ported)


@pytest.mark.usefixtures("ported", "one_rank")
def test_it_samples_and_trains(tiny_model: Path) -> None:
    """Two prompts of one length; the adapter of the project, beside it, samples the same."""

    def sampled(algorithm: str) -> Trajectories:
        rollout = DiffusersRolloutEngine(model_config(tiny_model, algorithm=algorithm))
        return rollout.generate(rollout_request(lengths=(5, 5)))[1]

    trajectories, own = sampled("flow_grpo"), sampled("awm")
    assert torch.allclose(trajectories.latents, own.latents, rtol=0, atol=1e-5)
    engine = DiffusersFSDPEngine(model_config(tiny_model), actor_config())
    engine.initialize()
    assert engine.adapter is Ported
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -1.0, 0.5, -0.5]))], 4)
    first, second = engine.update_policy([batch]), engine.update_policy([batch])
    assert first["ratio_deviation/max"] == 0.0
    assert second["ratio_deviation/max"] > 0.0


@pytest.mark.usefixtures("ported")
def test_the_folders_have_the_references_names(tiny_model: Path) -> None:
    config = model_config(tiny_model, external_lib="helpers")
    assert (config.local_path, config.external_lib) == (str(tiny_model), "helpers")
    folder = Path(config.local_path) / config.transformer_subfolder
    assert config.config_path == str(folder)
    assert (folder / "config.json").is_file()
