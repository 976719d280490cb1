# SPDX-License-Identifier: Apache-2.0
"""Weights reach the rollout workers by every way with equal bits, also after one of them died."""

import copy
import os
import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from models.rollout.vllm_omni.weight_loads import FullLoad
from models.samples.trajectories import PromptTable
from models.weights.buckets import HostBucket, buckets, byte_count, export_handle, from_host, pack, to_host, unpack
from models.weights.canary import Canary, CanaryLimits
from models.weights.trainable import TrainableLoad, WeightSyncError
from tasks.actors.messages import CanaryAnswer, GatheredWeights, HeldByTrainer, Proof, ask
from tasks.actors.rollout_group import RolloutGroup
from tasks.actors.rollout_worker import RolloutWorker, copied_by
from tasks.actors.router import Router
from tasks.actors.weight_transport import Arrival, Courier, Parcel, Route
from tasks.config.rollout import DiffusionRolloutConfig
from tasks.config.tree import TrainConfig
from tasks.system.stopwatch import Stopwatch
from tests.support.helpers import model_config, rollout_request
from tests.support.processes import pid_of
from tests.support.weight_actors import (
    BUCKET,
    PROMPTS,
    Actors,
    answer_after,
    answer_as_before,
    asked_for,
    assert_equal,
    at_once,
    fail_at,
    fail_no_more,
    has_model,
    hold_any,
    leave_a_mark,
    meet_when_sampling,
    mend,
    pictures,
    sample_as_before,
    spoil,
    started,
)

DIRECT = ("ipc", "collective")
SECONDS_OF_TRAINER = ("gather", "trainer_canary")
SECONDS_OF_WORKER = ("load", "digests", "rollout_canary", "wait", "compare")


def kill(worker: Any) -> None:
    """At once: Ray's own way would let it sample once more."""
    os.kill(pid_of(worker), signal.SIGKILL)


@pytest.fixture(scope="module")
def actors(one_block_model: Path, tmp_path_factory: pytest.TempPathFactory, shared_forks: None) -> Iterator[Actors]:
    """Two ranks and two workers on the CPU."""
    with started(one_block_model, tmp_path_factory.mktemp("transport")) as running:
        yield running


@pytest.mark.parametrize("transport", ["object_store", *DIRECT])
def test_workers_hold_the_trainers_bits(actors: Actors, transport: str) -> None:
    synced, _ = actors.sync(transport)
    weights = actors.held()
    assert_equal(weights)
    bytes_of_one = sum(tensor.nbytes for tensor in weights[0].values())
    assert bytes_of_one > 3 * BUCKET * 2**20
    assert synced.seconds.keys() == {*SECONDS_OF_TRAINER, *SECONDS_OF_WORKER}
    metrics = synced.metrics()
    assert metrics.pop("sync/canary_change", 1.0) > 1e-3  # none at the first sync
    assert metrics.pop("sync/canary_missing", 0.0) == 0.0
    assert metrics == {"sync/canary_difference": 0.0, "sync/gib": bytes_of_one / 2**30}


@pytest.mark.parametrize("transport", ["object_store", "ipc"])
def test_a_worker_proves_its_part_while_the_trainer_is_at_its_own(
    actors: Actors, transport: str, tmp_path: Path
) -> None:
    """Here the trainer's canary waits for the worker's, which nothing of the trainer's may keep waiting."""
    mark = tmp_path / "asked"
    ray.get([rank.__ray_call__.remote(answer_after, mark) for rank in actors.trainer.group.actors])
    actors.rollout.group.call_all("__ray_call__", leave_a_mark, mark)
    try:
        synced, _ = actors.sync(transport)
    finally:
        for group in (actors.trainer.group, actors.rollout.group):
            group.call_all("__ray_call__", answer_as_before)
    assert synced.agreement.difference == 0.0
    assert mark.exists()


def test_a_worker_has_two_batches_in_hand_and_all_else_in_turn(actors: Actors) -> None:
    """Each batch waits here for another one of the same worker; other calls would find weights half loaded."""
    _, group = actors.sync("object_store")
    group.router = InTurn(len(group.group.actors))
    before = drawn_twice(group)
    group.group.call_all("__ray_call__", meet_when_sampling)
    try:
        assert np.array_equal(drawn_twice(group), before)
    finally:
        group.group.call_all("__ray_call__", sample_as_before)
    worker = group.group.actors[0]
    assert ray.get([worker.__ray_call__.remote(at_once) for _ in range(4)]) == [1] * 4


