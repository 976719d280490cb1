# SPDX-License-Identifier: Apache-2.0
"""LoRA whose reference is the policy with its adapters off: whatever FSDP gathers, what is trained stays so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import FinishedLatents, Trajectories
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from models.training.shards import TrainedShards
from models.weights.buckets import buckets
from models.weights.canary import Canary, check_canary
from models.weights.trainable import WeightSyncError, load_trainable, trainable
from tasks.actors.weight_transport import Arrival
from tests.models.training.test_forward_engine import finished, largest_difference, trainer
from tests.support.helpers import gloo_world, model_config, prompt_table, rollout_request, single_rank

LORA = {"lora_rank": 4, "lora_alpha": 8}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
LOSSES: dict[str, dict[str, Any]] = {
    "flow_grpo": KL,
    "grpo_guard": KL,
    "dpo": KL,
    "diffusion_nft": {},
    "awm": {},
}
REVERSE = ("flow_grpo", "grpo_guard")
LIKE = ("grpo_guard", "dpo", "awm")
"""Slow: one loss with a reference and one with an old policy are quick, and these share their code."""
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5, 0.6, 0.9])
Samples = tuple[Trajectories, Sequence[FinishedLatents]]


def config_of(model: Path) -> DiffusionModelConfig:
    return model_config(model, **LORA)


def engine_of(model: Path, loss: str, reshard: bool) -> DiffusersFSDPEngine:
    settings = {"enable": True, "update_interval": 1, "reshard_after_forward": reshard, "clip_grad": 0.1}
    levels = {} if loss in REVERSE else {"num_train_timesteps": 1}
    return trainer(config_of(model), loss, **LOSSES[loss] | settings | levels)


def share_of(samples: Samples, loss: str, rank: int, ranks: int) -> ActorBatch:
    """A rank's samples: whole groups, of which there are two."""
    rows = torch.arange(6).chunk(ranks)[rank]
    whole = samples[0] if loss in REVERSE else samples[1][0]
    return ActorBatch([(whole.rows(rows), ADVANTAGES[rows])], 6)


def lived(engine: DiffusersFSDPEngine, batch: ActorBatch, folder: Path) -> dict[str, Any]:
    """Two updates, each followed by what a sync does, and a checkpoint."""
    canary, norms, every = Canary(prompt_table((5, 3))), [], set(trainable(engine.module))
    for _ in range(2):
        norms.append(engine.update_policy([batch])["grad_norm"])
        velocity = engine.canary_velocity(canary)  # leaves gathered weights behind
        weights = engine.gather_weights()
    assert set(trainable(engine.module)) == every
    with engine.holding("average"):
        average = engine.gather_weights()
    engine.save_checkpoint(folder)
    return {"norms": norms, "weights": weights, "average": average, "velocity": velocity}


def on_a_rank_of_two(rank: int, model: Path, samples: Samples, folder: Path, losses: list[str]) -> dict[str, Any]:
    return {
        loss: lived(engine_of(model, loss, reshard=False), share_of(samples, loss, rank, 2), folder / loss)
        for loss in losses
    }


@pytest.fixture(scope="module")
def tiny_model(one_block_model: Path) -> Path:
    """One block is enough here."""
    return one_block_model


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> Samples:
    """Six of two prompts, as trajectories and as finished latents."""
    config = config_of(tiny_model)
    request = rollout_request(samples=3, window=(0,), record_means=True)
    _, paths = DiffusersRolloutEngine(config).generate(request)
    assert paths is not None
    return paths, finished(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters_off")


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tiny_model: Path, samples: Samples, folder: Path) -> dict[str, Any]:
    """Of each loss that is tested what rank 0 found."""
    chosen = {item.callspec.params["loss"]: None for item in request.session.items if "two_ranks" in fixtures_of(item)}
    return gloo_world(on_a_rank_of_two, 2, folder / "world", tiny_model, samples, folder / "two", [*chosen])[0]


def fixtures_of(item: Any) -> Sequence[str]:
    return item.fixturenames if item.path == Path(__file__) else ()


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE else []) for name in LOSSES]
)
def test_lora_trains_alike_whatever_is_gathered(
    two_ranks: dict[str, dict[str, Any]], tiny_model: Path, samples: Samples, folder: Path, loss: str
) -> None:
    """One rank with and without gathered weights to the bit, two ranks to the order of sums; sync and checkpoint."""
    rollout = DiffusersRolloutEngine(config_of(tiny_model))
    start = {name: parameter.detach().clone() for name, parameter in trainable(rollout.transformer).items()}
    with single_rank():
        freed, kept = (
            lived(engine_of(tiny_model, loss, reshard), share_of(samples, loss, 0, 1), folder / f"{loss}-{reshard}")
            for reshard in (True, False)
        )
        resumed = []
        for saved in (folder / f"{loss}-False", folder / "two" / loss):
            engine = engine_of(tiny_model, loss, reshard=False)
            engine.load_checkpoint(saved)
            resumed.append(engine.gather_weights())
    two = two_ranks[loss]
    assert freed["norms"] == kept["norms"] == pytest.approx(two["norms"], rel=1e-3)
    assert min(kept["norms"]) > 0
    for which in ("weights", "average"):
        assert largest_difference(freed[which], kept[which]) == 0.0
        assert largest_difference(kept[which], two[which]) < 1e-5
        assert largest_difference(kept[which], start) > 1e-3, f"the {which} never moved"
    assert largest_difference(kept["average"], kept["weights"]) > 1e-4
    for run, loaded in zip((kept, two), resumed, strict=True):
        assert largest_difference(loaded, run["weights"]) == 0.0
        rollout.load_weights(run["weights"])
        own = rollout.canary_velocity(Canary(prompt_table((5, 3))))
        assert check_canary(run["velocity"], own, version=2, tolerance=0.0) == 0.0


@pytest.mark.parametrize("reshard", [True, False])
def test_a_sync_sends_full_precision_whatever_is_gathered(tiny_model: Path, samples: Samples, reshard: bool) -> None:
    """Of a bf16 model gathered weights are rounded, the trained ones are not."""
    with single_rank():
        engine = trainer(model_config(tiny_model, dtype="bfloat16"), "awm", reshard_after_forward=reshard)
        engine.update_policy([share_of(samples, "awm", 0, 1)])
        engine.canary_velocity(Canary(prompt_table((5, 3))))
        weights = engine.gather_weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


# ---- nothing is not a set of weights


def test_no_side_takes_nothing_for_the_weights(tiny_model: Path) -> None:
    config = config_of(tiny_model)
    rollout = DiffusersRolloutEngine(config)
    with single_rank():
        engine = trainer(config, "awm")
        whole = list(buckets(engine.whole_weights(), 2**10))
        engine._trained = TrainedShards(nn.Module())
        with pytest.raises(WeightSyncError, match="no trained weights"):
            engine.gather_weights()
    arrival = Arrival(3, rollout.begin_load(), "cpu")
    with pytest.raises(WeightSyncError, match="sent none of its weights"):
        arrival.finish(3, 0)
    for bucket in whole:
        arrival.take(bucket)
    assert arrival.finish(3, len(whole))
    rollout.transformer.requires_grad_(False)
    for load in (rollout.begin_load, lambda: load_trainable(rollout.transformer, {})):
        with pytest.raises(WeightSyncError, match="no trained weights"):
            load()
