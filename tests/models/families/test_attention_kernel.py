# SPDX-License-Identifier: Apache-2.0
"""A family's own attention kernel: used by every copy of the denoiser, on a GPU, and by nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models.runtime.attention as attention
from benchmarks.iteration import request_of
from models.families.base import DiffusionModelBase
from models.families.flux import Flux
from models.families.stable_diffusion_3 import StableDiffusion3
from models.rollout.diffusers import DiffusersRolloutEngine
from models.runtime.attention import attention_kernel, choose_attention
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import actor_config, model_config
from tests.support.tiny_models import FAMILIES


def kernels(module: Any) -> set[str | None]:
    """What the module's attention layers compute with; None is the process's default."""
    return {getattr(processor, "_attention_backend", None) for processor in module.attn_processors.values()}


@pytest.mark.parametrize(
    ("adapter", "device", "dtype", "expected"),
    [
        (Flux, "cuda:0", torch.bfloat16, "_native_flash"),
        (Flux, "cuda", torch.float16, "_native_flash"),
        (Flux, "cuda", torch.float32, None),
        (Flux, "cpu", torch.bfloat16, None),
        (StableDiffusion3, "cuda", torch.bfloat16, None),
    ],
)
def test_flux_names_its_kernel_on_a_gpu_in_two_byte_formats(
    adapter: type[DiffusionModelBase], device: str, dtype: torch.dtype, expected: str | None
) -> None:
    """There is no flash attention in fp32, and cuDNN, which must not be chosen, has none either."""
    assert attention_kernel(adapter, device, dtype) == expected


def test_other_modules_of_the_process_keep_theirs(tiny_folder: Callable[[str], Path]) -> None:
    """diffusers' own setter would change the default that a module without a kernel of its own uses."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    config = model_config(tiny_folder("flux"), **FAMILIES["flux"].plain)
    module, other = (Flux.load_transformer(config, torch.bfloat16) for _ in range(2))
    before = _AttentionBackendRegistry.get_active_backend()[0]
    choose_attention(Flux, module, "cuda", torch.bfloat16)
    assert kernels(module) == {"_native_flash"}
    assert kernels(other) == {None}
    assert _AttentionBackendRegistry.get_active_backend()[0] == before


@pytest.mark.usefixtures("one_rank")
def test_rollout_trainer_and_reference_compute_with_the_kernel(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a kernel that the CPU has too; rollout and update still agree to the bit."""
    monkeypatch.setattr(Flux, "cuda_attention", "_native_math")
    monkeypatch.setattr(attention, "attention_kernel", lambda adapter, device, dtype: adapter.cuda_attention)
    family = FAMILIES["flux"]
    config = model_config(tiny_folder("flux"), dtype="bfloat16", **family.plain)
    rollout = DiffusersRolloutEngine(config)
    trainer = DiffusersFSDPEngine(config, actor_config(use_kl_loss=True, kl_loss_coef=0.1))
    trainer.initialize()
    for module in (rollout.transformer, trainer.module, trainer.reference):
        assert kernels(module) == {"_native_math"}
    trajectories: Any = rollout.produce(request_of(config, 8, (0, 1), 4, record=False, iteration=0)).recorded
    metrics = trainer.update_policy([ActorBatch([(trajectories, torch.tensor([1.0, -0.8, 0.3, -1.5]))], 4)])
    assert metrics["logprob_abs_diff/max"] == 0.0
    assert metrics["grad_norm"] > 0