class InTurn(Router):
    """Each worker has as many batches as the others, however soon it is done with them."""

    def __init__(self, workers: int):
        super().__init__(workers, 2)
        self._next = cycle(range(workers))

    def next_free(self) -> int:
        return next(self._next)


def drawn_twice(group: RolloutGroup) -> np.ndarray:
    """The pictures of two batches for each worker."""
    batches = group.submit(PROMPTS, 4, 1, ())
    assert len(batches) == 2 * len(group.group.actors)
    return np.concatenate(ray.get([batch.pictures for batch in batches]))


def test_a_request_for_samples_carries_no_embeddings(actors: Actors) -> None:
    """Nor weights: each goes with the number of those that it is to come from."""
    own = actors.canary.prompts
    many = PromptTable(own.prompt_embeds.repeat(500, 1, 1), own.prompt_embeds_mask.repeat(500, 1))
    wide = copy.copy(actors)
    wide.canary = Canary(many, rows=2)
    _, group = wide.sync("object_store")
    assert many.prompt_embeds.nbytes > 100_000
    assert len(ray.cloudpickle.dumps(group.weights)) < 30_000
    assert_equal(actors.held())


@pytest.mark.parametrize("transport", DIRECT)
def test_no_copy_in_the_object_store_is_needed(actors: Actors, transport: str) -> None:
    """Without restarts none is made, so the weights can only have come directly."""
    _, group = actors.sync(transport, max_restarts=0)
    assert group.weights is not None
    assert not group.weights.source
    assert_equal(actors.held())


@pytest.mark.parametrize("trains_meanwhile", [False, True])
@pytest.mark.parametrize("transport", DIRECT)
def test_a_worker_that_dies_comes_back_to_the_weights_and_to_the_next_sync(
    actors: Actors, transport: str, trains_meanwhile: bool
) -> None:
    """Out of the copy that was made where the trainer goes on, or may wait for the worker; else from the trainer."""
    _, group = actors.sync(transport, trains_meanwhile=trains_meanwhile)
    assert group.weights is not None
    (source,) = map(ray.get, group.weights.source)
    assert isinstance(source, HeldByTrainer) == (transport == "ipc" and not trains_meanwhile)
    before = pictures(group)
    kill(actors.rollout.group.actors[0])
    assert np.array_equal(pictures(group), before)
    assert_equal(actors.held())
    synced, group = actors.sync(transport)
    assert synced.agreement.difference == 0.0
    assert synced.agreement.change is not None, "the trainer's velocity of the sync before is compared with, too"
    assert synced.agreement.change > 1e-3
    assert_equal(actors.held())
    assert not np.array_equal(pictures(group), before)


def test_workers_that_die_at_once_all_come_back_from_the_trainer(actors: Actors) -> None:
    """Each asks all ranks, which answer in whatever order."""
    _, group = actors.sync("ipc")
    before = pictures(group)
    for worker in actors.rollout.group.actors:
        kill(worker)
    assert np.array_equal(pictures(group), before)
    assert_equal(actors.held())


def test_a_worker_that_comes_back_hears_of_a_rank_that_cannot_copy(actors: Actors) -> None:
    """Rank 0 waits for it, and would until torch's timeout."""
    _, group = actors.sync("ipc")
    with failing_second_rank(actors, ["weights"], whole_weights=1):
        kill(actors.rollout.group.actors[0])
        with pytest.raises(MemoryError, match="no room for whole_weights"):
            pictures(group)
    actors.sync("ipc")
    assert_equal(actors.held())


