# SPDX-License-Identifier: Apache-2.0
"""LoRA weights in vLLM-Omni: what the trainer has is what it samples with."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.vllm_omni.engine import RolloutEngineError, VllmOmniRolloutEngine
from models.weights.buckets import buckets
from models.weights.canary import Canary, check_canary
from models.weights.trainable import export_weights, trainable
from tests.support.helpers import model_config, prompt_table, rollout_request

CANARY = Canary(prompt_table((5, 3), 4))
AGREE = 1e-5
"""Low-rank products are added up in another order there: rounding in fp32."""


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> DiffusionModelConfig:
    return model_config(tiny_model, true_cfg_scale=3.0, lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def engine(config: DiffusionModelConfig) -> Iterator[VllmOmniRolloutEngine]:
    running = VllmOmniRolloutEngine(config, VllmOmniConfig(), max_num_seqs=4)
    yield running
    running.shutdown()


def random_lora(oracle: DiffusersRolloutEngine, seed: int) -> dict[str, Tensor]:
    """Both matrices random on every target of the family."""
    generator = torch.Generator().manual_seed(seed)
    named = trainable(oracle.transformer).items()
    return {name: torch.randn(parameter.shape, generator=generator) * 0.2 for name, parameter in named}


def test_lora_weights_of_every_sync_are_the_trainers(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig
) -> None:
    """Packed q, k, v and renamed modules included; a second sync replaces the first; the given tensors stay theirs."""
    oracle, request = DiffusersRolloutEngine(config), rollout_request(negative_length=4)
    velocities = [engine.canary_velocity(CANARY)]
    check_canary(oracle.canary_velocity(CANARY), velocities[0], 0, tolerance=AGREE)
    for seed in (1, 2):
        weights = random_lora(oracle, seed)
        kept = {name: tensor.clone() for name, tensor in weights.items()}
        load = engine.begin_load()
        for bucket in buckets(weights.items(), limit=2_000):
            load.take(bucket)
        load.finish()
        oracle.load_weights(weights)
        assert all(torch.equal(weights[name], kept[name]) for name in kept)
        velocities.append(engine.canary_velocity(CANARY))
        check_canary(oracle.canary_velocity(CANARY), velocities[-1], seed, tolerance=AGREE)
        pictures, trajectories = engine.generate(request)
        expected_pictures, expected = oracle.generate(request)
        torch.testing.assert_close(trajectories.log_probs, expected.log_probs, rtol=0, atol=AGREE)
        assert (pictures.int() - expected_pictures.int()).abs().max() <= 1
    first, second, third = velocities
    assert (second - first).norm() / first.norm() > 1e-2
    assert (third - second).norm() / second.norm() > 1e-2


def test_an_exported_lora_is_the_weights_that_were_exported(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig, tmp_path: Path
) -> None:
    oracle = DiffusersRolloutEngine(config)
    weights = random_lora(oracle, 3)
    export_weights(oracle.adapter, config, weights, tmp_path / "exported")
    engine.load_exported(tmp_path / "exported")
    oracle.load_weights(weights)
    check_canary(oracle.canary_velocity(CANARY), engine.canary_velocity(CANARY), 1, tolerance=AGREE)


def test_a_module_that_the_transformer_holds_twice_gets_its_lora(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(config, model=config.model.model_copy(update={"target_modules": ("img_in",)}))
    monkeypatch.setattr(engine, "model_config", other)
    oracle = DiffusersRolloutEngine(other)
    weights = random_lora(oracle, 4)
    engine.load_weights(weights)
    oracle.load_weights(weights)
    check_canary(oracle.canary_velocity(CANARY), engine.canary_velocity(CANARY), 1, tolerance=AGREE)


def test_lora_of_an_unknown_module_is_an_error(engine: VllmOmniRolloutEngine) -> None:
    weights = {f"blocks.0.to_q.lora_{kind}.default.weight": torch.zeros(4, 4) for kind in "AB"}
    engine.load_weights(weights)  # vLLM-Omni binds them to modules at their first use
    with pytest.raises(RolloutEngineError, match="binding is incomplete"):
        engine.canary_velocity(CANARY)
