# SPDX-License-Identifier: Apache-2.0
"""Rollout and training engine on one GPU: the guarantees of the CPU hold there too.

Skipped without CUDA. On a GPU machine: `python -m pytest tests/gpu`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models.rollout.diffusers import DiffusersRolloutEngine
from models.training import checkpoint
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.weights.canary import Canary, check_canary
from models.weights.digests import check_digests, digests_of
from tests.support.helpers import actor_config, model_config, prompt_table, rollout_request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")

ROUNDING = 1e-6
"""The mean over a latent may be added up in another order there: one unit in the last place of fp32."""


@pytest.fixture(scope="module", autouse=True)
def nccl_rank() -> Iterator[None]:
    """torch.distributed over nccl with this process as its only rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_update_sync_and_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, lora_rank: int, guidance: float
) -> None:
    config = model_config(tiny_model, dtype=dtype, lora_rank=lora_rank, true_cfg_scale=guidance)
    rollout = DiffusersRolloutEngine(config, "cuda")
    request = rollout_request(samples=4, negative_length=4 if guidance > 1 else None)
    pictures, trajectories = rollout.generate(request)
    assert pictures.shape == (8, 16, 24, 3)
    assert torch.isfinite(trajectories.log_probs).all()

    trainer = DiffusersFSDPEngine(
        config, actor_config(ppo_micro_batch_size_per_gpu=8, use_kl_loss=True, kl_loss_coef=0.1), "cuda"
    )
    trainer.initialize()
    replayed = trainer.rescored(trajectories, with_means=False).log_probs.cpu()
    torch.testing.assert_close(replayed, trajectories.log_probs, rtol=0, atol=ROUNDING)

    batch = ActorBatch([(trajectories, torch.linspace(-1, 1, 8))], 8)
    metrics = trainer.update_policy([batch])
    assert metrics["ratio_deviation/max"] <= ROUNDING
    assert metrics["grad_norm"] > 0
    rollout.load_weights(trainer.gather_weights())
    canary = Canary(prompt_table((5, 3), 4 if guidance > 1 else None))
    assert check_canary(trainer.canary_velocity(canary), rollout.canary_velocity(canary), 1, tolerance=0.0) == 0
    held, formats = digests_of(rollout.held_weights()), (torch.float32, config.dtype)
    check_digests(digests_of(dict(trainer.whole_weights()), *formats), held, 1)
    check_digests(digests_of(trainer.gather_weights(), *formats), held, 1)  # added up on the CPU

    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)  # as the tensors of a large model are read
    trainer.save_checkpoint(tmp_path / "checkpoint")
    saved = trainer.gather_weights()
    trainer.update_policy([batch])
    assert any(not torch.equal(saved[name], moved) for name, moved in trainer.gather_weights().items())
    trainer.load_checkpoint(tmp_path / "checkpoint")
    for name, restored in trainer.gather_weights().items():
        torch.testing.assert_close(restored, saved[name], rtol=0, atol=0)