@pytest.mark.parametrize("with_policy", [True, False])
def test_a_worker_that_slept_without_the_weights_asks_for_them_before_it_samples(
    actors: Actors, with_policy: bool
) -> None:
    """During the update it does not keep what new weights follow; while MLflow is away it does."""
    _, group = actors.sync("ipc")
    before = pictures(group)
    ranks = actors.trainer.group
    ranks.call_all("__ray_call__", hold_any)
    group.settings = group.settings.model_copy(update={"placement": "colocated"})
    with group.asleep(Stopwatch(), with_policy):
        pass
    assert np.array_equal(pictures(group), before)
    times = 0 if with_policy else len(group.group)
    assert ranks.call_all("__ray_call__", asked_for) == [["policy"] * times] * len(ranks)


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_worker_that_dies_asleep_loads_no_model_before_it_is_woken(
    actors: Actors, one_block_model: Path, sleeps: bool
) -> None:
    """Ray starts it again in the middle of the update, whose memory is the trainer's."""
    settings = DiffusionRolloutConfig(placement="colocated", enable_sleep_mode=sleeps)
    worker = (
        ray.remote(RolloutWorker)
        .options(num_cpus=0, max_restarts=2, max_task_retries=-1)
        .remote(model_config(one_block_model), settings, "cpu")
    )
    assert ray.get(worker.__ray_call__.remote(has_model))
    ray.get(worker.sleep.remote())
    kill(worker)
    assert ray.get(worker.__ray_call__.remote(has_model)) is not sleeps
    ray.get(worker.sleep.remote(with_policy=False))
    ray.get(worker.wake.remote())
    assert ray.get(worker.__ray_call__.remote(has_model))
    kill(worker)  # awake: what is asked for next needs the model
    sampled = worker.generate.remote(rollout_request(), None, None)
    assert ray.get(sampled).finite.all()


def test_a_worker_takes_no_weights_that_the_trainer_holds_no_more(actors: Actors) -> None:
    """Samples of others would be told as of these."""
    _, group = actors.sync("ipc")
    actors.change()
    kill(actors.rollout.group.actors[0])
    with pytest.raises(WeightSyncError, match=r"holds something else"):
        pictures(group)
    actors.sync("ipc")
    assert_equal(actors.held())


def test_a_sender_hears_of_a_receiver_that_fails(actors: Actors) -> None:
    """It has waited for all then: what it shows them of its memory is theirs until they are done."""

    class Receiver:
        def take(self, parcel: Parcel) -> None:
            raise MemoryError(f"no room for bucket {parcel.index}")

    worker = ray.remote(Receiver).options(num_cpus=0).remote()
    with pytest.raises(MemoryError, match="no room for bucket 3"):
        Courier("cpu").send(1, 3, {"weight": torch.ones(2)}, Route("ipc", (worker,)))
    ray.kill(worker)


def test_weights_that_did_not_all_come_are_taken_from_the_copy(actors: Actors) -> None:
    """As when a worker dies during a transfer: the new process sees only the later buckets."""
    actors.sync("ipc")
    slots, flat = pack({name: tensor + 1 for name, tensor in actors.held()[0].items()})
    late = Parcel(99, 1, slots, Courier("cpu").place(), export_handle(flat))
    actors.rollout.group.call_all("take", late)
    ranks = actors.trainer.group.actors
    whole, *_ = [ask(GatheredWeights, rank.gather_weights, "policy") for rank in ranks]
    answer, *_ = [ask(CanaryAnswer, rank.canary, actors.canary, "policy") for rank in ranks]
    proof, canary = Proof(whole.digests, answer.velocity), ray.put(actors.canary)
    loaded = actors.rollout.load_weights(whole.tensors, canary, proof, 0, CanaryLimits(), sent=(99, 2))
    assert loaded.agreement == (0.0, None, None)
    assert_equal(actors.held())


@pytest.mark.parametrize(("transport", "repacks"), [("object_store", False), ("ipc", False), ("ipc", True)])
def test_weights_that_came_as_others_are_named(actors: Actors, transport: str, repacks: bool) -> None:
    """Before any velocity is looked at, and whether or not the engine shows its own weights."""
    first = actors.rollout.group.actors[0]
    ray.get(first.__ray_call__.remote(spoil, repacks))
    with pytest.raises(WeightSyncError, match=r"holds something else .* of \d+ tensors differ .* \['[a-z_]+[.]"):
        actors.sync(transport)
    ray.get(first.__ray_call__.remote(mend))
    for way in ("object_store", *DIRECT):
        assert actors.sync(way)[0].agreement.difference == 0.0


