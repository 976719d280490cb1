# SPDX-License-Identifier: Apache-2.0
"""VeOmni's engine trains as `fsdp2` does, on one rank and on two; needs VeOmni (docs/training.md), else skipped."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.cost.memory import Need, update_need
from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelBase
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.training.engine import get_training_engine
from models.training.micro_batches import ActorBatch
from models.training.veomni_engine import VeOmniEngine, _without_values
from models.weights.canary import Canary
from models.weights.trainable import make_trainable
from tests.models.cost.test_memory import fsdp_weights
from tests.models.training.test_engine import trainer
from tests.support.helpers import (
    actor_config,
    gloo_world,
    largest_difference,
    model_config,
    prompt_table,
    rollout_request,
    single_rank,
    wait_until_saved,
)

installed = pytest.mark.skipif(find_spec("veomni") is None, reason="VeOmni is not installed")
ADVANTAGES = torch.tensor([1.0, -0.8, 0.3, -1.5])
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 4, "lora_alpha": 8},
    "bfloat16": {"dtype": "bfloat16"},
    "lora in bfloat16": {"lora_rank": 4, "lora_alpha": 8, "dtype": "bfloat16"},
    "offloaded": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"use_kl_loss": True, "kl_loss_coef": 0.5},
    "lora": {"enable": True, "update_interval": 1, "gradient_checkpointing": True, "reshard_after_forward": False},
    "bfloat16": {"optimizer_offload": True},
    "offloaded": {"param_offload": True},
}
ROUNDED = {"offloaded"}
"""There VeOmni adds up the gradient's norm in an order of its own."""


@dataclass
class Trained:
    """What one rank reports; the weights are rank 0's, after each of three updates and after a checkpoint was read."""

    sharded: bool
    metrics: list[dict[str, float]]
    weights: list[dict[str, Tensor]]
    resumed: list[dict[str, Tensor]]
    average: dict[str, Tensor]
    scored: Tensor
    velocity: Tensor


