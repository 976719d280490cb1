# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two GPUs equals one GPU: loss, gradient norm, weights after two updates. On CPU ranks the same body runs.

On a machine with two GPUs: `python -m pytest tests/gpu/test_fsdp_on_two_gpus.py`. It needs nothing of the upper floors.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.support.helpers import (
    actor_config,
    gloo_world,
    largest_difference,
    model_config,
    rollout_request,
    wait_until_saved,
)

LORA = {"lora_rank": 4, "lora_alpha": 8}
BASELINES = ("full", "lora")
# name -> settings of model and actor. What follows the baselines changes how the ranks compute, not what.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "offloaded": LORA | {"param_offload": True, "optimizer_offload": True},
    "optimizer_offloaded": {"optimizer_offload": True},
    "sequence": LORA | {"ulysses_sequence_parallel_size": 2},
}
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, -0.2, 0.9, -0.4])
TOLERANCE = 2e-5
"""Of weights that two updates move by about 0.02: only the order of sums differs (and on CUDA the device of AdamW)."""
GPUS = torch.cuda.device_count()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),  # what the quick tests of ranks and of sequences hold, once more
    pytest.param("cuda", marks=pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; here are {GPUS}")),
]


@dataclass
class Trained:
    """One rank's metrics of each update, where the optimiser's moments were, and rank 0's weights."""

    metrics: list[dict[str, float]]
    moments_on: set[str]
    weights: dict[str, Tensor]
    after_loading: dict[str, Tensor]


def train(rank: int, model: Path, trajectories: Trajectories, device: str, folder: Path) -> dict[str, Trained]:
    """Every variant: two updates, a checkpoint in the background, a third update, and the checkpoint again."""
    results = {}
    for name in VARIANTS if dist.get_world_size() > 1 else BASELINES:
        changes = VARIANTS[name]
        sharing = changes.get("ulysses_sequence_parallel_size", 1)
        settings = {"clip_grad": 0.1, "ppo_micro_batch_size_per_gpu": 4, "use_kl_loss": True, "kl_loss_coef": 0.5}
        settings |= {"enable": True, "update_interval": 1} | changes
        kind = {key: settings.pop(key) for key in LORA if key in settings}
        engine = DiffusersFSDPEngine(model_config(model, **kind), actor_config(**settings), device)
        engine.initialize()
        share = torch.arange(8).chunk(dist.get_world_size() // sharing)[rank // sharing]
        batch = ActorBatch([(trajectories.rows(share), ADVANTAGES[share])], global_count=8)
        metrics = [engine.update_policy([batch]) for _ in range(2)]
        weights = engine.gather_weights()
        engine.start_saving(folder / name)
        engine.update_policy([batch])
        wait_until_saved(engine)
        moments = {state["exp_avg"].device.type for state in engine.optimizer.state.values()}
        engine.load_checkpoint(folder / name)
        results[name] = Trained(metrics, moments, weights, engine.gather_weights())
    return results


@pytest.fixture
def model(device: str, tiny_model: Path, one_block_model: Path) -> Path:
    """Of one block where other tests hold what two add."""
    return one_block_model if device == "cpu" else tiny_model


@pytest.fixture
def trajectories(model: Path) -> Trajectories:
    """Eight samples of two prompts, sampled on the CPU; LoRA starts as the base model."""
    _, sampled = DiffusersRolloutEngine(model_config(model)).generate(rollout_request(samples=4, window=(0, 2)))
    return sampled


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_are_one(model: Path, trajectories: Trajectories, tmp_path: Path, device: str) -> None:
    def trained_by(ranks: int) -> list[dict[str, Trained]]:
        folder = tmp_path / str(ranks)
        return gloo_world(train, ranks, folder, model, trajectories, device, folder, device=device)

    (one,), (first, second) = trained_by(1), trained_by(2)
    assert first.keys() == VARIANTS.keys()
    for name, result in first.items():
        expected = one["lora" if "lora_rank" in VARIANTS[name] else "full"]
        for ours, others, theirs in zip(result.metrics, second[name].metrics, expected.metrics, strict=True):
            assert ours["grad_norm"] == others["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3), name
            loss = (ours["pg_loss"] + others["pg_loss"]) / 2
            assert loss == pytest.approx(theirs["pg_loss"], rel=1e-3, abs=1e-6), name
        assert largest_difference(result.weights, expected.weights) < TOLERANCE, name
        assert largest_difference(result.after_loading, result.weights) == 0.0, name
        assert result.moments_on == {"cpu" if "offload" in name else device}, name
    assert expected.metrics[1]["pg_loss"] != expected.metrics[0]["pg_loss"]
    if device == "cpu":  # the same arithmetic in the same order
        assert largest_difference(first["offloaded"].weights, first["lora"].weights) == 0.0
        assert largest_difference(first["optimizer_offloaded"].weights, first["full"].weights) == 0.0
        assert first["offloaded"].metrics == first["lora"].metrics
