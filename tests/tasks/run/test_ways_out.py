# SPDX-License-Identifier: Apache-2.0
"""What is advised where an update does not fit its GPU: what fits GPU and machine, or a sentence that nothing does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from models.cost.memory import GIB
from models.cost.meta_pass import PassCost
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.run.capacity import (
    REWARD_PROCESS,
    DoesNotFit,
    Model,
    colocated_rewards,
    needs,
    uncounted_rewards,
    update_of_rank,
)
from tasks.run.gpu_capacity import check_fits, shortfall
from tasks.run.host_check import check_host
from tests.models.cost.test_memory import COST
from tests.models.cost.test_memory import run_config as separate
from tests.support.helpers import model_config
from tests.support.tiny_judges import save_clip
from tests.tasks.run.test_host_capacity import run_config as colocated

FSDP = "actor.fsdp_config"
FEWER = f"lower actor.ppo_micro_batch_size_per_gpu, now 4, or set {FSDP}.gradient_checkpointing to true"
LORA = "train LoRA with model.lora_rank"
NO_COPY = "set trainer.async_checkpoint to false"


def gpus(number: int) -> str:
    return f"train on {number} GPUs or more (trainer.n_gpus_per_node, now 1)"


def keeps(setting: str, gib: float, there: float) -> str:
    return f"{FSDP}.{setting} would keep {gib:.1f} GiB in the machine's memory, which has {there:.1f}"


def refusal(config: TrainConfig, cost: PassCost = COST, **model: Any) -> str:
    """What follows the numbers."""
    with pytest.raises(DoesNotFit) as refused:
        check_fits(config, model_config(config.actor_rollout_ref.model.path, **model), cost)
    return str(refused.value).partition(" but there are ")[2].partition(": ")[2]


@pytest.mark.parametrize(
    ("gpu", "host", "advised"),
    [
        # A checkpoint's copy takes 3000 GiB of the host, offloaded weights and gradients 2000, the moments 2000.
        (2200, 7000, f"set {FSDP}.param_offload to true, or {LORA}, or {gpus(4)}"),
        (2200, 6999, f"set {FSDP}.param_offload to true and {NO_COPY}, or {LORA}, or {gpus(4)}"),
        (2200, 4000, f"set {FSDP}.param_offload to true and {NO_COPY}, or {LORA}, or {gpus(4)}"),
        (2200, 3999, f"{LORA}, or {gpus(4)}; {keeps('param_offload', 4000, 3999)}"),
        # Of 4340 GiB the moments' 2000 are too many only beside the activations' 40.
        (
            4310,
            5000,
            f"{FEWER}, or set {FSDP}.optimizer_offload to true, or set {FSDP}.param_offload to true and {NO_COPY}, "
            f"or {LORA}, or set model.dtype to bfloat16, or {gpus(2)}",
        ),
        (
            4310,
            1999,
            f"{FEWER}, or {LORA}, or set model.dtype to bfloat16, or {gpus(2)}; "
            f"{keeps('optimizer_offload', 2000, 1999)}",
        ),
        # Whole gradients take 1000, on however many GPUs.
        (
            700,
            7000,
            f"set {FSDP}.shard_gradients and {FSDP}.param_offload to true, or {gpus(25)} and set "
            f"{FSDP}.shard_gradients to true",
        ),
        (
            700,
            100,
            f"no setting makes it fit on so many; {keeps('param_offload', 4000, 100)}; {gpus(25)} and set "
            f"{FSDP}.shard_gradients to true",
        ),
        (139.8, 7000, "neither settings nor more GPUs make it fit: take larger GPUs, or a smaller model"),
    ],
)
def test_what_is_advised_fits_gpu_and_machine(tiny_model: Path, gpu: float, host: float, advised: str) -> None:
    assert refusal(separate(tiny_model, gpu_memory_gib=gpu, host_memory_gib=host)) == advised


@pytest.mark.parametrize(
    ("gpu", "host", "fsdp", "asynchronous"),
    [
        (2200, 7000, ["param_offload"], True),
        (2200, 4000, ["param_offload"], False),
        (4310, 5000, ["optimizer_offload"], True),
        (700, 7000, ["param_offload", "shard_gradients"], True),
    ],
)
def test_a_run_that_follows_the_advice_passes_both_checks(
    tiny_model: Path, gpu: float, host: float, fsdp: list[str], asynchronous: bool
) -> None:
    model, config = model_config(tiny_model), separate(tiny_model, gpu_memory_gib=gpu, host_memory_gib=host)
    changes = {"actor_rollout_ref": {"actor": {"fsdp_config": dict.fromkeys(fsdp, True)}}}
    changes |= {"trainer": {"async_checkpoint": asynchronous}}
    followed = config.with_changes(changes)
    sampling = replace(COST, sampling_bytes=0, parameters=0)  # of the rollout nothing, which is another question
    needed = needs(followed, model, COST)._replace(rollout=needs(followed, model, sampling).rollout)
    assert shortfall(followed, needed, gpu) is None
    assert check_host(followed, needed) is not None


@pytest.mark.parametrize(("gpu", "shards", "least"), [(2200, False, 4), (4310, False, 2), (700, True, 25)])
def test_the_number_of_gpus_is_the_least(tiny_model: Path, gpu: float, shards: bool, least: int) -> None:
    fsdp = {"actor_rollout_ref": {"actor": {"fsdp_config": {"shard_gradients": shards}}}}
    config, model = separate(tiny_model).with_changes(fsdp), Model(model_config(tiny_model), COST)
    assert update_of_rank(config, model, least).gib <= gpu < update_of_rank(config, model, least - 1).gib


def test_several_machines_are_counted_together(tiny_model: Path) -> None:
    config = separate(tiny_model, gpu_memory_gib=2200, host_memory_gib=10).with_changes(
        {
            "trainer": {"nnodes": 2},
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}},
        }
    )
    assert "train on 4 GPUs or more (trainer.n_gpus_per_node, now 1, times trainer.nnodes, now 2)" in refusal(config)


def test_a_machine_that_is_not_known_may_hold_what_is_offloaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a cluster's first node: it is not checked afterwards either."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert refusal(separate(tiny_model, gpu_memory_gib=2200)).startswith(f"set {FSDP}.param_offload to true, or ")


def test_a_rollout_sleeps_only_where_the_machine_has_room_for_it(tiny_model: Path) -> None:
    """Of 40 GiB for the update and 1 + 8 for the rollout, 1 moves; the checkpoint's copy takes nothing."""
    cost = replace(COST, trained=0, blocks=(0, 0), trained_blocks=(0, 0), frozen=0, parameters=GIB // 4)
    rollout = {"enable_sleep_mode": False, "name": "diffusers"}
    for host, said in (
        (5, "rollout.enable_sleep_mode is false: set it to true"),
        (0.9, "rollout.enable_sleep_mode is false: true would keep 1.0 GiB in the machine's memory, which has 0.9; "),
    ):
        config = colocated(tiny_model, lora=4, rollout=rollout, gpu_memory_gib=45, host_memory_gib=host)
        with pytest.raises(DoesNotFit) as refused:
            check_fits(config, model_config(tiny_model, lora_rank=4), cost)
        assert said in str(refused.value)
    assert str(refused.value).endswith("set rollout.placement to separate")


def test_text_encoders_go_to_the_host_only_where_it_has_room(tiny_model: Path) -> None:
    data = {"embeddings": "live", "text_encoder": {"device": "cuda", "placement": "colocated"}}
    policy = {"rollout": {"pipeline": {"max_sequence_length": 24}}}
    for host, said in ((3500, "to separate, or its device to cpu"), (3005, "to separate; its device cpu would keep 3")):
        config = separate(tiny_model, host_memory_gib=host).with_changes({"data": data, "actor_rollout_ref": policy})
        needed = needs(config, model_config(tiny_model), COST)._replace(encoders=10.0 * GIB)
        assert said in str(shortfall(config, needed, 3000))


def test_rewards_on_the_trainers_gpus_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    """Of three workers on two ranks' GPUs the first has two, each with its process and its model."""
    model = save_clip(tmp_path / "clip")
    options = {"model": str(model), "device": "cuda", "dtype": "bfloat16"}
    numbers = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    base = separate(tiny_model).with_changes({"trainer": {"n_gpus_per_node": 2}})

    def counted(**changes: Any) -> float:
        entry = {"reward": "clip_score", "placement": "colocated", "num_workers": 3, "options": options} | changes
        return colocated_rewards(base.with_changes({"reward": {"functions": {"seen": entry}}}))

    assert counted() == 2 * (REWARD_PROCESS + 2 * numbers)
    there = base.with_changes({"reward": {"functions": {"brightness": {"placement": "colocated"}}}})
    for samples, rewards in ((True, REWARD_PROCESS), (False, 0.0)):  # offline training starts no rewards
        assert needs(there, model_config(tiny_model), COST, samples).rewards == rewards
    assert counted(options=options | {"dtype": "float32"}) == 2 * (REWARD_PROCESS + 4 * numbers)
    assert counted(num_workers=2) == REWARD_PROCESS + 2 * numbers
    assert counted(placement="separate", num_gpus=1.0) == 0
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"reward\.functions\.seen: a model is .*clip, whose .*cannot be read"):
        counted()


