# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's step execution: the same pictures and paths as by whole batches, also where requests do not agree."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config.vllm_omni import VllmOmniConfig
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.rollout.vllm_omni.engine import RolloutEngineError, VllmOmniRolloutEngine
from models.rollout.vllm_omni.sample_request import split
from models.samples.trajectories import LATENTS, PICTURES, Generated, RolloutRequest
from tests.models.families.test_model_conformance import Checkpoint
from tests.support.helpers import model_config, rollout_request
from tests.support.tiny_models import FAMILIES

NEAR = 1e-5
"""Largest |difference| of latents: samples meet in other batches than in request mode, and sums round otherwise."""


@pytest.fixture
def engine_of() -> Iterator[Callable[..., VllmOmniRolloutEngine]]:
    """Starts an engine; there can be one a process."""
    started: list[VllmOmniRolloutEngine] = []

    def start(config: DiffusionModelConfig, step_execution: bool) -> VllmOmniRolloutEngine:
        while started:
            started.pop().shutdown()
        settings = VllmOmniConfig(step_execution=step_execution)
        started.append(VllmOmniRolloutEngine(config, settings, max_num_seqs=6, sleep_mode=True))
        return started[0]

    yield start
    started.pop().shutdown()


def assert_alike(one: Generated, other: Generated) -> None:
    assert (one.pictures.int() - other.pictures.int()).abs().max() <= 1
    assert one.pictures.float().std() > 1
    torch.testing.assert_close(one.latents, other.latents, rtol=0, atol=NEAR)
    for name in ("latents", "means", "unconditional", "timesteps"):
        mine, theirs = getattr(one.recorded, name), getattr(other.recorded, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine - theirs).abs().max() <= NEAR, name
    torch.testing.assert_close(one.recorded.log_probs, other.recorded.log_probs, rtol=0, atol=1e-6)
    assert one.finite.all()
    assert other.finite.all()


def everything(request: RolloutRequest) -> RolloutRequest:
    """The request with all that can be recorded."""
    outputs = frozenset({PICTURES, LATENTS})
    return replace(request, record_means=True, record_unconditional=True, outputs=outputs)


@pytest.mark.parametrize("name", ["z_image", "wan"])
def test_pictures_and_paths_of_other_families(engine_of: Any, name: str, tmp_path: Path) -> None:
    """A window in the middle, with guidance, beside the in-process engine; the other families differ from Qwen-Image
    in nothing that steps see."""
    checkpoint = Checkpoint(FAMILIES[name], tmp_path / "model", {})
    config = checkpoint.config(guided=True)
    request = everything(checkpoint.request(guided=True, samples=1, window=(1, 2)))
    assert_alike(
        engine_of(config, step_execution=True).produce(request), DiffusersRolloutEngine(config).produce(request)
    )


def test_halves_that_are_recorded_are_computed_apart(engine_of: Any, tmp_path: Path) -> None:
    """As in whole batches, to the bit: an update that takes the recorded half computes the other one alone.

    Of one sample: several come together as they arrive, and passes of other sizes round otherwise.
    """
    checkpoint = Checkpoint(FAMILIES["z_image"], tmp_path / "model", {})
    config, request = checkpoint.config(guided=True), _only(everything(checkpoint.request(guided=True, samples=1)), 0)
    whole, stepwise = (engine_of(config, step_execution).produce(request).recorded for step_execution in (False, True))
    assert torch.equal(stepwise.unconditional, whole.unconditional)
    assert torch.equal(stepwise.log_probs, whole.log_probs)


def test_pictures_and_paths_are_those_of_whole_batches(engine_of: Any, tiny_model: Path) -> None:
    config, request = model_config(tiny_model, true_cfg_scale=3.0), everything(rollout_request(negative_length=4))
    whole, stepwise = (engine_of(config, step_execution).produce(request) for step_execution in (False, True))
    assert_alike(stepwise, whole)


@pytest.mark.parametrize("step_execution", [False, True])
def test_a_sample_that_is_not_finite_is_told(engine_of: Any, tiny_model: Path, step_execution: bool) -> None:
    request = rollout_request(samples=2, lengths=(5, 3))
    request.prompts.prompt_embeds[1] = torch.nan
    made = engine_of(model_config(tiny_model), step_execution).produce(request)
    assert made.finite.tolist() == (request.prompt_index != 1).tolist()


@pytest.fixture
def engine(engine_of: Any, tiny_model: Path) -> VllmOmniRolloutEngine:
    return engine_of(model_config(tiny_model, true_cfg_scale=3.0), step_execution=True)


def test_requests_that_do_not_agree_come_together(engine: VllmOmniRolloutEngine) -> None:
    """Other windows, noise levels, numbers of steps and guidance; request mode refuses the first two in one
    batch."""
    own = engine.model_config
    mild = replace(own, algo=own.algo.model_copy(update={"noise_level": 0.3}))
    longer = replace(own, pipeline=own.pipeline.model_copy(update={"num_inference_steps": 6}))
    unguided = replace(own, pipeline=own.pipeline.model_copy(update={"true_cfg_scale": 1.0}))
    configs = [own, mild, longer, unguided]
    windows = [(0, 1), (2,), (1, 3), (0, 2)]
    requests = [everything(rollout_request(samples=1, window=window, negative_length=4)) for window in windows]

    async def all_at_once() -> list[Any]:
        await engine._order("put_prompts", "table", requests[0].prompts)
        samples = [
            split(request, "table", config, config.pipeline)[number % 2]
            for number, (request, config) in enumerate(zip(requests, configs, strict=True))
        ]
        return await asyncio.gather(*(engine._sample(sample) for sample in samples))

    answers = engine._wait(all_at_once())
    for number, (answer, request, config) in enumerate(zip(answers, requests, configs, strict=True)):
        row = number % 2
        expected = DiffusersRolloutEngine(config).produce(_only(request, row))
        torch.testing.assert_close(answer.trajectory_latents, expected.recorded.latents, rtol=0, atol=NEAR)
        torch.testing.assert_close(answer.trajectory_log_probs, expected.recorded.log_probs, rtol=0, atol=1e-6)
        pictures, latents, *_ = answer.trajectory_decoded
        assert (pictures.int() - expected.pictures.int()).abs().max() <= 1
        torch.testing.assert_close(latents, expected.latents, rtol=0, atol=NEAR)


def _only(request: RolloutRequest, row: int) -> RolloutRequest:
    return replace(request, keys=request.keys[row : row + 1], prompt_index=request.prompt_index[row : row + 1])


def test_an_error_of_one_request_ends_no_other(engine: VllmOmniRolloutEngine) -> None:
    request = rollout_request(samples=1, negative_length=4)
    with pytest.raises(RolloutEngineError, match="prompt table nowhere is not in this worker"):
        engine._wait(engine._sample(split(request, "nowhere", engine.model_config, engine.model_config.pipeline)[0]))
    pictures, _ = engine.generate(request)
    engine.sleep()
    engine.wake()
    again, _ = engine.generate(request)
    assert (again.int() - pictures.int()).abs().max() <= 1  # another number of requests at a step rounds otherwise