@pytest.mark.parametrize(
    ("transport", "trains_meanwhile", "times"), [("object_store", True, 2), ("ipc", True, 3), ("ipc", False, 2)]
)
def test_every_rank_sends_proves_and_copies_the_weights_that_are_asked_for(
    actors: Actors, transport: str, trains_meanwhile: bool, times: int
) -> None:
    """A validation of the average, else, would be one of the policy; and a worker that dies would come back to that."""
    ranks = actors.trainer.group
    ranks.call_all("__ray_call__", hold_any)
    _, group = actors.sync(transport, "average", trains_meanwhile)
    assert group.weights is not None
    for source in map(ray.get, group.weights.source):
        if isinstance(source, HeldByTrainer):
            copied_by(source)
            times += 1
    assert ranks.call_all("__ray_call__", asked_for) == [["average"] * times] * len(ranks)


@contextmanager
def failing_second_rank(
    actors: Actors, makes_up: Sequence[str], after: Path | None = None, **failing: int
) -> Iterator[None]:
    """Rank 1 fails from these calls of its engine's methods on, where rank 0 waits for it, and not before the file
    `after` is there; afterwards it makes up for what the other waits for, so that both can be used again."""
    second = actors.trainer.group.actors[1]
    ray.get([second.__ray_call__.remote(fail_at, method, call, after) for method, call in failing.items()])
    try:
        yield
    finally:
        second.__ray_call__.remote(fail_no_more)
        for method in makes_up:
            getattr(second, method).remote(*[actors.canary] * (method == "canary"), "policy")
        actors.trainer.group.begun = ()
        ray.get([rank.__ray_ready__.remote() for rank in actors.trainer.group.actors])


@pytest.mark.parametrize(
    ("failing", "makes_up"),
    [
        ({"canary_velocity": 1}, ["canary"]),
        ({"whole_weights": 1, "canary_velocity": 1}, ["gather_weights", "canary"]),
    ],
)
def test_an_error_of_any_rank_ends_the_sync(actors: Actors, failing: dict[str, int], makes_up: list[str]) -> None:
    """Workers wait for rank 0, and that for the one that failed: until torch's timeout, whose error hides the cause."""
    with failing_second_rank(actors, makes_up, **failing), pytest.raises(MemoryError, match="no room for "):
        actors.sync("object_store")
    assert actors.sync("object_store")[0].agreement.difference == 0.0


def test_an_error_of_any_rank_ends_the_direct_sync(actors: Actors) -> None:
    with (
        failing_second_rank(actors, ["canary", "weights"], canary_velocity=1, whole_weights=2),
        pytest.raises(MemoryError, match="no room for canary_velocity"),
    ):
        actors.sync("ipc", trains_meanwhile=True)
    assert actors.sync("ipc")[0].agreement.difference == 0.0


def test_a_rank_that_fails_at_the_copy_is_heard_by_what_is_asked_next(actors: Actors, tmp_path: Path) -> None:
    """The sync does not wait for the copy, which fails once it is over; then rank 0 answers nothing more."""
    synced = tmp_path / "synced"
    with failing_second_rank(actors, ["weights"], after=synced, whole_weights=2):
        assert actors.sync("ipc", trains_meanwhile=True)[0].agreement.difference == 0.0
        synced.touch()
        with pytest.raises(MemoryError, match="no room for whole_weights"):
            actors.trainer.group.ask_memory()()
    assert_equal(actors.held())


def test_a_worker_without_the_weights_samples_nothing(actors: Actors) -> None:
    """The last test with these actors: one of them holds nothing from now on."""
    _, group = actors.sync("ipc", max_restarts=0)
    kill(actors.rollout.group.actors[1])
    with pytest.raises(WeightSyncError, match=r"did not reach a rollout worker, and rollout.max_restarts is 0"):
        pictures(group)
    parcel = Parcel(1, 0, (), "another machine", b"handle")
    with pytest.raises(WeightSyncError, match=r"trainer \(another machine\) and rollout .* use object_store"):
        Courier("cpu").receive(parcel)


def test_buckets_are_whole_tensors_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
    weights = {f"w{i}": torch.randn(3 + i, 5, generator=generator).to(kinds[i % 4]) for i in range(9)}
    weights |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    cut = list(buckets(weights.items(), limit=200))
    sizes = [[tensor.nbytes for tensor in bucket.values()] for bucket in cut]
    assert len(cut) > 3
    for inside in sizes[:-1]:  # each reaches the limit, and not before its last tensor
        assert sum(inside) >= 200 > sum(inside[:-1])
    assert max(map(len, sizes)) > 1
    assert [name for bucket in cut for name in bucket] == list(weights)
    for bucket in cut:
        slots, flat = pack(bucket)
        assert len(flat) == byte_count(slots)
        for name, tensor in unpack(slots, flat).items():
            assert tensor.dtype == weights[name].dtype
            assert torch.equal(tensor, weights[name])
    assert len(list(buckets(weights.items(), limit=10**9))) == 1


