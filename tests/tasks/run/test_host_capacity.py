# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its machine's memory: counted as the engines really keep it, and refused where it has no room."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cost.memory import GIB, update_need
from models.cost.meta_pass import PassCost, pass_cost
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.checkpoint import HostCopy
from tasks.config.tree import TrainConfig
from tasks.run.capacity import DoesNotFit, Needs, checkpoint_bytes, encoder_bytes, needs
from tasks.run.host_capacity import host_gib, host_need
from tasks.run.host_check import check_host, warn_of_little_memory
from tasks.system.host_memory import all_bytes, free_bytes
from tests.models.cost.test_memory import COST
from tests.models.training.test_engine import trainer
from tests.support.helpers import actor_config, model_config, single_rank
from tests.support.tiny_models import embeddings_of

WITH_LORA = replace(COST, trained=GIB, frozen=250 * GIB, trained_blocks=(GIB // 10, GIB))
OFFLOADED, MOMENTS, COPY, ASLEEP = (
    "offloaded weights",
    "offloaded AdamW",
    "the checkpoint's copy",
    "the rollout's weights, asleep",
)


def run_config(tiny_model: Path, *, lora: int = 0, fsdp: Any = None, rollout: Any = None, **trainer: Any):
    """A run on one GPU that shares it with its rollout, which sleeps."""
    sampling = {"n": 4, "micro_batch_size": 4, "pipeline": {"height": 16, "width": 24}}
    sampling |= {"placement": "colocated", "enable_sleep_mode": True} | (rollout or {})
    actor = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "fsdp_config": fsdp or {}}
    tree = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {
            "model": {"path": str(tiny_model), "lora_rank": lora},
            "rollout": sampling,
            "actor": actor,
        },
        "trainer": {"device": "cuda", **trainer},
    }
    return TrainConfig.model_validate(tree)


def kept(config: TrainConfig, cost: PassCost = COST, **model: Any) -> dict[str, float]:
    """GiB by what they are for, what is nothing left out."""
    settings = config.actor_rollout_ref.model
    of_model = model_config(settings.path, lora_rank=settings.lora_rank, **model)
    need = host_need(config, needs(config, of_model, cost))
    return {name: size / GIB for name, size in (need.resident | need.passing).items() if size / GIB >= 0.01}


def checked(config: TrainConfig, model: DiffusionModelConfig, cost: PassCost) -> Needs | None:
    """What a run's checks make of it."""
    return check_host(config, needs(config, model, cost))


def tensors(tree: Any) -> Iterator[Tensor]:
    """The leaves of a state that are tensors."""
    if isinstance(tree, dict):
        for part in tree.values():
            yield from tensors(part)
    elif isinstance(tree, Tensor):
        yield tree.to_local() if hasattr(tree, "to_local") else tree


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("copies", [0, 1])
def test_a_checkpoints_copy_is_as_large_as_is_counted(tiny_model: Path, model: Any, copies: int) -> None:
    """Of a real engine that has made a step, whose moments are there; steps and random states are bytes more."""
    config = model_config(tiny_model, **model)
    with single_rank():
        engine = trainer(config, enable=bool(copies))
        for parameter in engine.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer.step()
        staged = HostCopy().stage(engine.checkpoint._state())
    run = run_config(tiny_model).with_changes({"actor_rollout_ref": {"actor": {"ema": {"enable": bool(copies)}}}})
    counted = checkpoint_bytes(run, pass_cost(config, embeddings_of(config, lengths=(24,)), samples=4))
    weights = [tensor for tensor in tensors(staged) if tensor.ndim and tensor.is_floating_point()]
    assert sum(tensor.nbytes for tensor in weights) == counted


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}, {"lora_rank": 4, "dtype": "bfloat16"}])
def test_offloaded_weights_are_as_large_as_is_counted(tiny_model: Path, model: Any) -> None:
    """Of a real engine with a teacher and an average: shards of all weights, gradients, and moments."""
    config, settings = model_config(tiny_model, **model), {"param_offload": True, "enable": True}
    with single_rank():
        engine = trainer(config, loss_mode="distill_kl", teacher_path=str(tiny_model), **settings)
        assert engine.teacher is not None
        assert engine.ema is not None
        of_policy, of_teacher = list(engine.module.parameters()), list(engine.teacher.parameters())
        gradients = [weight for weight in of_policy if weight.requires_grad]
        held = [*of_policy, *of_teacher, *gradients, *engine.ema.shadow.values()]
        held += [tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor.ndim]
        found = sum(tensor.nbytes for tensor in held)
    cost = pass_cost(config, embeddings_of(config, lengths=(24,)), samples=4)
    counted = update_need(cost, config, actor_config(**settings), world_size=1, copies=1, frozen_models=1).on_host
    assert sum(counted.values()) == pytest.approx(found, rel=0.01), "a bf16 model has some weights in fp32"


