# SPDX-License-Identifier: Apache-2.0
"""Peaks per stage as the actors measure them, and the estimate beside them. Skipped without CUDA."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelBase
from models.families.velocity import velocity_field
from models.runtime.recomputation import recomputed
from models.weights.trainable import make_trainable
from tasks.actors.memory import measures_gpu_memory, peaks_since_last_time
from tests.support.helpers import model_config
from tests.support.tiny_models import embeddings_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

MIB = 2**20


class Actor:
    """What a group's actor is to the decorator."""

    kept: torch.Tensor

    @measures_gpu_memory("load")
    def __init__(self) -> None:
        self.kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")

    @measures_gpu_memory("work")
    def work(self, megabytes: int) -> None:
        torch.empty(megabytes * MIB, dtype=torch.uint8, device="cuda")

    @measures_gpu_memory("work")
    def fail(self) -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        raise RuntimeError("after the allocation")


def test_a_stage_is_measured_by_itself_and_the_largest_call_counts() -> None:
    before = torch.cuda.memory_allocated()
    actor = Actor()
    actor.work(128)
    actor.work(64)
    peaks = peaks_since_last_time(actor)
    assert {stage: (peak.taken - before) // MIB for stage, peak in peaks.items()} == {"load": 32, "work": 160}
    assert all(peak.kept >= peak.taken for peak in peaks.values())
    assert peaks_since_last_time(actor) == {}
    with pytest.raises(RuntimeError, match="after"):
        actor.fail()
    assert (peaks_since_last_time(actor)["work"].taken - before) // MIB == 288


def test_what_is_in_use_of_a_gpu_counts_every_program() -> None:
    """Of this one, the tensors; its context is there before."""
    pytest.importorskip("ray")
    from tasks.system.gpu_memory import gpu_memory_in_use

    small = torch.zeros(1, device="cuda")
    uuid = str(torch.cuda.get_device_properties(small.device).uuid)
    (before,) = gpu_memory_in_use([uuid])
    large = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
    (after,) = gpu_memory_in_use([uuid])
    assert after.number == before.number
    assert after.gib - before.gib == pytest.approx(2, abs=0.5)
    assert large.numel() / 2**30 < after.gib <= torch.cuda.get_device_properties(small.device).total_memory / 2**30


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_of_activations_is_the_allocator_s_peak(tiny_model: Path, checkpointing: bool) -> None:
    config = model_config(tiny_model, height=128, width=128, lora_rank=4, dtype="bfloat16")
    adapter, prompts = DiffusionModelBase.get_class(config), embeddings_of(config, lengths=(24,))
    module: Any = adapter.load_transformer(config, torch.bfloat16).train()
    make_trainable(adapter, module, config)
    module.to("cuda", torch.bfloat16)
    if checkpointing:
        module.enable_gradient_checkpointing(recomputed)
    samples = 64
    velocity = velocity_field(adapter, module, config, prompts.to("cuda"), torch.zeros(samples, dtype=torch.long))
    latents = torch.randn(samples, *adapter.latent_shape(config), device="cuda")
    velocity(latents, torch.tensor(500.0, device="cuda"))[0].sum().backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    velocity(latents, torch.tensor(500.0, device="cuda"))[0].sum().backward()
    measured = torch.cuda.max_memory_allocated() - before
    assert pass_cost(config, prompts, samples, checkpointing).training_bytes == pytest.approx(measured, rel=0.15)
