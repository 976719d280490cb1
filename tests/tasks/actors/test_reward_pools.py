# SPDX-License-Identifier: Apache-2.0
"""Reward workers on a real Ray: how batches are cut, and what happens when a reward raises, hangs or dies."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from models.schedulers.noise_keys import NoiseKey
from tasks.actors import machines, reward_pool
from tasks.actors.cluster import ClusterError, ray_cluster, require_resources
from tasks.actors.loading import NotLoaded
from tasks.actors.reward_group import RewardGroup, Scores, wanted_inputs
from tasks.actors.reward_pool import RewardFailure, call_spans, told_ends
from tasks.actors.reward_worker import RewardWorker
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.worker_forks import IMPORTED
from tasks.config.reward import RewardConfig
from tasks.config.trainer import RayConfig
from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, RewardResult
from tasks.run.instruments import ask_memory
from tasks.stages.validation import Validation, draw_and_score
from tasks.system.stopwatch import Stopwatch
from tests.support.patience import PATIENCE, wait_until

MODULE = "tests.support.unreliable_rewards"
LEVELS = list(range(0, 120, 10))
"""Brightness of each of the twelve pictures; the first is black."""


@pytest.fixture(scope="module")
def cluster(shared_forks: None) -> Iterator[None]:
    """Ray with two CPUs, for the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where the workers find the rewards of these tests
        with ray_cluster(RayConfig(num_cpus=2)):
            yield


def batches(shard: int = 4, not_finite: Sequence[int] = ()) -> list[PendingBatch]:
    """Twelve plain pictures of 6 x 5 pixels in shards; four prompts of three samples, of which those with these numbers
    are not finite."""
    done, found = ray.put(0.0), []
    for start in range(0, len(LEVELS), shard):
        levels = np.array(LEVELS[start : start + shard])
        pictures = np.broadcast_to(levels[:, None, None, None], (len(levels), 6, 5, 3)).astype(np.uint8)
        latents = np.ascontiguousarray(np.broadcast_to(levels[:, None, None], (len(levels), 7, 2)), np.float32)
        rows = range(start, start + len(levels))
        prompts = tuple(Prompt(f"group-{i // 3}", str(i), None, {}, "") for i in rows)
        keys = tuple(NoiseKey(0, 1, f"group-{i // 3}", i % 3) for i in rows)
        outputs = ray.put(pictures), ray.put(latents), ray.put(np.array([i not in not_finite for i in rows]))
        found.append(PendingBatch(prompts, keys, (5, 0), done, *outputs, done, 0))
    return found


def config(*, max_missing_fraction: float = 0.1, statistics: bool = False, **functions: dict) -> RewardConfig:
    """Each keyword is a reward: the function's name in the module of unreliable rewards, or a label."""
    entries = {
        label: {"reward": f"{MODULE}:{label}", "retry_wait_s": 0.0} | settings for label, settings in functions.items()
    }
    return RewardConfig(functions=entries, max_missing_fraction=max_missing_fraction, guards={"statistics": statistics})


def scored(settings: RewardConfig, shard: int = 4) -> Scores:
    group, shards = RewardGroup(settings), batches(shard)
    return group.table(shards, group.submit(shards, training=True))


def of(name: str, settings: dict, **more) -> np.ndarray:
    return scored(config(**{name: settings}, **more)).by_reward[name]


def test_what_is_handed_out_is_scored_before_the_next_batch_is(cluster: None) -> None:
    """A call waits for the batches that it covers, and for no other one."""
    group, shards = RewardGroup(config(brightness={}, statistics=True)), batches(4)
    whole = group.table(shards, group.submit(shards, training=True))
    each, across = (RewardGroup(config(brightness={"batch_size": size})) for size in (4, 6))
    begun = [one.begin([4, 4, 4], training=True) for one in (each, across)]
    for number, counts in enumerate([(1, 0), (2, 1), (3, 2)]):
        for scoring in begun:
            scoring.add(shards[number])
        calls = [scoring.pending.calls["brightness"] for scoring in begun]
        assert tuple(map(len, calls)) == counts
        newest = ray.get(calls[0][-1].answer)
        assert newest.scores.tolist() == pytest.approx(LEVELS[4 * number : 4 * number + 4])
    for one, scoring in zip((each, across), begun, strict=True):
        found = one.table(shards, scoring.pending)
        assert found.rewards.tolist() == whole.rewards.tolist()
    assert len(whole.samples.filter(like="image/").columns) > 0


