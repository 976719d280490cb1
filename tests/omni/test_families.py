# SPDX-License-Identifier: Apache-2.0
"""Every model family in vLLM-Omni: its log-probs are the trainer's, and so are its weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from models.config.vllm_omni import VllmOmniConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.canary import Canary, check_canary
from models.weights.trainable import trainable
from tests.models.families.test_model_conformance import Checkpoint
from tests.support.helpers import actor_config
from tests.support.tiny_models import FAMILIES

FLOOR = 1e-6
"""Largest |difference| of a log-prob to the trainer's. Measured: 0 for Qwen-Image and FLUX, 2.4e-7 for the others."""
AGREE = 1e-5
"""The same for latents and, relative, for velocities: fp32 sums in another order. Measured: up to 3e-6."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(FAMILIES[request.param], tmp_path_factory.mktemp(request.param) / "model", {})


@pytest.fixture
def engine_of(checkpoint: Checkpoint) -> Iterator[Any]:
    """Starts an engine; it is ended with the test, since there can be one a process."""
    started = []

    def start(**settings: Any) -> VllmOmniRolloutEngine:
        config = checkpoint.config(guided=True, **settings)
        started.append(VllmOmniRolloutEngine(config, VllmOmniConfig(), max_num_seqs=6))
        return started[-1]

    yield start
    for engine in started:
        engine.shutdown()


def test_log_probs_and_pictures_are_the_trainers(checkpoint: Checkpoint, engine_of: Any) -> None:
    """Each kernel, with and without guidance, prompts of different lengths; rescored, the first ratio is exactly 1;
    then all weights at once."""
    engine = engine_of()
    for guided in (False, True):
        for sde_type in ("sde", "dance_sde", "cps"):
            config = engine.model_config = checkpoint.config(guided, sde_type=sde_type)
            request = checkpoint.request(guided)
            pictures, trajectories = engine.generate(request)
            expected_pictures, expected = DiffusersRolloutEngine(config).generate(request)
            trainer = DiffusersFSDPEngine(config, actor_config(ppo_micro_batch_size_per_gpu=6))
            trainer.initialize()
            rescored = trainer.rescored(trajectories)
            assert (rescored.log_probs - trajectories.log_probs).abs().max() <= FLOOR, (guided, sde_type)
            if sde_type == "sde":  # what the trainer has scored itself it meets again to the bit
                first = trainer.update_policy([ActorBatch([(rescored, torch.linspace(-1, 1, 6))], 6)])
                assert first["ratio_deviation/max"] == first["pg_clipfrac"] == 0.0
            assert (trajectories.latents - expected.latents).abs().max() <= AGREE
            assert (pictures.int() - expected_pictures.int()).abs().max() <= 1
            assert pictures.float().std() > 1

    oracle = DiffusersRolloutEngine(config)
    changed = {name: parameter.detach() * 1.05 for name, parameter in trainable(oracle.transformer).items()}
    canary = Canary(checkpoint.prompts(["hi"], guided=True))
    before = engine.canary_velocity(canary)
    engine.load_weights(changed)
    oracle.load_weights(changed)
    after = engine.canary_velocity(canary)
    check_canary(oracle.canary_velocity(canary), after, 1, tolerance=AGREE)
    assert (after - before).norm() / before.norm() > 1e-3


def test_lora_weights_are_the_trainers(checkpoint: Checkpoint, engine_of: Any) -> None:
    engine = engine_of(lora_rank=4, lora_alpha=8)
    oracle = DiffusersRolloutEngine(engine.model_config)
    canary = Canary(checkpoint.prompts(["hi"], guided=True))
    before = engine.canary_velocity(canary)
    generator = torch.Generator().manual_seed(1)
    named = trainable(oracle.transformer).items()
    weights = {name: torch.randn(p.shape, generator=generator) * 0.2 for name, p in named}
    engine.load_weights(weights)
    oracle.load_weights(weights)
    after = engine.canary_velocity(canary)
    check_canary(oracle.canary_velocity(canary), after, 1, tolerance=AGREE)
    assert (after - before).norm() / before.norm() > 1e-2
