# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni beside the in-process engine and the trainer: same pictures, same log-probs, same weights."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.vllm_omni.engine import RolloutEngineError, VllmOmniRolloutEngine
from models.rollout.vllm_omni.sample_request import split
from models.training.fsdp import DiffusersFSDPEngine
from models.weights.buckets import buckets
from models.weights.canary import Canary, check_canary
from models.weights.trainable import WeightSyncError, export_weights
from tests.support.helpers import actor_config, model_config, prompt_table, rollout_request
from tests.support.patience import wait_until

FLOOR = 2e-6
"""Largest |difference| of a log-prob to the trainer's: rounding in fp32 of a mean over the latent."""


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> DiffusionModelConfig:
    return model_config(tiny_model, true_cfg_scale=3.0)


@pytest.fixture(scope="module")
def engine(config: DiffusionModelConfig) -> Iterator[VllmOmniRolloutEngine]:
    """One engine with all weights trainable; a test leaves it with the weights it found."""
    running = VllmOmniRolloutEngine(config, VllmOmniConfig(), max_num_seqs=6, sleep_mode=True)
    yield running
    running.shutdown()


def assert_same(pictures: Tensor, others: Tensor) -> None:
    """But for rounding: which samples come into one batch is a matter of time, and with it the order of some sums."""
    assert (pictures.int() - others.int()).abs().max() <= 1


def with_algo(config: DiffusionModelConfig, **changes: Any) -> DiffusionModelConfig:
    return replace(config, algo=config.algo.model_copy(update=changes))


def unguided(config: DiffusionModelConfig) -> DiffusionModelConfig:
    return replace(config, pipeline=config.pipeline.model_copy(update={"true_cfg_scale": 1.0}))


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("guided", [False, True])
def test_pictures_and_log_probs_are_the_in_process_engines_and_the_trainers(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig, sde_type: str, guided: bool
) -> None:
    """Prompts of different lengths in one batch; every kernel; with and without guidance."""
    config = with_algo(config if guided else unguided(config), sde_type=sde_type)
    engine.model_config = config
    request = rollout_request(samples=2, lengths=(5, 3, 7), negative_length=4 if guided else None, record_means=True)
    pictures, trajectories = engine.generate(request)
    expected_pictures, expected = DiffusersRolloutEngine(config).generate(request)
    assert trajectories is not None
    assert expected is not None
    assert trajectories.keys == expected.keys
    assert torch.equal(trajectories.timesteps, expected.timesteps)
    for name in ("latents", "log_probs", "means"):
        torch.testing.assert_close(getattr(trajectories, name), getattr(expected, name), rtol=0, atol=1e-5)
    assert_same(pictures, expected_pictures)
    assert pictures.float().std() > 1

    trainer = DiffusersFSDPEngine(config, actor_config(ppo_micro_batch_size_per_gpu=6))
    trainer.initialize()
    replayed = trainer.rescored(trajectories).log_probs
    assert (replayed - trajectories.log_probs).abs().max() <= FLOOR
    assert trajectories.log_probs.std() > 1e-3


def test_the_same_noise_keys_give_the_same_pictures(engine: VllmOmniRolloutEngine) -> None:
    request = rollout_request(samples=3, negative_length=4)
    again = rollout_request(samples=3, negative_length=4)
    (first, one), (second, other) = engine.generate(request), engine.generate(again)
    assert_same(first, second)
    torch.testing.assert_close(one.latents, other.latents, rtol=0, atol=1e-5)
    moved, others = engine.generate(rollout_request(samples=3, negative_length=4, iteration=1))
    assert (others.latents - one.latents).abs().max() > 0.1
    assert (moved.int() - first.int()).abs().max() > 1


