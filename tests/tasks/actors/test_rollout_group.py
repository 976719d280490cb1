# SPDX-License-Identifier: Apache-2.0
"""How a rollout's samples are named, laid out and asked for. Without Ray and workers."""

from types import SimpleNamespace
from typing import Any

from models.samples.trajectories import LATENTS, PICTURES, PICTURES_ALONE, Recording
from models.schedulers.noise_keys import NoiseKey
from models.weights.canary import Agreement
from tasks.actors.messages import Loaded, PolicyWeights
from tasks.actors.rollout_group import RolloutGroup
from tasks.data.prompts import Prompt
from tasks.system.stopwatch import Stopwatch
from tests.support.helpers import prompt_table

PROMPTS = [Prompt(uid, uid, None, {}, "") for uid in ("a", "b")]


def group_of(**parts: Any) -> Any:
    """Without workers: `parts` are what a test needs of it."""
    group: Any = RolloutGroup.__new__(RolloutGroup)
    group.seed, group.settings, group.recording, group._sleeps = 3, SimpleNamespace(batch_size=4), PICTURES_ALONE, False
    for name, part in parts.items():
        setattr(group, name, part)
    return group


def test_samples_are_cut_prompt_by_prompt_and_their_noise_is_of_the_seed_that_is_asked_for() -> None:
    """The samples of a prompt follow each other, so that a batch holds few prompts; a validation has its own seed."""
    cut = group_of().batch_keys(PROMPTS, 3, 7)
    names = [[(key.prompt_uid, key.sample_index) for key in keys] for keys in cut]
    assert names == [[("a", 0), ("a", 1), ("a", 2), ("b", 0)], [("b", 1), ("b", 2)]]
    assert {(key.seed, key.iteration) for keys in cut for key in keys} == {(3, 7)}
    other = group_of().batch_keys(PROMPTS, 3, -1, seed=0)
    assert {(key.seed, key.iteration) for keys in other for key in keys} == {(0, -1)}


def test_each_sample_of_a_request_is_of_its_own_prompt() -> None:
    """Whose embeddings are those that the pipeline which samples asks for, with the negative prompt or without."""
    asked: list[Any] = []
    group = group_of(prompt_table=lambda *arguments: asked.append(arguments) or prompt_table((5, 3)))
    keys = tuple(NoiseKey(3, 7, uid, index) for uid, index in (("b", 1), ("b", 2), ("a", 0)))
    request = group._request(keys, (1, 2), "the validation's", PICTURES_ALONE)
    assert asked == [(["b", "a"], "the validation's")]
    assert request.prompt_index.tolist() == [0, 0, 1]
    assert (request.keys, request.window) == (keys, (1, 2))


def test_what_is_drawn_to_be_looked_at_is_decoded_beside_what_rewards_want() -> None:
    handed: list[tuple[Any, ...]] = []
    own = Recording(record_finished=True, outputs=frozenset({LATENTS}))
    group = group_of(recording=own, hand_out=lambda *arguments: handed.append(arguments) or [])
    for draw in (False, True):
        group.submit(PROMPTS, 1, -1, (), pipeline="the validation's", seed=0, draw=draw)
    assert [arguments[3] for arguments in handed] == ["the validation's"] * 2
    assert [arguments[4] for arguments in handed] == [own, Recording(outputs=frozenset({LATENTS, PICTURES}))]


def test_workers_that_sleep_already_are_not_sent_to_sleep_again() -> None:
    """While MLflow is away within an update they sleep for both."""
    called: list[Any] = []
    workers = SimpleNamespace(call_all=lambda *call: called.append(call))
    group, clock = group_of(group=workers, settings=SimpleNamespace(sleeps=True)), Stopwatch()
    for _ in range(2):
        with group.asleep(clock, with_policy=False), group.asleep(clock):
            called.append("work")
    assert called == [("sleep", False), "work", ("wake",)] * 2


def test_a_sync_tells_the_worst_agreement_and_the_seconds_of_the_slowest_worker() -> None:
    """Who is slowest need not be who agrees least."""
    loaded = [Loaded(Agreement(0.3), {"load": 1.0}), Loaded(Agreement(0.1), {"load": 1.0, "wait": 2.0})]
    group = group_of(group=SimpleNamespace(actors=(), get=lambda answers, beside: loaded))
    told = group._hold(PolicyWeights(1))
    assert told == Loaded(Agreement(0.3), {"load": 1.0, "wait": 2.0})
