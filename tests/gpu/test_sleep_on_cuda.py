# SPDX-License-Identifier: Apache-2.0
"""A sleeping rollout engine gives its weights' memory back, and samples the same pictures afterwards.

At the size of Stable Diffusion 3.5 medium, random weights. Skipped without CUDA. On a GPU machine:
`python -m pytest tests/gpu/test_sleep_on_cuda.py -s`.
"""

import gc
import importlib.util
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.rollout import build, request_of, settings_of
from models.config.vllm_omni import VllmOmniConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.weights.host_copies import HostCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

MODEL, GIB = "sd3.5-medium", 2**30
LACKS_VLLM = importlib.util.find_spec("vllm_omni") is None
ENGINES = [
    "diffusers",
    pytest.param("vllm_omni", marks=pytest.mark.skipif(LACKS_VLLM, reason="vLLM-Omni is not installed here")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in diffusers format."""
    made = tmp_path_factory.mktemp("model") / "model"
    build(MODEL, made, "cuda")
    return made


@pytest.fixture
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """An engine of the parametrised kind."""
    config = settings_of(MODEL, folder, 512, lora=False)
    if request.param == "diffusers":
        yield DiffusersRolloutEngine(config, "cuda")
        return
    from models.rollout.vllm_omni.engine import VllmOmniRolloutEngine

    started = VllmOmniRolloutEngine(config, VllmOmniConfig(request_timeout_s=300), max_num_seqs=4, sleep_mode=True)
    yield started
    started.shutdown()


def used() -> float:
    """GiB of the GPU's memory, by whoever; what nothing refers to any more is given back first."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def bytes_in_bf16(file: Path) -> int:
    """Of the tensors in a file, once they are loaded."""
    with safe_open(file, "pt") as stored:
        return 2 * sum(math.prod(stored.get_slice(name).get_shape()) for name in stored.keys())  # noqa: SIM118


def test_the_hosts_memory_is_locked_while_weights_have_it_and_free_afterwards() -> None:
    """Memory that is given back while it is locked makes whatever has it next fail."""
    for turn in range(2):
        module = torch.nn.Linear(4096, 4096, device="cuda")
        before = module.weight.detach().clone()
        copies = HostCopies([module])
        copies.leave()
        assert module.weight.is_pinned(), turn
        copies.come_back("cuda")
        assert torch.equal(module.weight, before)
        del module, copies
        gc.collect()
        again = torch.empty(4096, 4096).copy_(before)
        assert not again.is_pinned()
        assert torch.equal(again.cuda(), before)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_weights_leave_the_gpu_and_come_back(folder: Path, engine: Any) -> None:
    request = request_of(settings_of(MODEL, folder, 512, lora=False), 4, with_negative=False)
    pictures, before = engine.generate(request)
    weights = sum(map(bytes_in_bf16, folder.rglob("*.safetensors"))) / GIB
    awake = used()
    for _ in range(2):  # frozen weights go to the host the first time alone
        began = time.monotonic()
        engine.sleep()
        asleep, slept = used(), time.monotonic() - began
        assert awake - asleep > 0.95 * weights
        engine.wake()
        seconds = f"{slept:.2f} s there, {time.monotonic() - began - slept:.2f} s back"
        print(f"{type(engine).__name__}: weights {weights:.2f} GiB, awake {awake:.2f}, asleep {asleep:.2f}, {seconds}")
        again, after = engine.generate(request)
        assert torch.equal(again, pictures)
        assert torch.equal(after.log_probs, before.log_probs)


def test_weights_that_are_loaded_anew_leave_nothing_behind(folder: Path) -> None:
    engine = DiffusersRolloutEngine(settings_of(MODEL, folder, 512, lora=False), "cuda")
    request = request_of(settings_of(MODEL, folder, 512, lora=False), 4, with_negative=False)
    pictures, _ = engine.generate(request)
    policy = {name: weight.detach().cpu() for name, weight in engine.held_weights().items()}
    awake = used()
    began = time.monotonic()
    engine.sleep(with_policy=False)
    asleep, slept = used(), time.monotonic() - began
    assert awake - asleep > 0.95 * sum(weight.nbytes for weight in policy.values()) / GIB
    engine.wake()
    print(f"asleep {asleep:.2f} GiB, {slept:.2f} s there, {time.monotonic() - began - slept:.2f} s back")
    assert all(weight.isnan().all() for weight in engine.held_weights().values())
    engine.load_weights(policy)
    again, _ = engine.generate(request)
    assert torch.equal(again, pictures)