def test_alone_or_in_a_batch_a_sample_is_the_same(engine: VllmOmniRolloutEngine) -> None:
    """Only rounding may differ; eight samples also do not fit into one batch of six."""
    request = rollout_request(samples=4, lengths=(5, 3), negative_length=4)
    _, together = engine.generate(request)
    alone = replace(request, keys=request.keys[5:6], prompt_index=request.prompt_index[5:6])
    _, single = engine.generate(alone)
    torch.testing.assert_close(single.latents[0], together.latents[5], rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_validation_samples_the_ode_at_its_own_settings(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig, solver: str
) -> None:
    own = {"num_inference_steps": 6, "height": 24, "true_cfg_scale": 1.0, "solver": solver}
    pipeline = config.pipeline.model_copy(update=own)
    request = rollout_request(window=())
    pictures, trajectories = engine.generate(request, pipeline)
    expected, _ = DiffusersRolloutEngine(config).generate(request, pipeline)
    assert trajectories is None
    assert pictures.shape == (4, 24, 24, 3)
    assert_same(pictures, expected)


def test_new_weights_arrive_and_the_old_ones_come_back(
    engine: VllmOmniRolloutEngine, config: DiffusionModelConfig, tmp_path: Path
) -> None:
    """Canary, pictures and an exported folder agree with the in-process engine; restored weights are the same bits."""
    engine.model_config = config
    canary, request = Canary(prompt_table((5, 3), 4)), rollout_request(negative_length=4)
    oracle = DiffusersRolloutEngine(config)
    before, (pictures, _) = engine.canary_velocity(canary), engine.generate(request)
    start = {name: parameter.detach().clone() for name, parameter in oracle.transformer.named_parameters()}
    changed = {name: tensor * 1.05 for name, tensor in start.items()}
    load = engine.begin_load()
    for bucket in buckets(changed.items(), limit=20_000):  # q, k and v of a block go into one weight of vLLM-Omni's
        load.take(bucket)
    load.finish()
    oracle.load_weights(changed)
    after = engine.canary_velocity(canary)
    check_canary(oracle.canary_velocity(canary), after, 1, tolerance=1e-5)
    assert (after - before).norm() / before.norm() > 1e-3
    moved, _ = engine.generate(request)
    assert_same(moved, oracle.generate(request)[0])
    assert (moved.int() - pictures.int()).abs().max() > 1

    export_weights(oracle.adapter, config, start, tmp_path / "exported")
    engine.load_exported(tmp_path / "exported")
    assert torch.equal(engine.canary_velocity(canary), before)
    assert_same(engine.generate(request)[0], pictures)


def test_weights_that_are_not_all_are_an_error(engine: VllmOmniRolloutEngine) -> None:
    with pytest.raises(WeightSyncError, match=r"none of the 1 weights is for \d+ of those of vLLM-Omni's QwenImage"):
        engine.load_weights({"blocks.0.weight": torch.zeros(2, 2)})


def test_a_weight_of_another_shape_is_an_error(engine: VllmOmniRolloutEngine) -> None:
    with pytest.raises(RolloutEngineError, match="load_named_weights"):
        engine.load_weights({"proj_out.weight": torch.zeros(3, 5)})


def test_sleep_then_wake_gives_the_same_pictures(engine: VllmOmniRolloutEngine) -> None:
    """Asleep, nothing is sampled: a request would wait. The CPU has no memory to free, so this is about the order."""
    request = rollout_request(negative_length=4)
    pictures, _ = engine.generate(request)
    engine.sleep()
    with pytest.raises(RolloutEngineError, match="asleep"):
        engine.generate(request)
    engine.wake()
    assert_same(engine.generate(request)[0], pictures)


def test_samples_of_one_batch_must_agree(engine: VllmOmniRolloutEngine, config: DiffusionModelConfig) -> None:
    """vLLM-Omni batches by size and steps; the noise level is ours to compare."""
    request = rollout_request(samples=1, negative_length=4)
    mild, strong = with_algo(config, noise_level=0.3), with_algo(config, noise_level=0.9)

    async def both() -> None:
        await engine._order("put_prompts", "table", request.prompts)
        samples = [split(request, "table", one, config.pipeline)[i] for i, one in enumerate((mild, strong))]
        await asyncio.gather(*(engine._sample(sample) for sample in samples))

    with pytest.raises(RolloutEngineError, match=r"algo.noise_level 0.3 and 0.9"):
        # On a busy machine the first one may go alone.
        wait_until(lambda: engine._wait(both()), "a batch that has both", every=0.01)
    assert engine.generate(request)[0].shape[0] == 2


def test_a_table_that_is_not_there(engine: VllmOmniRolloutEngine, config: DiffusionModelConfig) -> None:
    request = rollout_request(samples=1, negative_length=4)
    with pytest.raises(RolloutEngineError, match="prompt table nowhere is not in this worker"):
        engine._wait(engine._sample(split(request, "nowhere", config, config.pipeline)[0]))


def test_a_batch_that_takes_too_long_is_an_error_and_the_engine_goes_on(engine: VllmOmniRolloutEngine) -> None:
    request = rollout_request(negative_length=4)
    patience, engine.settings = engine.settings, engine.settings.model_copy(update={"request_timeout_s": 1e-3})
    with pytest.raises(RolloutEngineError, match=r"request_timeout_s, 0.001 s"):
        engine.generate(request)
    engine.settings = patience
    assert math.isfinite(engine.generate(request)[1].log_probs.mean())


def test_a_batch_is_given_up_also_where_the_engine_hangs(
    engine: VllmOmniRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clean-up asks the engine, too, which does not answer until the batch has ended."""
    request, ask = rollout_request(negative_length=4), engine._engine.collective_rpc

    async def hangs(method: str, *arguments: Any, **named: Any) -> Any:
        if method == "drop_prompts":
            await asyncio.sleep(3600)
        return await ask(method, *arguments, **named)

    patience, engine.settings = engine.settings, engine.settings.model_copy(update={"request_timeout_s": 1e-3})
    monkeypatch.setattr(engine._engine, "collective_rpc", hangs)
    with pytest.raises(RolloutEngineError, match=r"request_timeout_s, 0.001 s"):
        engine.generate(request)
    monkeypatch.undo()
    engine.settings = patience
    assert math.isfinite(engine.generate(request)[1].log_probs.mean())


def test_a_method_that_the_worker_lacks(engine: VllmOmniRolloutEngine) -> None:
    """collective_rpc itself does not raise."""
    with pytest.raises(RolloutEngineError, match="no_such_method"):
        engine._wait(engine._order("no_such_method"))