@pytest.mark.parametrize(
    ("model", "fsdp", "on_host"),
    [
        ({}, {}, {}),
        ({}, {"optimizer_offload": True}, {MOMENTS: 2000}),
        ({}, {"param_offload": True}, {OFFLOADED: 1000 * (2 + 1) + 1000, MOMENTS: 2000}),
        ({"lora_rank": 4}, {"param_offload": True}, {OFFLOADED: 4 * 3 + 2 * 1000, MOMENTS: 8}),
        ({"lora_rank": 4}, {"param_offload": True, "shard_frozen": False}, {OFFLOADED: 4 * 3, MOMENTS: 8}),
    ],
)
def test_what_leaves_a_gpu_is_on_the_host(tiny_model: Path, model: Any, fsdp: Any, on_host: dict[str, float]) -> None:
    """Of ten ranks with a further set of the weights and a reference; what the host has, no GPU has."""
    cost = WITH_LORA if model else COST
    config, sizes = model_config(tiny_model, **model), {"world_size": 10, "copies": 1, "frozen_models": 1}
    found = update_need(cost, config, actor_config(**fsdp), **sizes).on_host
    assert {name: 10 * size / GIB for name, size in found.items()} == pytest.approx(on_host)
    awake = {name: value for name, value in fsdp.items() if not name.endswith("offload")}
    in_float8 = replace(cost, float8=(cost.frozen // 2, 1000))
    rest = update_need(in_float8, config, actor_config(**fsdp), **sizes).on_host.get(OFFLOADED, 0.0)
    whole = fsdp.get("shard_frozen", True) is False
    left = 4 * in_float8.float8[0] / 10 if OFFLOADED in found and not whole else 0.0  # whole on each GPU
    assert found.get(OFFLOADED, 0.0) - rest == pytest.approx(left)
    usual, now = (update_need(cost, config, actor_config(**given), **sizes).resident for given in (awake, fsdp))
    gradients = 4 * cost.trained / 10 if OFFLOADED in found else 0.0  # pass on a GPU, and stay on the host
    assert sum(found.values()) - gradients == pytest.approx(sum(usual.values()) - sum(now.values()))


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_rollout_asleep_is_as_large_as_is_counted(tiny_model: Path, model: Any) -> None:
    """What an engine's sleep moves as it leaves the policy behind; LoRA's small matrices are counted all the same."""
    config = run_config(tiny_model, lora=model.get("lora_rank", 0), async_checkpoint=False)
    of_model = model_config(tiny_model, **model)
    engine = DiffusersRolloutEngine(of_model)
    engine._host.leave(with_trained=False)
    engine._host.come_back("cpu")
    held = sum(copy.nbytes for copy in engine._host._kept.values())
    cost = pass_cost(of_model, embeddings_of(of_model, lengths=(24,)), samples=4)
    need = host_need(config, needs(config, of_model, cost))
    assert need.gib * GIB == pytest.approx(held, rel=0.1)


def test_the_sum_of_a_machine(tiny_model: Path) -> None:
    """Its ranks' part of the checkpoint, and each rollout's weights but trained ones, which vLLM-Omni takes along."""
    assert kept(run_config(tiny_model)) == {COPY: 3000}
    assert kept(run_config(tiny_model, async_checkpoint=False)) == {}
    with_lora = {COPY: 12, ASLEEP: pytest.approx(1004, rel=1e-3)}
    assert kept(run_config(tiny_model, lora=4), WITH_LORA) == with_lora
    awake = {"enable_sleep_mode": False}
    assert kept(run_config(tiny_model, lora=4, rollout=awake), WITH_LORA) == {COPY: 12}
    omni = {"name": "vllm_omni"}
    assert kept(run_config(tiny_model, rollout=omni)) == {COPY: 3000, ASLEEP: pytest.approx(1000, rel=1e-3)}
    two = {"rollout": {"num_actors": 2, "n": 8}, "n_gpus_per_node": 2}
    assert kept(run_config(tiny_model, lora=4, **two), WITH_LORA) == {
        COPY: 12,
        ASLEEP: pytest.approx(2008, rel=1e-3),
    }
    several = {"rollout": {"num_actors": 4, "n": 16}, "n_gpus_per_node": 2, "nnodes": 2}
    assert kept(run_config(tiny_model, **several))[COPY] == 1500, "of two machines each has half"
    assert kept(run_config(tiny_model, fsdp={"optimizer_offload": True}, **several))[MOMENTS] == 1000


def test_on_the_cpu_update_and_rollout_are_there_too(tiny_model: Path) -> None:
    """Both share the machine, and what is offloaded is no less there."""
    workers = {"placement": "separate", "enable_sleep_mode": False, "num_actors": 2, "n": 8}
    config = run_config(tiny_model, device="cpu", rollout=workers, async_checkpoint=False)
    needed = needs(config, model_config(tiny_model), COST)
    assert needed.rollout is not None
    both = {"the update": needed.update.gib, "the rollout": 2 * needed.rollout.gib}
    assert kept(config) == pytest.approx(both)
    elsewhere = workers | {"num_actors": 3, "n": 24}
    several = run_config(
        tiny_model, device="cpu", rollout=elsewhere, async_checkpoint=False, n_gpus_per_node=2, nnodes=2
    )
    needed = needs(several, model_config(tiny_model), COST)
    assert needed.rollout is not None
    both = {"the update": 2 * needed.update.gib, "the rollout": 2 * needed.rollout.gib}
    assert kept(several) == pytest.approx(both), "of three workers two may be on the first machine"
    offloaded = run_config(
        tiny_model, device="cpu", rollout=workers, async_checkpoint=False, fsdp={"optimizer_offload": True}
    )
    assert kept(offloaded)[MOMENTS] == 2000


def test_text_encoders_on_the_host_are_counted(tiny_model: Path) -> None:
    """On the CPU, and on a GPU that they leave; not on one of their own, nor on one of several machines."""
    encoders = {"embeddings": "live", "text_encoder": {"device": "cpu"}}
    pipeline = {"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 24}}}}

    def counted(config: TrainConfig) -> float:
        needed = needs(config, model_config(tiny_model), COST)
        return host_need(config, needed).resident.get("text encoders", 0.0)

    base = run_config(tiny_model).with_changes(pipeline)
    there = counted(base.with_changes({"data": encoders}))
    assert there == encoder_bytes(base.with_changes({"data": encoders})) > 0
    colocated = {"embeddings": "live", "text_encoder": {"device": "cuda", "placement": "colocated"}}
    assert counted(base.with_changes({"data": colocated})) == there
    colocated["text_encoder"]["enable_sleep_mode"] = False
    assert counted(base.with_changes({"data": colocated})) == 0
    two = {"trainer": {"nnodes": 2}, "actor_rollout_ref": {"rollout": {"num_actors": 2, "n": 8}}}
    assert counted(base.with_changes(two).with_changes({"data": encoders})) == 0
    assert counted(base) == 0


def test_what_has_no_room_is_refused_with_the_way_out(tiny_model: Path) -> None:
    """Offloading, which the refusal of a GPU advises, needs as much of the host."""
    model = model_config(tiny_model)
    config = run_config(tiny_model, fsdp={"param_offload": True}, host_memory_gib=6999)
    with pytest.raises(DoesNotFit) as refused:
        checked(config, model, COST)
    assert str(refused.value) == (
        "the run keeps 7000.0 GiB in its machine's memory (the checkpoint's copy 3000.0, offloaded weights 2000.0, "
        "offloaded AdamW 2000.0) but there are 6999.0: set trainer.async_checkpoint to false, or set "
        "actor.fsdp_config.param_offload to false, or train LoRA with model.lora_rank, or train on 2 machines or more "
        "(trainer.nnodes, now 1)"
    )
    assert checked(config.with_changes({"trainer": {"host_memory_gib": 7000.5}}), model, COST) is not None


MACHINES = "train on {} machines or more (trainer.nnodes, now 1)"
NO_COPY, NO_OFFLOAD, NO_MOMENTS, AWAKE = (
    f"set {name} to false"
    for name in (
        "trainer.async_checkpoint",
        "actor.fsdp_config.param_offload",
        "actor.fsdp_config.optimizer_offload",
        "rollout.enable_sleep_mode",
    )
)
LORA = "train LoRA with model.lora_rank"
NONE = ["neither settings nor more machines make it fit: take one with more", "a smaller model"]


@pytest.mark.parametrize(
    ("lora", "fsdp", "gpu", "host", "ways"),
    [
        (0, ["param_offload"], None, 4500, [NO_COPY, NO_OFFLOAD, LORA, MACHINES.format(2)]),
        (0, ["param_offload"], None, 2500, [f"{NO_COPY} and {NO_OFFLOAD}", LORA, MACHINES.format(3)]),
        (0, ["param_offload"], 3000, 6999, [NO_COPY, LORA, MACHINES.format(2)]),
        (0, ["param_offload"], 3000, 2500, [LORA, MACHINES.format(3)]),
        (0, ["optimizer_offload"], None, 100, [f"{NO_COPY} and {NO_MOMENTS}", MACHINES.format(51)]),
        (0, ["optimizer_offload"], None, 0.001, [f"{NO_COPY} and {NO_MOMENTS}"]),
        (
            0,
            ["param_offload", "optimizer_offload"],
            5500,
            2500,
            [f"{NO_COPY} and {NO_OFFLOAD}", LORA, MACHINES.format(3)],
        ),
        (4, [], None, 100, [AWAKE]),
        (4, [], 1500, 100, NONE),
    ],
)
def test_every_way_out_was_counted(
    tiny_model: Path, lora: int, fsdp: list[str], gpu: float | None, host: float, ways: list[str]
) -> None:
    """One setting where one suffices, else as few as do; not what the GPU has no room for, and no setting in vain."""
    offloads = dict.fromkeys(fsdp, True)
    config = run_config(tiny_model, lora=lora, fsdp=offloads, gpu_memory_gib=gpu, host_memory_gib=host)
    with pytest.raises(DoesNotFit) as told:
        checked(config, model_config(tiny_model, lora_rank=lora), WITH_LORA if lora else COST)
    *_, advice = str(told.value).partition(f"but there are {host:.1f}: ")
    assert advice.split(", or ") == ways


def test_on_the_cpu_smaller_micro_batches_are_a_way_out_where_without_activations_there_is_room(
    tiny_model: Path,
) -> None:
    workers = {"placement": "separate", "enable_sleep_mode": False}
    config = run_config(tiny_model, device="cpu", rollout=workers, async_checkpoint=False)
    needed = needs(config, model_config(tiny_model), COST)
    assert needed.rollout is not None
    both = needed.update.gib + needed.rollout.gib
    update, rollout = (sum(need.passing.values()) / GIB for need in (needed.update, needed.rollout))
    smaller = {
        "update": "lower actor.ppo_micro_batch_size_per_gpu, now 4",
        "rollout": "lower rollout.micro_batch_size, now 4",
    }
    assert update > rollout > 1
    for there, ways in (
        (both - 0.5, [smaller["update"], smaller["rollout"]]),
        (both - update + 0.5, [smaller["update"]]),
        (both - update - rollout + 0.5, [f"{smaller['update']} and {smaller['rollout']}"]),
    ):
        with pytest.raises(DoesNotFit) as told:
            checked(config.with_changes({"trainer": {"host_memory_gib": there}}), model_config(tiny_model), COST)
        *_, advice = str(told.value).partition(f"but there are {there:.1f}: ")
        assert advice.split(", or ")[: len(ways)] == ways


def test_the_machine_is_the_drivers_own_unless_a_cluster_is_joined(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = run_config(tiny_model)
    assert host_gib(config) == all_bytes() / GIB
    with pytest.raises(DoesNotFit, match=f"but there are {all_bytes() / GIB:.1f}: "):
        checked(config, model_config(tiny_model), COST)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert checked(config, model_config(tiny_model), COST) is None
    with pytest.raises(DoesNotFit, match=r"but there are 5.0: "):
        checked(config.with_changes({"trainer": {"host_memory_gib": 5}}), model_config(tiny_model), COST)


def test_memory_that_others_use_is_told(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be free again when the run needs it: a warning, not an error."""
    config = run_config(tiny_model)

    def with_copy(size: float) -> Needs:
        """Three sets of the trained weights in fp32, and little else."""
        return needs(config, model_config(tiny_model), replace(COST, trained=int(size / 12), parameters=1))

    with caplog.at_level(logging.WARNING):
        warn_of_little_memory(config, with_copy(free_bytes() / 2))
        assert not caplog.records
        warn_of_little_memory(config, with_copy(2.0 * all_bytes()))
    (record,) = caplog.records
    assert record.getMessage().startswith("other programs use memory of this machine, and the run keeps ")
    assert record.getMessage().endswith("(trainer.nnodes, now 1); or end them")