def test_weights_in_host_memory_pass_between_processes_as_they_lie_there() -> None:
    """Pickled by themselves they would be copied piece by piece, there and back."""
    weights = {"w": torch.randn(300, 5), "half": torch.randn(7).bfloat16(), "scalar": torch.tensor(3.5)}
    weights |= {"turned": torch.randn(4, 3).t(), "empty": torch.zeros(0, 4)}
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(to_host(weights), protocol=5, buffer_callback=buffers.append)
    assert len(text) < 3000
    assert sum(buffer.raw().nbytes for buffer in buffers) >= sum(tensor.nbytes for tensor in weights.values())
    sent = [bytes(buffer.raw()) for buffer in buffers]  # as Ray gives them to the receiver: nothing can be written
    arrived: HostBucket = pickle.loads(text, buffers=sent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = from_host(arrived, "cpu")
    assert list(opened) == list(weights)
    for name, tensor in opened.items():
        assert (tensor.dtype, tensor.shape) == (weights[name].dtype, weights[name].shape)
        assert torch.equal(tensor, weights[name])


def test_an_arrival_counts_its_buckets() -> None:
    module = torch.nn.Linear(2, 3)
    new = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    arrival = Arrival(7, TrainableLoad(module), "cpu")
    arrival.take({"weight": new["weight"]})
    assert not arrival.finish(7, 2)
    arrival.take({"bias": new["bias"]})
    assert not arrival.finish(8, 2)
    assert arrival.finish(7, 2)
    assert torch.equal(module.bias, new["bias"])

    load = TrainableLoad(module)
    load.take({"weight": new["weight"]})
    with pytest.raises(WeightSyncError, match=r"1 names differ: \['bias'\]"):
        load.finish()
    with pytest.raises(WeightSyncError, match=r"1 names differ: \['other'\]"):
        load.take({"other": new["bias"]})
    with pytest.raises(WeightSyncError, match=r"1 shapes differ: \['bias'\]"):
        load.take({"bias": torch.zeros(4)})


def test_vllm_omni_must_get_each_of_its_weights_from_some_bucket() -> None:
    own = ["qkv", "out", "norm"]

    def put(weights: dict[str, Tensor]) -> list[str]:
        return [name for name in own if name not in weights]

    load = FullLoad("Pipeline", put)
    load.take({"qkv": torch.zeros(1), "out": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match=r"none of the 2 weights is for 1 of those .* Pipeline: \['norm'\]"):
        load.finish()
    load.take({"norm": torch.zeros(1)})
    load.finish()
    with pytest.raises(WeightSyncError, match="none of the 0 weights"):
        FullLoad("Pipeline", put).finish()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"weight_transport": "ipc"}, "placement separate, but a worker can read .* set placement to colocated"),
        ({"weight_transport": "collective", "placement": "colocated"}, "NCCL takes no two processes .* to separate"),
        ({"weight_transport": "collective", "num_gpus_per_actor": 0.5}, "num_gpus_per_actor 0.5, but NCCL takes"),
        ({"weight_transport": "carrier_pigeon"}, "weight_transport"),
    ],
)
def test_a_way_that_does_not_exist_is_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"actor_rollout_ref": {"rollout": rollout}, "trainer": {"device": "cuda"}})


def test_the_way_of_the_weights_makes_no_other_run() -> None:
    one, other = (
        TrainConfig.model_validate({"actor_rollout_ref": {"rollout": {"weight_transport": way}}})
        for way in ("object_store", "collective")
    )
    assert one.digest() == other.digest()


@pytest.mark.parametrize(("settings", "sleeps"), [({}, True), ({"enable_sleep_mode": False}, False)])
def test_a_colocated_worker_sleeps_during_the_update_unless_it_is_told_not_to(
    actors: Actors, settings: dict[str, bool], sleeps: bool
) -> None:
    group, clock = copy.copy(actors.rollout), Stopwatch()
    group.settings = group.settings.model_copy(update={"placement": "colocated"} | settings)
    with group.asleep(clock):
        pass
    assert ("sleep" in clock.seconds) == sleeps
