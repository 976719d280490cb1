# SPDX-License-Identifier: Apache-2.0
"""What auto stands for: the largest size that fits by hand-computed needs, once for a run; and whether it sleeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.cost.memory import GIB
from models.cost.meta_pass import PassCost
from tasks.config.errors import ConfigError
from tasks.config.tree import TrainConfig
from tasks.run.sizes import ROLLOUT, SLEEP, UPDATE, Settled, batch_sizes, settle, update_sizes
from tests.support.helpers import model_config

BOTH = {"rollout": {"micro_batch_size": "auto"}, "actor": {"ppo_micro_batch_size_per_gpu": "auto"}}


def cost(config: TrainConfig, sampling: float = 0.1) -> PassCost:
    """Of 1 GiB of parameters in fp32: an update of m samples needs 4 + 2 m GiB, a worker 4 + 5 x 0.1 m."""
    samples = config.actor_rollout_ref.actor.micro_batch
    return PassCost(
        samples=samples,
        parameters=GIB,
        frozen=GIB,
        trained=0,
        blocks=(0, 0),
        trained_blocks=(0, 0),
        frozen_blocks=(0, GIB),
        sampling_flops=1.0,
        training_flops=3.0,
        recomputed_flops=0.0,
        sampling_bytes=int(sampling * samples * GIB),
        saved_bytes=0,
        training_bytes=2 * samples * GIB,
    )


def config_with(policy: dict[str, Any] = BOTH, gib: float | None = None, **sections: Any) -> TrainConfig:
    """32 samples an iteration in two optimiser steps, on one GPU each."""
    tree = {
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {
            "rollout": {"n": 4, "pipeline": {"height": 16, "width": 24}},
            "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 1},
        },
        "trainer": {"device": "cuda", "gpu_memory_gib": gib},
    }
    return TrainConfig.model_validate(tree).with_changes({"actor_rollout_ref": policy}).with_changes(sections)


@pytest.fixture
def found(tiny_model: Path) -> Callable[..., Settled]:
    def settled(config: TrainConfig, measure: Any = cost, **given: Any) -> Settled:
        return settle(config, model_config(tiny_model, lora_rank=4), measure, **given)

    return settled


def sizes(settled: Settled) -> tuple[Any, Any]:
    policy = settled.config.actor_rollout_ref
    return policy.rollout.micro_batch_size, policy.actor.ppo_micro_batch_size_per_gpu


@pytest.mark.parametrize(
    ("gib", "size"),
    [
        (1000, 16),  # of the 32 samples of an iteration, so that a reward has something to do during the second batch
        (36.01 / 0.85, 16),  # 4 + 2 x 16
        (35.99 / 0.85, 8),
        (20.01 / 0.85, 8),
        (6.01 / 0.85, 1),
    ],
)
def test_the_largest_that_fits_is_one_number_for_rollout_and_update(
    found: Callable[..., Settled], gib: float, size: int
) -> None:
    """So that the first ratio stays exactly 1."""
    settled = found(config_with(gib=gib))
    assert sizes(settled) == (size, size)
    assert settled.said.keys() == {ROLLOUT, UPDATE}
    assert settled.said[UPDATE].startswith(f"{size}: the largest that ")
    if size == 8 and gib > 40:
        assert "with 16 the update needs 36.0 GiB on each GPU" in settled.said[UPDATE]


def test_what_is_given_holds(found: Callable[..., Settled]) -> None:
    """Beside a number the other one goes with it; a loss that repeats no log-probs has two numbers of its own."""
    update, rollout = BOTH["actor"], BOTH["rollout"]
    assert sizes(found(config_with({"rollout": rollout, "actor": {"ppo_micro_batch_size_per_gpu": 8}}, 1000))) == (8, 8)
    given = {"rollout": {"micro_batch_size": 8}, "actor": update}
    assert sizes(found(config_with(given, 1000))) == (8, 8)
    assert sizes(found(config_with(given, 17 / 0.85))) == (8, 4)
    nft = {"name": "diffusion_nft"}  # whose reference is 4 GiB more
    assert sizes(found(config_with(gib=17 / 0.85, algorithm=nft))) == (16, 4)
    rescored = {"rollout_correction": {"bypass_mode": False}}
    assert sizes(found(config_with(gib=17 / 0.85, algorithm=rescored))) == (16, 4)
    offline = {"name": "dpo", "sample_source": "offline"}
    assert sizes(found(config_with({"actor": update}, 17 / 0.85, algorithm=offline)))[1] == 4


def test_a_worker_holds_more_of_a_gpu_than_is_counted(found: Callable[..., Settled]) -> None:
    """4 + 5 x m GiB: 44 with 8 samples, where the update has 20."""

    def heavy(config: TrainConfig) -> PassCost:
        return cost(config, sampling=1.0)

    assert sizes(found(config_with(gib=44.1 / 0.85), heavy)) == (8, 8)
    assert sizes(found(config_with(gib=43.9 / 0.85), heavy)) == (4, 4)
    assert sizes(found(config_with(gib=43.9 / 0.85), heavy, trains=False)) == (4, 4)
    shared = config_with({**BOTH, "rollout": {"micro_batch_size": "auto", "num_actors": 2, "num_gpus_per_actor": 0.5}})
    shared = shared.with_changes({"trainer": {"gpu_memory_gib": 44.1 / 0.85}})
    assert sizes(found(shared, heavy)) == (2, 2)  # two workers of 14


def test_text_encoders_beside_a_measurements_rollout_count(
    found: Callable[..., Settled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 + 5 x 0.1 m GiB of a worker, 30 of text encoders on its GPU, and a process of rewards' none."""
    monkeypatch.setattr("tasks.run.capacity.encoder_bytes", lambda config: 30 * GIB)
    own = {"embeddings": "live", "text_encoder": {"device": "cuda", "placement": "colocated"}}
    pipeline = {"height": 16, "width": 24, "max_sequence_length": 8}
    rollout = {"placement": "colocated", "n": 4, "pipeline": pipeline, "micro_batch_size": "auto"}
    roomy, narrow = (
        config_with({**BOTH, "rollout": rollout}, gib / 0.85, data={"train_batch_size": 8, **own}) for gib in (80, 37)
    )
    assert sizes(found(roomy, trains=False))[0] == 16
    assert sizes(found(narrow, trains=False))[0] == 4