def test_the_first_samples_rewards_are_there_before_the_others_are_scored(cluster: None, tmp_path: Path) -> None:
    """Also where a call covers the end of one batch and the beginning of the next, and the one after that comes late,
    and with it a guard."""
    released = tmp_path / "released"

    @ray.remote(num_cpus=0)
    def sampled_late(pictures: np.ndarray) -> np.ndarray:
        wait_until(released.exists, "the first rewards", every=0.02)
        return pictures

    for size in (2, 3):
        released.unlink(missing_ok=True)
        shards = batches(3, not_finite=(1,))
        shards[2] = replace(shards[2], pictures=sampled_late.remote(shards[2].pictures))
        late = {"reward": f"{MODULE}:brightness", "guard": True, "batch_size": 12}
        settings = config(brightness={"batch_size": size}, latent_size={"weight": 0.5}, late=late)
        group = RewardGroup(settings)
        pending = group.submit(shards, training=True)
        found = [group.early_rewards(shards[start : start + 1], pending, 3 * start) for start in range(2)]
        released.touch()
        whole = group.table(shards, pending)
        for number, early in enumerate(found):
            assert early is not None
            rewards, uids = early
            np.testing.assert_array_equal(rewards, whole.rewards[3 * number : 3 * number + 3])
            assert uids.tolist() == whole.uids[3 * number : 3 * number + 3].tolist()
        assert np.isnan(whole.rewards).tolist() == [False, True] + [False] * 10


def test_where_a_score_cannot_be_got_early_the_table_says_why(cluster: None) -> None:
    """Nor is an optional one that is missing taken for what other groups may make of it. An answer comes once."""
    failing = {"batch_size": 3, "retries": 0}
    for functions in ({"fails_for_dark": failing}, {"brightness": {}, "nan_for_dark": failing | {"required": False}}):
        group, shards = RewardGroup(config(max_missing_fraction=0.3, **functions)), batches(3)
        pending = group.submit(shards, training=True)
        assert group.early_rewards(shards[:1], pending, 0) is None
        second = group.early_rewards(shards[1:2], pending, 3)
        assert second is not None
        calls: Any = pending.calls[next(iter(functions))]
        calls[1] = replace(calls[1], answer=ray.put(RewardResult(np.zeros(3))))  # as if it were asked for anew
        whole = group.table(shards, pending)
        np.testing.assert_array_equal(second[0], whole.rewards[3:6])
        missing = whole.metrics()[f"reward/{list(functions)[-1]}/missing"]
        assert missing == (3 if len(functions) == 1 else 1)


def test_what_is_missing_of_a_sample_that_is_left_out_anyway_is_not_waited_for(cluster: None) -> None:
    """An optional reward cannot be had of a picture that is not finite, and speaks for no other sample; nor, where all
    are optional, does its group's mean speak for it."""
    optional = {"nan_for_dark": {"retries": 0, "required": False}}
    for functions in ({"brightness": {}} | optional, optional):
        group, shards = RewardGroup(config(max_missing_fraction=0.3, **functions)), batches(3, not_finite=(0,))
        pending = group.submit(shards, training=True)
        early = group.early_rewards(shards[:1], pending, 0)
        whole = group.table(shards, pending)
        assert early is not None
        np.testing.assert_array_equal(early[0], whole.rewards[:3])
        assert np.isnan(early[0]).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("dies_once", RewardFailure, "its error: its worker died once"),
        ("misused", RewardError, "misused: the prompts have no target"),
    ],
)
def test_a_reward_that_dies_or_is_misused_ends_the_run_by_the_table(
    cluster: None, tmp_path: Path, name: str, kind: type[Exception], told: str
) -> None:
    """And not where its first scores are asked for."""
    entry = {"options": {"folder": str(tmp_path)}, "retries": 0, "batch_size": 12}
    group, shards = RewardGroup(config(**{name: entry})), batches(3)
    pending = group.submit(shards, training=True)
    assert group.early_rewards(shards[:1], pending, 0) is None
    with pytest.raises(kind, match=told):
        group.table(shards, pending)


