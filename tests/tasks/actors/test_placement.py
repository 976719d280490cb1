# SPDX-License-Identifier: Apache-2.0
"""Which machines the trainer's ranks are on: a real Ray cluster of three nodes, whose GPUs only Ray counts."""

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from tasks.actors import rank_places as rank_places_module
from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import ClusterError, gpus_are_free, require_resources
from tasks.actors.rank_places import NODE_LABEL, RankPlaces
from tasks.actors.reward_group import RewardGroup
from tasks.config.tree import TrainConfig
from tasks.run.opening import check_resources, rank_places
from tests.support.patience import PATIENCE, wait_until
from tests.support.platform_helpers import FEW_DAEMONS

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it

Spot = tuple[str, list[int]]
"""A machine, and the GPUs of it that Ray gave."""


class Where:
    """An actor that tells where it is."""

    def spot(self) -> Spot:
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


@pytest.fixture(scope="module")
def machines(forked_workers: dict[str, Any]) -> Iterator[str]:
    """The address of a cluster of machines with 4 and 3 GPUs and one CPU each, and one with neither, as a head may be.

    With the token of this process, which Ray keeps for good.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **FEW_DAEMONS})
        try:
            for gpus in (4, 3):
                cluster.add_node(num_cpus=1, num_gpus=gpus, **FEW_DAEMONS)
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.fixture(autouse=True)
def driver(machines: str, forked_workers: dict[str, Any]) -> Iterator[None]:
    """All that a test holds of the cluster is free after it."""
    ray.init(machines, log_to_driver=False, logging_level="WARNING", runtime_env=forked_workers)
    yield
    ray.shutdown()


def config(nodes: int, ranks: int, device: str, placement: str = "separate", sharing: int = 1) -> TrainConfig:
    rollout = {"n": 2, "micro_batch_size": 2, "num_actors": nodes * ranks, "placement": placement}
    actor = {"ppo_mini_batch_size": nodes * ranks, "fsdp_config": {"ulysses_sequence_parallel_size": sharing}}
    return TrainConfig.model_validate(
        {
            "data": {"train_batch_size": nodes * ranks},
            "actor_rollout_ref": {"rollout": rollout, "actor": actor},
            "trainer": {"nnodes": nodes, "n_gpus_per_node": ranks, "device": device},
        }
    )


def spots(asked: TrainConfig, groups: int = 1) -> list[list[Spot]]:
    """Where the actors of as many groups are, each as large as the trainer and placed like it."""
    places, count = rank_places(asked), asked.trainer.world_size
    running = [ActorGroup(Where, count, places.num_gpus, places=places) for _ in range(groups)]
    return [group.call_all("spot") for group in running]


def per_machine(found: list[Spot]) -> list[int]:
    return sorted(Counter(machine for machine, _ in found).values())


def test_each_machine_has_its_ranks_and_a_sequence_stays_on_one() -> None:
    (found,) = spots(config(2, 2, "cuda", sharing=2))
    assert per_machine(found) == [2, 2]
    assert found[0][0] == found[1][0]
    assert found[2][0] == found[3][0]
    assert len({(machine, *gpus) for machine, gpus in found}) == 4
    with pytest.raises(ValueError, match=r"on one machine, so trainer.n_gpus_per_node 3 must be a multiple of it"):
        config(2, 3, "cuda", sharing=2)


def test_ranks_of_one_machine_are_not_spread() -> None:
    (found,) = spots(config(1, 4, "cuda"))
    assert per_machine(found) == [4]


@pytest.mark.parametrize(
    ("nodes", "ranks", "held"),
    [
        pytest.param(1, 3, {4: 2, 3: 1}, id="two GPUs of each are free"),
        pytest.param(2, 2, {3: 2}, id="all of one are free"),
    ],
)
def test_machines_that_others_use_are_waited_for(
    nodes: int, ranks: int, held: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is told. Ranks of one machine are not spread over two for what is free, nor those of two put on one."""
    monkeypatch.setattr(rank_places_module, "WAIT_WARNING_S", 2)
    sizes = {node["Resources"].get("GPU", 0): node["NodeID"] for node in ray.nodes()}
    others = [
        placement_group([{"GPU": 1}] * count, bundle_label_selector=[{NODE_LABEL: sizes[size]}] * count)
        for size, count in held.items()
    ]
    assert all(group.wait(PATIENCE) for group in others)
    found: list[RankPlaces] = []
    waiting = threading.Thread(target=lambda: found.append(RankPlaces(nodes, ranks, "cuda")))
    waiting.start()
    wait_until(lambda: found or "waiting for GPUs of the Ray cluster that others hold" in caplog.text, "word of it")
    assert not found
    for group in others:
        remove_placement_group(group)
    waiting.join(PATIENCE)
    running = ActorGroup(Where, nodes * ranks, 1.0, places=found[0])
    assert per_machine(running.call_all("spot")) == [ranks] * nodes


def test_a_run_may_take_all_that_there_is_and_no_more() -> None:
    require_resources(7, 2)
    with pytest.raises(ClusterError, match=r"needs 7\.5 GPUs .* but the Ray cluster has 7: lower them"):
        require_resources(7.5, 2)
    with pytest.raises(ClusterError, match=r"reserve 2\.5 CPUs .* but the Ray cluster has 2: lower them"):
        require_resources(7, 2.5)


