# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni on one GPU beside the in-process engine there.

Skipped without CUDA or vLLM-Omni. On a GPU machine: `python -m pytest tests/gpu/test_vllm_omni_on_cuda.py -s`.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rollout import replay_distance
from models.config.vllm_omni import VllmOmniConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.weights.canary import Canary, check_canary
from models.weights.trainable import trainable
from tests.support.helpers import model_config, prompt_table, rollout_request

LACKING = [name for name in ("vllm", "vllm_omni") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
    pytest.mark.skipif(bool(LACKING), reason="vLLM-Omni is not installed here"),
]

LARGEST = {"float32": 1e-5, "bfloat16": 5e-3}
"""Largest |difference| of a log-prob to the one of diffusers' forward."""
VELOCITY = {"float32": 1e-4, "bfloat16": 3e-2}
"""The same, relative, for the canary's velocity."""


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts engines and ends them: there can be one a process."""
    from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine

    started = []

    def engine(config: Any) -> VllmOmniRolloutEngine:
        settings = VllmOmniConfig(attention_backend="TORCH_SDPA", request_timeout_s=300)
        started.append(VllmOmniRolloutEngine(config, settings, max_num_seqs=8, sleep_mode=True))
        return started[-1]

    yield engine
    for one in started:
        one.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_samples_weights_and_sleep(tiny_model: Path, start: Any, dtype: str, lora_rank: int) -> None:
    config = model_config(tiny_model, dtype=dtype, lora_rank=lora_rank, true_cfg_scale=3.0)
    engine, oracle = start(config), DiffusersRolloutEngine(config, "cuda")
    generator = torch.Generator().manual_seed(1)
    if lora_rank:
        named = trainable(oracle.transformer).items()
        weights = {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in named}
    else:
        weights = {name: p.detach().cpu() * 1.05 for name, p in oracle.transformer.named_parameters()}
    engine.load_weights(weights)
    oracle.load_weights(weights)
    canary = Canary(prompt_table((5, 3), 4))
    difference = check_canary(oracle.canary_velocity(canary), engine.canary_velocity(canary), 1, VELOCITY[dtype])

    request = rollout_request(samples=4, negative_length=4)
    pictures, trajectories = engine.generate(request)
    assert pictures.shape == (8, 16, 24, 3)
    distance = replay_distance(oracle, trajectories, config.pipeline)
    print(f"{dtype} LoRA {lora_rank}: canary {difference:.3g}, log-probs {distance}")
    assert distance["max"] <= LARGEST[dtype]

    engine.sleep()
    engine.wake()
    assert torch.equal(engine.generate(request)[0], pictures)