def test_what_a_call_that_was_made_again_has_answered_is_kept(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its worker's machine was lost: whoever waits for the call next does not have it made a third time."""
    monkeypatch.setattr(machines, "lost_machines", lambda: {"lost": "its machine"})
    entry = {"options": {"folder": str(tmp_path)}, "retries": 0, "batch_size": 12}
    group, shards = RewardGroup(config(dies_once=entry)), batches(3)
    pending = group.submit(shards, training=True)
    calls: Any = pending.calls["dies_once"]
    calls[0] = replace(calls[0], machine="lost")
    early = group.early_rewards(shards[:1], pending, 0)
    assert early is not None
    assert early[0].tolist() == LEVELS[:3]
    assert group.table(shards, pending).rewards.tolist() == LEVELS
    assert len((tmp_path / "calls").read_text()) == 2


def test_calls_are_cut_across_rollout_batches_and_change_no_score(cluster: None) -> None:
    """Shards of 5, 5 and 2 pictures; calls of 4 cover two of them. Two workers of one reward share the calls."""
    assert of("brightness", {}).tolist() == LEVELS
    found = scored(config(brightness={"batch_size": 4, "num_workers": 2}), shard=5)
    assert found.by_reward["brightness"].tolist() == LEVELS
    assert found.samples["brightness/batch"].tolist() == [4] * 12
    uneven = scored(config(brightness={"batch_size": 5}), shard=4)
    assert uneven.samples["brightness/batch"].tolist() == [5] * 10 + [2] * 2
    assert uneven.samples["prompt"].tolist() == [str(i) for i in range(12)]
    assert uneven.busy["brightness"] > 0
    # By default every worker has its share of every rollout batch.
    shared = scored(config(brightness={"num_workers": 3}), shard=5)
    assert shared.by_reward["brightness"].tolist() == LEVELS
    assert shared.samples["brightness/batch"].tolist() == [2, 2, 2, 2, 1, 2, 2, 1, 2, 2, 1, 1]
    assert (
        scored(config(brightness={"batch_size": None}), shard=5).samples["brightness/batch"].tolist()
        == [5] * 10 + [2] * 2
    )


@pytest.mark.parametrize(
    ("count", "rows", "workers", "most"), [(4, 128, 14, 37), (16, 128, 14, 147), (3, 5, 3, 5), (12, 8, 112, 1)]
)
def test_no_worker_has_more_than_its_share_of_an_iteration(count: int, rows: int, workers: int, most: int) -> None:
    """An iteration waits for the worker that scores the most. Batches that all gave the same ones a sample more, or
    were cut into equal calls and what is left of them, made it wait longer."""
    edges = np.arange(count + 1) * rows
    spans = call_spans(edges, "auto", workers)
    assert [first for first, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, count * rows)
    assert {*edges.tolist()} <= {first for first, _ in spans} | {count * rows}, "a call covers no two batches"
    had = [sum(end - first for first, end in spans[worker::workers]) for worker in range(workers)]
    assert max(had) == most == -(-count * rows // workers)


@pytest.mark.parametrize(
    ("at_once", "sizes"),
    [(1, [1, 1, 1] * 4), (2, [2, 1] * 4), (3, [1, 1, 1] * 4), (4, [3] * 4)],
    ids=["one_sampler", "two", "three_of_whom_one_samples_the_last", "four"],
)
def test_batches_that_come_at_the_same_time_share_the_workers(cluster: None, at_once: int, sizes: list[int]) -> None:
    """Three workers and four batches of three: the last ones that come together keep all of them busy, in few calls."""
    shards = [replace(shard, worker=number % at_once) for number, shard in enumerate(batches(3))]
    group = RewardGroup(config(brightness={"num_workers": 3}))
    begun = group.begin([3] * 4, at_once, training=True)
    for shard in shards:
        begun.add(shard)
    for pending in (begun.pending, group.submit(shards, training=True)):
        assert [call.size for call in pending.calls["brightness"]] == sizes
        assert group.table(shards, pending).by_reward["brightness"].tolist() == LEVELS
    assert [call.worker for call in begun.pending.calls["brightness"]] == [i % 3 for i in range(len(sizes))]


def test_functions_may_be_async_and_may_want_latents(cluster: None) -> None:
    settings = config(slow_echo={"weight": 2.0}, latent_size={"weight": 0.5}, brightness={"guard": True})
    assert wanted_inputs(settings) == {"images", "latents"}
    found = scored(settings)
    assert found.by_reward["slow_echo"].tolist() == list(range(12))
    assert found.by_reward["latent_size"].tolist() == [level**2 for level in LEVELS]
    assert found.weights == {"slow_echo": 2.0, "latent_size": 0.5, "brightness": 0.0}
    assert found.rewards.tolist() == [2 * i + level**2 / 2 for i, level in enumerate(LEVELS)]


@pytest.mark.parametrize("late", [1, 0], ids=["the_next", "an_earlier_one"])
def test_a_batch_is_scored_while_another_is_still_sampled(cluster: None, tmp_path: Path, late: int) -> None:
    """The late batch's pictures come only once another is scored by the one worker there is: without overlap, or with
    calls that wait for each other, this would wait in vain."""
    calls = tmp_path / "calls"

    @ray.remote(num_cpus=0)
    def sampled_late(pictures: np.ndarray) -> np.ndarray:
        wait_until(calls.exists, "another batch's scoring", every=0.02)
        return pictures

    shards = batches()
    shards[late] = replace(shards[late], pictures=sampled_late.remote(shards[late].pictures))
    group = RewardGroup(config(fails_before={"options": {"folder": str(tmp_path), "attempts": 0}}))
    assert group.table(shards, group.submit(shards, training=True)).by_reward["fails_before"].tolist() == LEVELS


def test_a_killed_worker_is_restarted_and_its_batch_scored_again(cluster: None, tmp_path: Path) -> None:
    group = RewardGroup(config(dies_once={"options": {"folder": str(tmp_path)}}))
    shards = batches()
    found = group.table(shards, group.submit(shards, training=True))
    assert found.by_reward["dies_once"].tolist() == LEVELS
    assert len((tmp_path / "calls").read_text()) == 4, "three batches, the first of them twice"
    # The restarted worker serves the next iteration as well.
    assert group.table(shards, group.submit(shards, training=True)).by_reward["dies_once"].tolist() == LEVELS


def test_a_worker_that_comes_back_with_another_version_ends_the_run(cluster: None, tmp_path: Path) -> None:
    """Its code was edited meanwhile: its scores and those before would be learnt from as if they were of one kind."""
    group = RewardGroup(config(AnotherAfterDeath={"options": {"folder": str(tmp_path)}}))
    assert group.versions() == {"AnotherAfterDeath": "1"}
    shards = batches()
    with pytest.raises(RewardError, match=r"a worker has version '2' in place of '1'.* must be comparable"):
        group.table(shards, group.submit(shards, training=True))


def test_workers_that_differ_in_their_version_are_told_at_the_start(cluster: None, tmp_path: Path) -> None:
    group = RewardGroup(config(AnotherAfterDeath={"options": {"folder": str(tmp_path)}, "num_workers": 2}))
    with pytest.raises(RewardError, match="reward 'AnotherAfterDeath': a worker has version"):
        group.versions()


def test_a_worker_that_hangs_is_ended_and_its_batch_scored_again(cluster: None, tmp_path: Path) -> None:
    settings = {"options": {"folder": str(tmp_path)}, "timeout_s": 5}
    assert of("hangs_once", settings).tolist() == LEVELS
    assert len((tmp_path / "calls").read_text()) == 4


def test_a_source_that_hangs_when_it_is_asked_again_costs_the_others_no_scores(cluster: None, tmp_path: Path) -> None:
    """What they have goes with the process that it hangs in; with the next one it would, too."""
    bad = {"reward": f"{MODULE}:raises_and_hangs", "options": {"folder": str(tmp_path)}}
    options = {"sources": {"good": f"{MODULE}:brightness", "bad": bad}}
    settings = {"reward": "by_data_source", "options": options, "timeout_s": 3, "retries": 2, "batch_size": 12}
    shards = [
        replace(
            one,
            prompts=tuple(
                replace(p, metadata={"data_source": "bad" if p.prompt == "7" else "good"}) for p in one.prompts
            ),
        )
        for one in batches()
    ]
    group = RewardGroup(config(sources=settings))
    found = group.table(shards, group.submit(shards, training=True))
    assert [level for level, score in zip(LEVELS, found.by_reward["sources"], strict=True) if score != level] == [70]
    errors = found.samples["sources/error"]
    assert errors[7] == "ConnectionError: attempt 3 was refused"
    assert errors.drop(7).isna().all()


def test_an_error_is_tried_again_as_often_as_the_config_says(cluster: None, tmp_path: Path) -> None:
    enough = {"options": {"folder": str(tmp_path), "attempts": 2}, "retries": 2, "batch_size": 12}
    assert of("fails_before", enough).tolist() == LEVELS
    (tmp_path / "calls").unlink()
    with pytest.raises(RewardFailure, match="its error: ConnectionError: attempt 2 was refused"):
        of("fails_before", enough | {"retries": 1})


def test_what_fails_is_missing_with_its_error_and_nothing_else_is(cluster: None) -> None:
    """Batches of two: the black picture takes its neighbour with it, and no other."""
    settings = config(fails_for_dark={"batch_size": 2, "retries": 1}, max_missing_fraction=0.17)
    found = scored(settings)
    assert np.isnan(found.rewards).tolist() == [True, True] + [False] * 10
    assert found.by_reward["fails_for_dark"][2:].tolist() == LEVELS[2:]
    errors = found.samples["fails_for_dark/error"]
    assert errors[:2].tolist() == ["ConnectionError: the lens cap is on"] * 2
    assert errors[2:].isna().all()
    assert found.metrics()["reward/fails_for_dark/missing"] == 2


def test_an_error_that_no_other_process_can_make_again_is_a_missing_score_too(cluster: None) -> None:
    """Two of twelve, which is as many as may be missing."""
    found = scored(config(fails_for_dark_in_its_own_way={"batch_size": 2, "retries": 1}, max_missing_fraction=2 / 12))
    assert np.isnan(found.rewards).tolist() == [True, True] + [False] * 10
    errors = found.samples["fails_for_dark_in_its_own_way/error"]
    assert errors[:2].tolist() == ["OfTwoParts: 7 the lens cap is on"] * 2


@pytest.mark.parametrize(
    ("by", "tries", "reason"),
    [
        (signal.SIGKILL, 2, r"its worker died 2 times \(.+\)"),
        (None, 1, "OfTwoParts: 8 weights are missing"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_so(
    cluster: None, tmp_path: Path, by: int | None, tries: int, reason: str
) -> None:
    """A worker that dies while it loads is not started for ever."""
    options = {"folder": str(tmp_path), "by": by}
    group = RewardGroup(config(Unloadable={"options": options, "retries": 1}))
    with pytest.raises(RewardFailure, match=rf"^reward 'Unloadable' could not be loaded: {reason}$"):
        group.versions()
    assert len((tmp_path / "calls").read_text()) == tries


def test_of_two_workers_the_one_that_died_is_asked_of_what(cluster: None, tmp_path: Path) -> None:
    settings = config(SecondDies={"options": {"folder": str(tmp_path)}, "num_workers": 2, "retries": 1})
    group = RewardGroup(settings)
    with pytest.raises(RewardFailure, match=r"could not be loaded: its worker died .*CUDA out of memory"):
        group.versions()


@pytest.mark.parametrize(
    ("label", "detail", "what"),
    [
        ("reward", "reward", "its detail 'reward' stands in the column reward/reward, which says the score"),
        ("bright", "measured", "its detail 'measured' .* which says which samples were measured"),
        ("reward", "bright", "reward/bright would be the column of two rewards"),
    ],
)
def test_a_detail_does_not_stand_in_for_a_score(cluster: None, label: str, detail: str, what: str) -> None:
    entry = {"reward": f"{MODULE}:with_a_detail", "options": {"detail": detail}}
    settings = config(**{"bright": {"reward": f"{MODULE}:brightness"}} | {label: entry})
    with pytest.raises(RewardError, match=what):
        scored(settings)


def test_a_reward_that_hangs_while_it_loads_again_ends_the_run_whatever_may_be_missing(
    cluster: None, tmp_path: Path
) -> None:
    settings = config(HangsAgain={"options": {"folder": str(tmp_path)}, "retries": 3}, max_missing_fraction=1.0)
    group, shards = RewardGroup(settings, load_seconds=3), batches()
    assert group.versions() == {"HangsAgain": "hangs-again"}
    told = (
        r"^worker 0 of reward 'HangsAgain', which was started again: not loaded within ray_init\.start_timeout_s 3 s; "
    )
    with pytest.raises(NotLoaded, match=told):
        group.table(shards, group.submit(shards, training=True))
    assert len((tmp_path / "calls").read_text()) == 2, "it was tried once more"


class BeginsOnce(RewardWorker):
    """Each process but the first one dies before it is a worker: of a compile cache that cannot be written, say."""

    def __init__(self, name: str, config: Any, *arguments: Any):
        super().__init__(name, config, *arguments)
        try:
            (Path(config.options["folder"]) / "begun").touch(exist_ok=False)
        except FileExistsError:
            os._exit(1)


def test_a_worker_that_dies_as_it_begins_is_not_told_to_have_had_too_little_time(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended within seconds by what watches the run."""
    monkeypatch.setattr(reward_pool, "RewardWorker", BeginsOnce)
    monkeypatch.setattr(machines, "POLL_S", 0.2)
    group = RewardGroup(config(dies_once={"options": {"folder": str(tmp_path)}}), load_seconds=PATIENCE)
    shards = batches()

    def table_while_watched() -> None:
        with machines.watched_machines(group.groups(), logging.getLogger("a run"), "go on so", PATIENCE):
            group.table(shards, group.submit(shards, training=True))

    told = r"^reward_dies_once 0: 5 processes died one after the other as they began; the logs of Ray's workers say why"
    with pytest.raises(NotLoaded, match=told):
        table_while_watched()


def test_above_the_fraction_the_run_stops_with_the_rewards_own_error(cluster: None) -> None:
    with pytest.raises(
        RewardFailure, match=r"'fails_for_dark' is missing for 2 of 12 .* 0\.1 allows; its error: .*lens cap is on"
    ):
        of("fails_for_dark", {"batch_size": 2, "retries": 0})
    with pytest.raises(RewardFailure, match=r"missing for 1 of 12 .* 0 allows; its error: the reward itself returned"):
        of("nan_for_dark", {}, max_missing_fraction=0.0)


def test_an_infinite_score_is_missing_and_counted(cluster: None) -> None:
    found = scored(config(infinite_for_dark={}))
    assert np.isnan(found.rewards).tolist() == [True] + [False] * 11
    assert found.samples["infinite_for_dark/error"][0] == "the reward itself returned -inf"
    metrics = found.metrics()
    assert metrics["reward/infinite_for_dark/missing"] == metrics["reward/infinite_for_dark/not_finite"] == 1
    with pytest.raises(RewardFailure, match=r"missing for 1 of 12 .*; its error: the reward itself returned -inf"):
        of("infinite_for_dark", {}, max_missing_fraction=0.05)


def test_a_sample_that_is_not_finite_is_missing_counted_and_shown_to_no_reward(cluster: None) -> None:
    """The black one, at which `fails_for_dark` raises, and one more; across batches, for pictures and latents, and also
    where an optional reward would have counted as its group's mean. The others' scores are what they were."""
    functions: Any = {"fails_for_dark": {"required": False}, "latent_size": {"required": False, "batch_size": 5}}
    settings = config(**functions, max_missing_fraction=0.2, statistics=True)
    group, shards, sound = RewardGroup(settings), batches(not_finite=[0, 7]), batches(5)
    found = group.table(shards, group.submit(shards, training=True))
    gone, there = [0, 7], [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert found.finite.tolist() == [i not in gone for i in range(12)]
    for name in functions:
        assert np.flatnonzero(np.isnan(found.by_reward[name])).tolist() == gone
        errors = found.samples[f"{name}/error"]
        assert errors[there].isna().all()
        assert {error.split(":")[0] for error in errors[gone]} == {"the sample is not finite"}
    assert found.rewards[there].tolist() == [LEVELS[i] + LEVELS[i] ** 2 for i in there]
    assert np.isnan(found.rewards[gone]).all()
    counted = {name: value for name, value in found.metrics().items() if not name.startswith("perf/")}
    assert counted == {"rollout/not_finite": 2} | {
        f"reward/{name}/{kind}": count for name in functions for kind, count in (("missing", 2), ("not_finite", 0))
    }
    # Nor do picture statistics know it: of three plain pictures 10 apart two are left.
    measured = found.samples.filter(like="image/")
    assert measured.loc[gone].isna().all(axis=None)
    assert not measured.loc[there].isna().any(axis=None)
    whole = RewardGroup(config(brightness={}, statistics=True))
    expected = whole.table(sound, whole.submit(sound, training=True)).samples.filter(like="image/")
    assert measured.loc[[3, 4, 5, 9, 10, 11]].equals(expected.loc[[3, 4, 5, 9, 10, 11]])
    assert measured["image/diversity"][1] == pytest.approx(10 / 255 / 2**0.5, rel=1e-5)


def test_where_no_sample_is_finite_no_reward_is_asked(cluster: None, tmp_path: Path) -> None:
    """It is as where every call failed: the run ends, unless all scores may be missing."""
    entry = {"options": {"folder": str(tmp_path), "attempts": 0}}
    for limit in (0.1, 1.0):
        group = RewardGroup(config(fails_before=entry, max_missing_fraction=limit))
        shards = batches(not_finite=range(12))
        pending = group.submit(shards, training=False)
        if limit < 1:
            with pytest.raises(RewardFailure, match=r"missing for 12 of 12 .*; its error: the sample is not finite"):
                group.table(shards, pending)
        else:
            found = group.table(shards, pending)
            assert np.isnan(found.rewards).all()
            assert found.metrics()["rollout/not_finite"] == 12
            validation = Validation(found.samples, np.zeros((12, 6, 5, 3), np.uint8), ("fails_before",)).metrics()
            assert validation == {
                "val/reward/missing": 12.0,
                "val/reward/fails_before/missing": 12.0,
                "val/rollout/not_finite": 12.0,
            }
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("name", "seconds", "told"),
    [
        ("dies_once", 600, r"its worker died once \(.+; its last line: the GPU is gone\)"),
        ("hangs_once", 1, r"it hung once, its worker was ended after reward\.functions\.hangs_once\.timeout_s 1 s"),
        ("fails_before", 600, "ConnectionError: attempt 1 was refused"),
    ],
)
def test_a_worker_that_died_one_that_hung_and_one_that_raised_are_told_apart(
    cluster: None, tmp_path: Path, name: str, seconds: float, told: str
) -> None:
    """By a real process that kills itself, one that sleeps past its limit and one that raises."""
    options = {"folder": str(tmp_path)} | ({"attempts": 9} if name == "fails_before" else {})
    settings = {"options": options, "retries": 0, "batch_size": 12, "timeout_s": seconds}
    with pytest.raises(RewardFailure, match=rf"its error: {told}$"):
        of(name, settings)


def test_a_call_whose_tries_ended_differently_says_how_each_did(cluster: None, tmp_path: Path) -> None:
    """Its first process dies, its second one hangs."""
    entry = {"options": {"folder": str(tmp_path)}, "retries": 1, "batch_size": 12, "timeout_s": 1}
    found = scored(config(dies_then_hangs=entry, max_missing_fraction=1.0))
    errors = found.samples["dies_then_hangs/error"]
    assert errors.str.contains(r"^its worker died once \(.+\), and it hung once, .*\.timeout_s 1 s$").all()


def test_a_call_that_returned_or_raised_leaves_no_note(cluster: None, tmp_path: Path) -> None:
    """A run's workers have millions of calls; what tells of a process that ended in one stays."""
    (tmp_path / "raises").mkdir()
    raises = {"options": {"folder": str(tmp_path / "raises"), "attempts": 2}, "retries": 2}
    group = RewardGroup(config(dies_once={"options": {"folder": str(tmp_path)}}, fails_before=raises))
    shards, logs = batches(), Path(ray._private.worker._global_node.get_logs_dir_path())
    for _ in range(3):
        group.table(shards, group.submit(shards, training=True))
    noted = {}
    for name, pool in group.pools.items():
        (worker,) = pool.group.actors
        ray.get(worker.ends.remote("any"))  # the call before has ended
        noted[name] = (logs / f"calls-{worker._actor_id.hex()}.txt").read_text().splitlines()
    assert {name: len(lines) for name, lines in noted.items()} == {"dies_once": 1, "fails_before": 0}


def test_where_no_end_is_known_it_is_told_that_it_was_one_of_them() -> None:
    """As where the worker's machine was lost, or no worker was there to ask within half a minute."""
    settings = config(brightness={"retries": 1, "timeout_s": 7}).functions["brightness"]
    limit = "reward.functions.brightness.timeout_s 7 s"
    told = told_ends("brightness", settings, [], "gone")
    assert told == f"its worker died, or took longer than {limit}, 2 times (gone)"
    assert told_ends("brightness", settings, [], "gone", loads=True) == "its worker died 2 times (gone)"


def test_misuse_is_no_failure_and_is_not_tried_again(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="misused: the prompts have no target"):
        of("misused", {"options": {"folder": str(tmp_path)}, "batch_size": 12}, max_missing_fraction=1.0)
    assert len((tmp_path / "calls").read_text()) == 1


def test_a_missing_optional_reward_counts_as_its_groups_mean(cluster: None) -> None:
    functions = {"brightness": {}, "nan_for_dark": {"required": False, "weight": 0.1}}
    found = scored(config(**functions))
    assert np.isnan(found.by_reward["nan_for_dark"][0])
    assert found.rewards[0] == pytest.approx(0 + 0.1 * (10 + 20) / 2)
    assert found.rewards[1:] == pytest.approx([1.1 * level for level in LEVELS[1:]])
    required = scored(config(brightness={}, nan_for_dark={"weight": 0.1}))
    assert np.isnan(required.rewards).tolist() == [True] + [False] * 11


def test_a_guard_measures_a_share_of_an_iteration_and_all_of_a_validation(cluster: None) -> None:
    """Half of shards of 5, 5 and 2, rounded up. What it did not measure is neither missing nor a share of its limit."""
    functions = {"brightness": {}, "nan_for_dark": {"guard": True, "training_share": 0.5, "batch_size": 2}}
    group, shards = RewardGroup(config(**functions, max_missing_fraction=0.15)), batches(5)
    found = group.table(shards, group.submit(shards, training=True))
    measured = [True, True, True, False, False] * 2 + [True, False]
    assert found.samples["nan_for_dark/measured"].tolist() == measured
    assert found.by_reward["nan_for_dark"][1:] == pytest.approx(np.where(measured, LEVELS, np.nan)[1:], nan_ok=True)
    errors = found.samples["nan_for_dark/error"].tolist()
    assert [error is None for error in errors] == [False] + [True] * 11
    assert "itself returned nan" in errors[0]
    assert found.metrics()["reward/nan_for_dark/missing"] == found.metrics()["reward/nan_for_dark/not_finite"] == 1
    assert found.rewards.tolist() == LEVELS
    whole = group.table(shards, group.submit(shards, training=False))
    assert whole.by_reward["nan_for_dark"][1:].tolist() == LEVELS[1:]
    assert "nan_for_dark/measured" not in whole.samples
    strict = RewardGroup(config(**functions, max_missing_fraction=0.1))  # 1 of 12 would be few enough
    pending = strict.submit(shards, training=True)
    with pytest.raises(RewardFailure, match="missing for 1 of 7 samples"):
        strict.table(shards, pending)


@pytest.mark.parametrize("batch_size", ["auto", None, 2])
def test_a_guard_may_measure_validations_alone(cluster: None, batch_size: int | str | None) -> None:
    """Where nothing is measured nothing is missing; what is trained on is as it was."""
    functions = {"brightness": {}, "nan_for_dark": {"guard": True, "training_share": 0, "batch_size": batch_size}}
    group, shards = RewardGroup(config(**functions, max_missing_fraction=0.1)), batches(5)
    found = group.table(shards, group.submit(shards, training=True))
    assert not found.samples["nan_for_dark/measured"].any()
    assert np.isnan(found.by_reward["nan_for_dark"]).all()
    assert found.metrics()["reward/nan_for_dark/missing"] == found.busy["nan_for_dark"] == 0
    assert found.rewards.tolist() == LEVELS
    whole = group.table(shards, group.submit(shards, training=False))
    assert whole.by_reward["nan_for_dark"][1:].tolist() == LEVELS[1:]


def test_a_validation_scores_all_of_what_it_draws_with_its_own_noise(cluster: None) -> None:
    """Its pictures are those of the table's rows, in their order, whatever the rewards want; and no reward leaves out
    a part of them, as in an iteration."""
    asked: dict[str, Any] = {}

    class Rollout:  # stands for the workers: all is drawn at once
        def submit(self, prompts: Any, n: int, iteration: int, **named: Any) -> list[PendingBatch]:
            asked.update(named, prompts=prompts, n=n, iteration=iteration)
            return batches(5)

    group = RewardGroup(
        config(brightness={}, watched={"reward": f"{MODULE}:brightness", "guard": True, "training_share": 0.5})
    )
    given: Any = (Stopwatch(), Rollout(), group, ["a prompt"], 3, "the validation's")
    found = draw_and_score.fn(*given, seed=9)
    settings = {"window": (), "pipeline": "the validation's", "seed": 9, "draw": True}
    assert asked == settings | {"prompts": ["a prompt"], "n": 3, "iteration": -1}
    assert found.pictures[:, 0, 0, 0].tolist() == found.samples["reward"].tolist() == LEVELS
    assert found.samples["reward/watched"].tolist() == LEVELS
    assert found.rewards == ("brightness", "watched")
    draw_and_score.fn(*given)
    assert asked["seed"] == 0, "the same noise for every run"


def test_what_is_trained_on_is_measured_of_every_picture() -> None:
    with pytest.raises(ValueError, match=r"training_share is 0\.5, but this reward is trained on"):
        RewardConfig(functions={"ocr": {"training_share": 0.5}})
    assert RewardConfig(functions={"ocr": {}, "jpeg": {"weight": 0, "training_share": 0.5}})


def test_statistics_of_the_pictures_are_measured_beside_the_rewards(cluster: None) -> None:
    found = scored(config(brightness={}, statistics=True)).samples
    plain = [found[f"image/{name}"].abs().max() for name in ("edge_density", "entropy", "saturation")]
    assert plain == [0, 0, 0]
    # Three plain pictures 10 apart have a standard deviation of 10, whatever their mean.
    assert found["image/diversity"].to_numpy() == pytest.approx([10 / 255] * 12, rel=1e-5)


def test_asking_for_its_memory_waits_for_nobody_and_loads_a_worker_with_nothing(cluster: None, tmp_path: Path) -> None:
    """It is started by python, as it is to have two CPUs: a fork has what many import from the start."""
    alone = config(brightness={"num_cpus": 2})
    group = next(iter(RewardGroup(alone).pools.values())).group
    free = tmp_path / "free"

    def is_busy(_: Any) -> None:
        while not free.exists():
            time.sleep(0.01)

    group.actors[0].__ray_call__.remote(is_busy)
    memory = ask_memory({"reward": group})  # the driver goes on, though the worker has more to do first
    free.touch()
    assert 0 < memory()["memory/reward_0_mb"] < 1000
    (loaded,) = ray.get([actor.__ray_call__.remote(lambda _: set(sys.modules)) for actor in group.actors])
    assert not loaded & {"torch", "prefect", "mlflow", "tasks.actors.cluster"}
    forked = next(iter(RewardGroup(config(brightness={})).pools.values())).group
    (loaded,) = ray.get([actor.__ray_call__.remote(lambda _: set(sys.modules)) for actor in forked.actors])
    assert loaded >= {*IMPORTED}
    assert not loaded & {"prefect", "mlflow", "tasks.actors.cluster"}


def test_rewards_that_reserve_more_than_there_is_are_refused(cluster: None) -> None:
    settings = config(brightness={"num_workers": 3, "num_cpus": 1.0, "num_gpus": 0.5})
    assert (settings.num_cpus, settings.gpus_of_processes()) == (3.0, [0.5] * 3)
    with pytest.raises(ClusterError, match=r"the rewards reserve 3 CPUs .* cluster has 2"):
        require_resources(0, settings.num_cpus)
    with pytest.raises(ClusterError, match=r"needs 1\.5 GPUs .* cluster has 0"):
        require_resources(sum(settings.gpus_of_processes()), 0)
    assert of("brightness", {"num_cpus": 1.0, "num_workers": 2}).tolist() == LEVELS