def test_a_reward_on_a_gpu_that_nothing_counts_is_told() -> None:
    reads = {"reward": "ocr", "options": {"device": "cuda"}}
    entries = {"first": reads, "second": reads | {"num_gpus": 0.5}, "third": reads | {"placement": "colocated"}}
    config = TrainConfig.model_validate({"reward": {"functions": entries}, "trainer": {"device": "cuda"}})
    said = uncounted_rewards(config)
    assert said is not None
    assert said.startswith("reward.functions.first: the option device is cuda, but num_gpus is 0, so all workers take")
    assert uncounted_rewards(TrainConfig()) is None


def test_a_reward_that_leaves_the_update_no_room_is_to_go_elsewhere(tiny_model: Path) -> None:
    """The update has 4340 GiB, and 4000 with LoRA and no activations; each of two readers half of one."""
    reads = {"brightness": {"placement": "colocated", "num_workers": 2}}
    config = separate(tiny_model, gpu_memory_gib=4340.5).with_changes({"reward": {"functions": reads}})
    advised = refusal(config)
    assert advised.startswith("set reward.functions.brightness.placement to separate, or ")
    elsewhere = {"reward": {"functions": {"brightness": {"placement": "separate", "num_gpus": 1.0}}}}
    needed = check_fits(config.with_changes(elsewhere), model_config(tiny_model), COST)
    assert needed is not None
    assert needed.rewards == 0
    assert "placement to separate" not in refusal(config.with_changes({"trainer": {"gpu_memory_gib": 4000}}))


def test_a_sleep_that_is_auto_is_counted_where_update_and_rollout_have_no_room_together(tiny_model: Path) -> None:
    """`sizes` asks for its advice before it has settled that."""
    config = colocated(tiny_model, rollout={"enable_sleep_mode": "auto"}, gpu_memory_gib=2200, host_memory_gib=7000.5)
    assert refusal(config).startswith(f"set {FSDP}.param_offload to true, or ")