def trained(
    rank: int, strategy: str, model: Path, samples: dict[str, Trajectories], folder: Path, others: Path | None = None
) -> dict[str, Trained]:
    """Two updates, a third while a checkpoint is written; then that checkpoint again, or another engine's, and its
    third update."""
    found = {}
    ranks = torch.distributed.get_world_size()
    for kind, fields in KINDS.items():
        settings = actor_config(
            ppo_micro_batch_size_per_gpu=2, clip_grad=0.1, lr_warmup_steps=2, **SETTINGS.get(kind, {})
        )
        engine: Any = get_training_engine(strategy)(model_config(model, **fields), settings)
        engine.initialize()
        sharded = all(isinstance(p, DTensor) for p in engine.module.parameters())
        share = torch.arange(4).chunk(ranks)[rank]
        own = samples[kind].rows(share)
        batch = ActorBatch([(own, ADVANTAGES[share])], 4)
        metrics, weights = [], []
        for number in range(3):
            if number == 2:
                engine.start_saving(folder / kind)
            metrics.append(engine.update_policy([batch]))
            weights.append(engine.gather_weights())
        wait_until_saved(engine)
        with engine.holding("average"):
            average = engine.gather_weights()
        engine.load_checkpoint((others or folder) / kind)
        resumed = [engine.gather_weights()]
        scored, velocity = engine.rescored(own).log_probs, engine.canary_velocity(Canary(prompt_table((5, 3))))
        engine.update_policy([batch])
        resumed.append(engine.gather_weights())
        found[kind] = Trained(sharded, metrics, weights, resumed, average, scored, velocity)
    return found


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> dict[str, Trajectories]:
    def sampled(fields: dict[str, Any]) -> Trajectories:
        _, found = DiffusersRolloutEngine(model_config(tiny_model, **fields)).generate(rollout_request())
        assert found is not None
        return found

    return {kind: sampled(fields) for kind, fields in KINDS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkpoints of `fsdp2`."""
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def reference(tiny_model: Path, samples: dict[str, Trajectories], folder: Path) -> dict[str, Trained]:
    with single_rank():
        return trained(0, "fsdp2", tiny_model, samples, folder)


@installed
def test_one_rank_trains_as_fsdp2(
    reference: dict[str, Trained], tiny_model: Path, samples: dict[str, Trajectories], tmp_path: Path
) -> None:
    (one,) = gloo_world(trained, 1, tmp_path, "veomni", tiny_model, samples, tmp_path)
    for kind, own in one.items():
        theirs = reference[kind]
        assert own.sharded
        for ours, other in zip(own.metrics, theirs.metrics, strict=True):
            assert ours == (pytest.approx(other, rel=1e-4, abs=1e-6) if kind in ROUNDED else other)
        largest = 1e-6 if kind in ROUNDED else 0.0
        for ours, other in zip(own.weights + own.resumed, theirs.weights + theirs.resumed, strict=True):
            assert largest_difference(ours, other) <= largest
        assert largest_difference(own.average, theirs.average) <= largest
        torch.testing.assert_close(own.scored, theirs.scored, rtol=0, atol=largest)
        torch.testing.assert_close(own.velocity, theirs.velocity, rtol=0, atol=10 * largest)
        assert largest_difference(own.resumed[0], own.weights[1]) == 0.0
        assert largest_difference(own.resumed[1], own.weights[2]) == 0.0
        assert largest_difference(own.weights[0], own.weights[2]) > 1e-3


@installed
def test_two_ranks_train_as_one_and_read_the_checkpoint_of_fsdp2(
    reference: dict[str, Trained], tiny_model: Path, samples: dict[str, Trajectories], tmp_path: Path, folder: Path
) -> None:
    first, second = gloo_world(trained, 2, tmp_path, "veomni", tiny_model, samples, tmp_path, folder)
    for kind in ("full", "lora", "offloaded"):  # in bf16 a batch's parts are rounded otherwise
        own, theirs = first[kind], reference[kind]
        assert own.sharded
        for ours, other, one in zip(own.metrics, second[kind].metrics, theirs.metrics, strict=True):
            assert ours["grad_norm"] == other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        for ours, other in zip(own.weights + own.resumed, theirs.weights + theirs.resumed, strict=True):
            assert largest_difference(ours, other) < 1e-5
        torch.testing.assert_close(torch.cat([own.scored, second[kind].scored]), theirs.scored, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.velocity, theirs.velocity, rtol=1e-5, atol=1e-5)


def test_the_estimate_has_what_is_frozen_sharded_in_fp32_on_a_lone_rank_too(tiny_model: Path) -> None:
    """Of LoRA over a bf16 base, which `fsdp2` keeps whole in bf16 there and gathers nothing of."""
    config, prompts = model_config(tiny_model, lora_rank=4, dtype="bfloat16"), prompt_table((5,))
    cost, adapter = pass_cost(config, prompts, 4), DiffusionModelBase.get_class(config)
    module = adapter.load_transformer(config, torch.bfloat16)
    make_trainable(adapter, module, config)
    _without_values(module)  # what VeOmni is given to shard

    def needed(strategy: str, world_size: int = 1, **settings: Any) -> Need:
        actor = actor_config(strategy=strategy, **settings)
        return update_need(cost, config, actor, world_size=world_size, frozen_models=1)

    held = sum(parameter.nbytes for parameter in module.parameters())
    assert needed("veomni").resident["weights"] == held == 4 * (cost.frozen + cost.trained)
    assert needed("fsdp2").resident["weights"] == 2 * cost.frozen + 4 * cost.trained
    for ranks in (1, 2):
        assert needed("veomni", ranks).resident["reference and teacher"] == 4 * cost.parameters / ranks
        assert needed("fsdp2", ranks).resident["reference and teacher"] == 2 * cost.parameters / ranks
        offloaded = needed("veomni", ranks, param_offload=True).on_host["offloaded weights"]
        assert offloaded == 4 * (cost.frozen + cost.parameters + 2 * cost.trained) / ranks
    gathered = cost.frozen + cost.trained - cost.blocks[1] + 2 * cost.blocks[0]
    assert needed("veomni").passing["gathered weights"] == 2 * gathered
    assert needed("fsdp2").passing["gathered weights"] == 0
    kept = needed("veomni", reshard_after_forward=False).passing
    assert kept["gathered weights"] == 2 * (cost.frozen + cost.trained)


def test_a_lone_rank_that_shards_all_holds_the_copies_that_are_counted(one_rank: None, tiny_model: Path) -> None:
    """By FSDP2 itself, which both engines call; of LoRA, between the passes."""
    config = model_config(tiny_model, lora_rank=4)
    engine = trainer(config, strategy="veomni", reshard_after_forward=False)
    _, paths = DiffusersRolloutEngine(config).generate(rollout_request(lengths=(5, 3, 7)))
    engine.rescored(paths)
    held = sum(weight._unsharded_param.nbytes for weight in fsdp_weights(engine.module))
    need = update_need(pass_cost(config, prompt_table((5,)), 4), config, engine.actor_config, world_size=1)
    assert need.passing["gathered weights"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence"), ({"shard_frozen": False}, "shard_frozen")],
)
def test_what_veomni_cannot_do_is_refused_by_its_field(tiny_model: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        VeOmniEngine.check_settings(actor_config(**changes), model_config(tiny_model, **KINDS["lora"]))


@installed
def test_weights_that_stay_in_fp32_are_refused(tiny_folder: Any) -> None:
    config = model_config(tiny_folder("wan"), height=32, width=64, num_frames=5, dtype="bfloat16")
    with single_rank(), pytest.raises(ValueError, match=r"WanTransformer3DModel keeps some weights in float32"):
        VeOmniEngine(config, actor_config()).initialize()
