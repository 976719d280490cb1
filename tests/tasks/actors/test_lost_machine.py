# SPDX-License-Identifier: Apache-2.0
"""A machine of a real Ray cluster is lost as by a power cut: what goes on elsewhere, and what ends the run."""

import functools
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from models.config.actor import ForwardProcessConfig
from models.schedulers.noise_keys import NoiseKey
from models.weights.canary import Canary, CanaryLimits
from tasks.actors import reward_pool, rollout_group
from tasks.actors.actor_group import ActorGroup
from tasks.actors.machines import MachineLost, watched_machines
from tasks.actors.rank_places import RankPlaces
from tasks.actors.reward_group import RewardGroup
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import TrainerGroup
from tasks.config.reward import RewardConfig
from tasks.config.trainer import TrainerConfig
from tests.support.helpers import actor_config, model_config
from tests.support.patience import PATIENCE, wait_until
from tests.support.platform_helpers import FEW_DAEMONS
from tests.support.weight_actors import PROMPTS, new_rollout

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
HOST = socket.gethostname()


class Rank:
    """What is never started again."""

    def ready(self) -> bool:
        return True


def compute(_actor: Any) -> None:
    """For longer than its machine is there."""
    time.sleep(PATIENCE)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, forked_workers: dict[str, Any]) -> Iterator[Cluster]:
    """A head that holds the driver and has no CPU for anything else; every actor of a group reserves one."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        tokens.enable_token_auth_by_default()
        tokens.ensure_token_if_auth_enabled()
        for module in (reward_pool, rollout_group):
            monkeypatch.setattr(module, "ActorGroup", functools.partial(ActorGroup, num_cpus=1))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **FEW_DAEMONS})
        try:
            ray.init(made.address, log_to_driver=False, logging_level="ERROR", runtime_env=forked_workers)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.mark.slow
def test_workers_come_back_elsewhere_and_a_lost_rank_ends_the_run_in_a_sentence(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One machine holds everything and is killed before the next iteration's calls, which Ray cannot know yet."""
    first = cluster.add_node(num_cpus=3, **FEW_DAEMONS)
    rollout = new_rollout(tiny_model, tmp_path, 1)
    reward = RewardGroup(RewardConfig(functions={"brightness": {"num_cpus": 1}}, guards={"statistics": True}))
    groups = {"trainer": ActorGroup(Rank, 1, 0, num_cpus=1), "rollout": rollout.group} | reward.groups()

    def sampled() -> tuple[np.ndarray, np.ndarray]:
        batches = rollout.submit(PROMPTS, 2, 1, (0,))
        pending = reward.submit(batches, training=True)
        return np.concatenate(ray.get([b.pictures for b in batches])).copy(), reward.table(batches, pending).rewards

    def go_on_without_it() -> None:
        with watched_machines(groups, logging.getLogger("a run"), "go on so") as watch:
            groups["trainer"].call_all("ready")
            cluster.add_node(num_cpus=3, **FEW_DAEMONS)
            cluster.remove_node(first, allow_graceful=False)
            for old, new in zip(before, sampled(), strict=True):
                assert np.array_equal(old, new)
            for name in ("rollout", "reward_brightness"):
                assert groups[name].ask_memory()()
            wait_until(lambda: caplog.text.count("is back") == 2, "word that both are back")
            assert watch.metrics() == {"machines/lost": 1.0}
            assert watch.metrics() == {}
            groups["trainer"].call_all("ready")

    before = sampled()
    with pytest.raises(MachineLost, match=rf"^machine lost: {HOST} .*, and with it trainer 0, which .*; go on so$"):
        go_on_without_it()
    (told,) = [record.getMessage() for record in caplog.records if "machine lost" in record.getMessage()]
    assert HOST in told
    assert "trainer 0, rollout 0, reward_brightness 0; rollout 0, reward_brightness 0 will be started" in told


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tiny models sample is in Ray's object store, as what larger ones do: it is lost with its machine."""
    monkeypatch.setenv("RAY_max_direct_call_object_size", "8000")


@pytest.mark.slow
def test_samples_that_are_lost_before_the_update_has_them_are_made_anew_for_it(
    small_objects: None, cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """By a worker elsewhere, which needs weights that were broadcast, while the rank that holds them waits for it."""
    cluster.add_node(num_cpus=1, **FEW_DAEMONS)
    settings = TrainerConfig(n_gpus_per_node=1, device="cpu")
    forward, places = ForwardProcessConfig(), RankPlaces(1, 1, "cpu")
    trainer = TrainerGroup(
        model_config(tiny_model), actor_config(), forward, settings, mini_batch_samples=64, places=places
    )
    ray.get(trainer.start())
    first = cluster.add_node(num_cpus=1, **FEW_DAEMONS)
    rollout = new_rollout(tiny_model, tmp_path, 1)
    rollout.wait_ready()
    rollout.settings = rollout.settings.model_copy(update={"weight_transport": "collective"})
    canary = Canary(rollout.prompt_table([prompt.uid for prompt in PROMPTS]))
    trainer.broadcast(rollout, canary, 1, CanaryLimits(), "policy")
    batches = rollout.submit(PROMPTS, 32, 1, (0,))
    ray.wait([batch.trajectories for batch in batches], num_returns=len(batches), fetch_local=False)
    advantages = np.tile(np.array([1, -1], np.float32), 32)
    groups = {"trainer": trainer.group, "rollout": rollout.group}
    with watched_machines(groups, logging.getLogger("a run"), "go on so"), ThreadPoolExecutor(1) as thread:
        cluster.add_node(num_cpus=1, **FEW_DAEMONS)
        cluster.remove_node(first, allow_graceful=False)
        updated = thread.submit(trainer.update, batches, advantages, None)
        try:
            assert updated.result(2 * PATIENCE)["optimizer_steps"] == 1.0
        finally:
            ray.kill(trainer.group.actors[0])  # else the thread would wait on


@pytest.mark.slow
def test_a_reward_is_asked_again_whose_worker_had_not_answered_where_it_is(cluster: Cluster) -> None:
    """It is asked after each iteration, and the question waits for what it computes; then its machine is lost. It has
    answered from another one by the time that its failed call is looked at."""
    first = cluster.add_node(num_cpus=1, **FEW_DAEMONS)
    reward = RewardGroup(RewardConfig(functions={"brightness": {"num_cpus": 1}}, guards={"statistics": False}))
    (group,) = reward.groups().values()
    pictures, done = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3), ray.put(0.0)
    keys = tuple(NoiseKey(0, 1, PROMPTS[0].uid, index) for index in range(4))
    finite = ray.put(np.ones(4, bool))
    batches = [PendingBatch((PROMPTS[0],) * 4, keys, (5, 0), done, ray.put(pictures), None, finite, done, 0)]
    before = reward.table(batches, reward.submit(batches, training=True)).rewards
    assert len(set(before)) == 4
    assert group.whereabouts.last(0) is not None

    group.actors[0].__ray_call__.options(max_task_retries=0).remote(compute)
    group.whereabouts.refresh()
    pending = reward.submit(batches, training=True)
    ((call,),) = pending.calls.values()
    assert group.whereabouts.machine(0) is None
    cluster.add_node(num_cpus=1, **FEW_DAEMONS)
    cluster.remove_node(first, allow_graceful=False)
    with pytest.raises(RayActorError):
        ray.get(call.answer)
    wait_until(lambda: group.whereabouts.machine(0), "the worker's word from the other machine")
    assert np.array_equal(reward.table(batches, pending).rewards, before)
