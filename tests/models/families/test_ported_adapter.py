# SPDX-License-Identifier: Apache-2.0
"""Adapters in the form that VeRL-Omni documents: three of them, their four hooks as they are there, imports changed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import models.families.base
from models.families.base import DiffusionModelBase
from models.families.qwen_image import QwenImage
from models.families.stable_diffusion_3 import StableDiffusion3
from models.families.z_image import ZImage
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import RolloutRequest, Trajectories
from models.schedulers import FlowMatchSDEDiscreteScheduler
from models.schedulers.shift import image_shift
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import actor_config, model_config, noise_keys, rollout_request
from tests.support.tiny_models import embeddings_of


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


class PortedStableDiffusion3(StableDiffusion3):
    """It guides by two passes of the network, takes the pooled texts from the micro-batch, and gives a triple."""

    @classmethod
    def build_scheduler(cls, model_config):
        scheduler = FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.local_path, subfolder="scheduler")
        cls.set_timesteps(scheduler, model_config, "cpu")
        return scheduler

    @classmethod
    def set_timesteps(cls, scheduler, model_config, device):
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, device=device)
        scheduler.set_begin_index(0)

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
        common = {"hidden_states": latents[:, step], "timestep": timesteps[:, step], "return_dict": False}
        positive = common | {
            "encoder_hidden_states": prompt_embeds,
            "pooled_projections": micro_batch["pooled_prompt_embeds"],
        }
        if negative_prompt_embeds is None:
            return positive, None
        return positive, common | {
            "encoder_hidden_states": negative_prompt_embeds,
            "pooled_projections": micro_batch["negative_pooled_prompt_embeds"],
        }

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        noise_pred = module(**model_inputs)[0].float()
        if negative_model_inputs is not None:
            empty = module(**negative_model_inputs)[0].float()
            noise_pred = empty + model_config.pipeline.guidance_scale * (noise_pred - empty)
        return ported_step(scheduler, model_config, noise_pred, scheduler_inputs, step)


class PortedZImage(ZImage):
    """Its network takes and gives lists, a sample each, which it stacks again; it predicts the other way round."""

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
        captions = [row[kept.bool()] for row, kept in zip(prompt_embeds, prompt_embeds_mask, strict=True)]
        pictures = list(latents[:, step].unsqueeze(2).unbind(dim=0))
        time = (1000 - timesteps[:, step]) / 1000
        return {"x": pictures, "t": time, "cap_feats": captions, "return_dict": False}, None

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        noise_pred = -torch.stack([sample.float() for sample in module(**model_inputs)[0]]).squeeze(2)
        return ported_step(scheduler, model_config, noise_pred, scheduler_inputs, step)


def ported_step(scheduler, model_config, noise_pred, scheduler_inputs, step):
    """What each of theirs ends with: (log_prob, prev_sample_mean, std_dev_t)."""
    latents, timesteps = scheduler_inputs["all_latents"], scheduler_inputs["all_timesteps"]
    _, log_prob, mean, std_dev_t = scheduler.sample_previous_step(
        sample=latents[:, step].float(),
        model_output=noise_pred,
        timestep=timesteps[:, step],
        noise_level=model_config.algo.noise_level,
        prev_sample=latents[:, step + 1].float(),
        sde_type=model_config.algo.sde_type,
        return_logprobs=True,
    )
    return log_prob, mean, std_dev_t


@pytest.fixture
def ported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as there, for one algorithm; forgotten after the test."""
    monkeypatch.setattr(models.families.base._ADAPTERS, "entries", dict(models.families.base._ADAPTERS.entries))
    DiffusionModelBase.register("QwenImagePipeline", algorithm="flow_grpo")(Ported)
    DiffusionModelBase.register("StableDiffusion3Pipeline", algorithm="flow_grpo")(PortedStableDiffusion3)
    DiffusionModelBase.register("ZImagePipeline", algorithm="flow_grpo")(PortedZImage)


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


@pytest.mark.usefixtures("ported", "one_rank")
@pytest.mark.parametrize(
    ("family", "adapter", "settings"),
    [
        ("stable_diffusion_3", PortedStableDiffusion3, {"guidance_scale": 2.0}),
        ("z_image", PortedZImage, {}),
    ],
)
def test_adapters_of_other_families_replay_and_train(
    tiny_folder: Callable[[str], Path], family: str, adapter: type, settings: dict[str, float]
) -> None:
    """Beside the project's own adapter, which samples: the same weights, and so nearly the same log-probs."""
    config = model_config(tiny_folder(family), **settings)
    prompts = embeddings_of(config, (5, 5), negative_length=5 if settings else None)
    request = RolloutRequest(noise_keys(2, 2), prompts, torch.tensor([0, 0, 1, 1]), window=(0, 1))
    _, trajectories = DiffusersRolloutEngine(config).generate(request)
    assert trajectories is not None
    engine = DiffusersFSDPEngine(config, actor_config())
    engine.initialize()
    assert engine.adapter is adapter
    rescored = engine.rescored(trajectories).log_probs
    torch.testing.assert_close(rescored, trajectories.log_probs, rtol=1e-5, atol=1e-5)
    steps = trajectories.timesteps[:, 0]
    *_, sqrt_dt = engine.scheduler.sample_previous_step(
        trajectories.latents[:, 0],
        trajectories.latents[:, 0],
        steps,
        prev_sample=trajectories.latents[:, 1],
        return_sqrt_dt=True,
    )
    assert torch.equal(engine.scheduler.sqrt_dt(steps), sqrt_dt)
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -1.0, 0.5, -0.5]))], 4)
    first, second = engine.update_policy([batch]), engine.update_policy([batch])
    assert first["ratio_deviation/max"] < 1e-4
    assert second["ratio_deviation/max"] > 1e-4


@pytest.mark.usefixtures("ported", "one_rank")
@pytest.mark.parametrize("family", ["stable_diffusion_3", "z_image"])
def test_what_adapters_of_other_families_do_not_cast_is_cast_where_bf16_computes_over_fp32(
    tiny_folder: Callable[[str], Path], family: str
) -> None:
    config = model_config(tiny_folder(family))
    request = RolloutRequest(noise_keys(1, 2), embeddings_of(config, (5,)), torch.tensor([0, 0]), window=(0, 1))
    _, trajectories = DiffusersRolloutEngine(config).generate(request)
    assert trajectories is not None
    engine = DiffusersFSDPEngine(config, actor_config(param_dtype="bfloat16"))
    engine.initialize()
    apart = (engine.rescored(trajectories).log_probs - trajectories.log_probs).abs().max()
    assert 0 < apart < 0.01


@pytest.mark.usefixtures("ported")
def test_the_folders_have_the_references_names(tiny_model: Path) -> None:
    config = model_config(tiny_model, external_lib="helpers")
    assert (config.local_path, config.external_lib) == (str(tiny_model), "helpers")
    folder = Path(config.local_path) / config.transformer_subfolder
    assert config.config_path == str(folder)
    assert (folder / "config.json").is_file()