@pytest.mark.parametrize(("gib", "size"), [(1000, 8), (8.01 / 0.85, 8), (7.99 / 0.85, 4), (6.01 / 0.85, 4)])
def test_a_measurement_of_an_offline_recipe_settles_what_it_reads(
    found: Callable[..., Settled], gib: float, size: int
) -> None:
    """4 + 5 x 0.1 m GiB of a worker, of the 8 pictures of a step's 4 pairs; training of it starts no rollout."""
    rollout = {"micro_batch_size": "auto", "enable_sleep_mode": "auto", "placement": "colocated"}
    offline = {"name": "dpo", "sample_source": "offline"}
    config = config_with({**BOTH, "rollout": rollout}, gib, algorithm=offline)
    measured = found(config, trains=False).config.actor_rollout_ref.rollout
    assert (measured.batch_size, measured.sleeps) == (size, False)
    given = config.with_changes({"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 2}}})
    assert found(given, trains=False).config.actor_rollout_ref.rollout.batch_size == size
    assert found(given, never).config.actor_rollout_ref.rollout.micro_batch_size == "auto"


def test_sizes_go_with_the_rest_of_the_config() -> None:
    assert batch_sizes(config_with()) == [1, 2, 4, 8, 16]
    assert batch_sizes(config_with({"rollout": {"num_actors": 3}})) == [1, 2, 4]  # 2 each would be 24, 4 each 48 of 32
    assert batch_sizes(config_with({"rollout": {"num_actors": 32}})) == [1]
    per_prompt = {"sde_window_size": 1, "sde_window_per": "prompt", "sde_window_range": [0, 4]}
    assert batch_sizes(config_with({"rollout": {"algo": per_prompt, "micro_batch_size": "auto"}})) == [1, 2, 4]
    assert batch_sizes(config_with(algorithm={"name": "dpo"})) == [4, 8, 16]
    offline = {"name": "dpo", "sample_source": "offline"}
    assert update_sizes(config_with(algorithm=offline)) == [2, 4, 8], "a pair is not cut in two"
    queued = {"rollout": {"max_queued_batches": 4}}
    assert batch_sizes(config_with(queued, trainer={"one_step_off_policy": True})) == [8, 16]
    two = {"rollout": {"max_queued_batches": 4, "num_actors": 2}}  # 8 places in all
    assert batch_sizes(config_with(two, trainer={"one_step_off_policy": True})) == [4, 8]


def never(config: TrainConfig) -> PassCost:
    raise AssertionError("what is recorded is measured again")


def test_a_later_start_has_the_numbers_of_the_first_on_whatever_machine(found: Callable[..., Settled]) -> None:
    first = found(config_with(gib=1000))
    later = found(config_with(gib=1), never, recorded=first.config)
    assert sizes(later) == sizes(first) == (16, 16)
    assert later.kept == {UPDATE: 16, ROLLOUT: 16}
    assert later.said == {}


def test_a_number_that_does_not_go_with_other_ranks_is_told_with_a_way_on(found: Callable[..., Settled]) -> None:
    """Any number that is given in its place would be another run."""
    first = found(config_with(gib=1000))
    two = config_with(gib=1000, trainer={"n_gpus_per_node": 2})
    with pytest.raises(ConfigError, match=r"is auto, and was 16 at the run's first start, .* as many trainer ranks"):
        found(two, never, recorded=first.config)


def test_a_number_that_was_found_out_names_no_other_run(found: Callable[..., Settled]) -> None:
    """One digest on every machine; a number that somebody gives is another run, as ever."""
    config = config_with(gib=1000)
    settled = found(config).config
    assert settled.run_name == config.run_name
    assert settled.asked == config
    assert settled.digest() == found(config_with(gib=7.1)).config.digest()
    assert config_with({"rollout": {"micro_batch_size": 16}}).digest() != config.digest()
    assert settled.model_dump()["actor_rollout_ref"]["rollout"]["micro_batch_size"] == 16


@pytest.mark.parametrize(("gib", "sleeps"), [(28.01 / 0.85, False), (27.99 / 0.85, True)])
def test_the_rollout_sleeps_where_both_do_not_fit(found: Callable[..., Settled], gib: float, sleeps: bool) -> None:
    """20 GiB of an update of 8 samples, and 4 + 5 x 0.8 of the worker."""
    rollout = {"micro_batch_size": 8, "placement": "colocated", "enable_sleep_mode": "auto"}
    config = config_with({"rollout": rollout, "actor": {"ppo_micro_batch_size_per_gpu": 8}}, gib)
    settled = found(config)
    assert settled.config.actor_rollout_ref.rollout.sleeps == sleeps
    assert "update and rollout together take 28.0 GiB" in settled.said[SLEEP]
    assert found(config, trains=False).config.actor_rollout_ref.rollout.sleeps is False
    reads_there = {"brightness": {"placement": "colocated", "num_workers": 3}}
    beside_readers = found(config.with_changes({"reward": {"functions": reads_there}}))
    assert beside_readers.config.actor_rollout_ref.rollout.sleeps
    assert "update and rollout together take 29.5 GiB" in beside_readers.said[SLEEP], "each reader has its process"
    on_cpu = config.with_changes({"trainer": {"device": "cpu"}})
    assert found(on_cpu).config.actor_rollout_ref.rollout.sleeps is False


def test_what_cannot_be_known_asks_for_a_number(found: Callable[..., Settled]) -> None:
    with pytest.raises(ConfigError, match=f"{UPDATE} and {ROLLOUT} is auto, but what this .* cannot be counted: give"):
        found(config_with(gib=100), lambda config: None)
    with pytest.raises(ConfigError, match=r"auto, but 1 already does not fit: the update needs 6.0 GiB"):
        found(config_with(gib=7))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"sees no GPU and trainer.gpu_memory_gib is null: give a value, or say"):
            found(config_with())
    with pytest.raises(ValueError, match=r"rollout.micro_batch_size is auto, which stands for no value yet"):
        config_with().actor_rollout_ref.rollout.batch_size  # noqa: B018


def test_on_the_cpu_all_processes_share_the_machine(
    found: Callable[..., Settled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of 2 GiB sharded, 4 gathered and 2 m, and a worker of 4 + 0.1 m: 48.8 with 8 samples, of half of what
    is free."""
    monkeypatch.setattr("tasks.run.sizes.free_bytes", lambda: 98 * GIB)
    config = config_with().with_changes({"trainer": {"device": "cpu", "n_gpus_per_node": 2}})
    assert sizes(found(config)) == (8, 8)
    monkeypatch.setattr("tasks.run.sizes.free_bytes", lambda: 97 * GIB)
    assert sizes(found(config)) == (4, 4)