def test_colocated_workers_are_on_their_ranks_gpus() -> None:
    ranks, workers = spots(config(2, 2, "cuda", "colocated"), groups=2)
    assert ranks == workers
    assert per_machine(ranks) == [2, 2]
    assert len({(machine, *gpus) for machine, gpus in ranks}) == 4


def test_a_clusters_gpus_are_free_until_a_run_has_one_of_them() -> None:
    wait_until(gpus_are_free, "the GPUs of the test before")
    half = ActorGroup(Where, 1, 0.5)
    half.call_all("spot")
    wait_until(lambda: not gpus_are_free(), "word that an actor has one")


def test_on_cpus_ranks_take_none_so_that_all_may_be_reserved() -> None:
    rewards = ActorGroup(Where, 2, 0, num_cpus=1)
    assert per_machine(rewards.call_all("spot")) == [1, 1]
    (found,) = spots(config(2, 3, "cpu"))
    assert per_machine(found) == [3, 3]
    assert found[0][0] == found[1][0] == found[2][0]


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_text_encoders_share_the_gpu_of_the_first_rank(placement: str) -> None:
    """With a rollout worker there, or without; beside those that have shares of their own, nobody is on it."""
    length = {"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 8}}}}
    encoder = {"device": "cuda", "placement": "colocated"}
    asked = config(1, 3, "cuda", placement).with_changes(length)
    asked = asked.with_changes({"data": {"embeddings": "live", "text_encoder": encoder}})
    places = rank_places(asked)
    shared = 1 + (placement == "colocated")
    running = [ActorGroup(Where, 3, places.num_gpus, places=places) for _ in range(shared)]
    ranks, *workers = [group.call_all("spot") for group in running]
    (spot,) = ActorGroup(Where, 1, places.num_gpus, places=places).call_all("spot")
    assert spot == ranks[0]
    assert workers == [ranks] * (shared - 1)
    assert asked.gpus == 3 * (1 if placement == "colocated" else 2)


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_rewards_share_the_gpus_of_the_ranks(placement: str) -> None:
    """Worker by worker, from the first rank's on; and take none besides."""
    functions = {
        "brightness": {"placement": "colocated", "num_workers": 4},
        "shapes": {"placement": "colocated"},
        "jpeg_compressibility": {},
    }
    asked = config(1, 3, "cuda", placement).with_changes({"reward": {"functions": functions}})
    assert asked.gpus == 3 * (1 if placement == "colocated" else 2)
    assert asked.holds_places(trains=False)
    places = rank_places(asked)
    together = 1 + (placement == "colocated")
    running = [ActorGroup(Where, 3, places.num_gpus, places=places) for _ in range(together)]
    ranks, *_ = [group.call_all("spot") for group in running]
    pools = RewardGroup(asked.reward, places=places).pools
    found = {name: pool.group.call_all("__ray_call__", spot_of) for name, pool in pools.items()}
    assert found["brightness"] == [*ranks, ranks[0]]
    assert found["shapes"] == ranks[:1]
    assert [gpus for _, gpus in found["jpeg_compressibility"]] == [[]]


def test_a_validation_of_an_offline_recipe_has_room_for_its_rewards() -> None:
    """Which its training has none of."""
    offline = {"algorithm": {"name": "dpo", "sample_source": "offline"}}
    rewards = {"reward": {"functions": {"brightness": {"placement": "colocated", "num_workers": 4}}}}
    asked = config(1, 3, "cuda").with_changes(offline | rewards)
    places = rank_places(asked)
    assert places.num_gpus * (1 + 2) <= 1, "of the first place, which has two of the four"
    (pool,) = RewardGroup(asked.reward, places=places).pools.values()
    spots_found = pool.group.call_all("__ray_call__", spot_of)
    assert spots_found[3] == spots_found[0]


def spot_of(actor: object) -> Spot:
    """Where it is."""
    return Where().spot()


def test_text_encoders_without_a_gpu_are_refused() -> None:
    length = {"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 8}}}}
    live = {"embeddings": "live", "text_encoder": {"device": "cuda", "num_gpus": 8}}
    with pytest.raises(ClusterError, match=r"needs 8 GPUs .* data.text_encoder.num_gpus\) but .* has 7: .*to cpu"):
        check_resources(config(1, 1, "cpu").with_changes(length).with_changes({"data": live}))


@pytest.mark.parametrize(
    ("nodes", "ranks", "device", "message"),
    [
        (
            2,
            4,
            "cuda",
            r"nnodes 2 x .*n_gpus_per_node 4 .* 2 machines with 4 GPUs each, .* has 1 .* \(GPUs .*: 4, 3, 0",
        ),
        (1, 5, "cuda", r"n_gpus_per_node 5 asks for 1 machines with 5 GPUs each, but the Ray cluster has 0"),
        (
            3,
            1,
            "cpu",
            r"nnodes 3 x .* asks for 3 machines, but the Ray cluster has 2 .* \(CPUs of its machines: 1, 1, 0",
        ),
    ],
)
def test_what_the_machines_cannot_hold_is_refused(nodes: int, ranks: int, device: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        rank_places(config(nodes, ranks, device))
