# SPDX-License-Identifier: Apache-2.0
"""Which optimiser steps of an iteration begin early, and with what. Without Ray and workers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayError

from tasks.actors.update_plan import OldScores
from tasks.config.tree import TrainConfig
from tasks.run import early_steps
from tasks.run.early_steps import EarlyStepMismatch, EarlySteps, can_step_early, step_early
from tasks.stages.advantage import compute_advantage

REWARDS = np.array([1, 3, 2, 8, 5, 4, 7, 7.5, 1, 9, 2, 2, 0, 1, 3, 4], np.float32)
"""Of eight prompts' two samples each; a rollout batch has one prompt, and a mini-batch two batches."""
UIDS = [str(number) for number in range(8)]
COLOCATED = {"rollout.placement": "colocated"}
REPLAYS = {"algorithm.rollout_correction.bypass_mode": False}
WEIGHS = {"algorithm.rollout_correction.rollout_is": "step"}
REJECTS = {
    "algorithm.rollout_correction.rollout_rs": "step_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": [0.5, 2.0],
}
ON_CUDA = {"trainer.device": "cuda", "reward.functions": {"jpeg_incompressibility": {}}}
SHARED_GPU = {"reward.functions": {"jpeg_incompressibility": {"placement": "colocated"}}}


def config(**changes: Any) -> TrainConfig:
    """Of which every iteration can step early, but for these changes by their path; those of `actor_rollout_ref` are
    named without it."""
    tree: dict[str, Any] = {
        "algorithm": {"global_std": False},
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2, "micro_batch_size": 2}},
    }
    for name, value in changes.items():
        *sections, last = name.split(".")
        section = tree["actor_rollout_ref"] if sections[0] in ("actor", "rollout") else tree
        for one in sections:
            section = section.setdefault(one, {})
        section[last] = value
    return TrainConfig.model_validate(tree)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        REPLAYS,
        ON_CUDA,
        COLOCATED | {"rollout.enable_sleep_mode": False},
        {"algorithm.global_std": True, "algorithm.norm_adv_by_std_in_grpo": False},
        {"algorithm.adv_mode": "positive_only"},
        {"reward.reward_model": {"model_path": "judge", "num_gpus": 1}},
        {"reward.reward_model": {"model_path": "judge", "num_gpus": 0}},
    ],
    ids=str,
)
def test_a_step_whose_own_scores_are_enough_may_come_early(changes: dict[str, Any]) -> None:
    assert can_step_early(config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.early_steps": False},
        {"actor.ppo_epochs": 2},
        {"actor.ppo_mini_batch_size": 8},
        {"actor.diffusion_loss.loss_mode": "diffusion_nft"},
        {"actor.diffusion_loss.loss_mode": "distill_kl"},
        {"algorithm.sample_source": "offline", "algorithm.paired_preference": True},
        REPLAYS | WEIGHS,
        REPLAYS | REJECTS,
        {"trainer.one_step_off_policy": True},
        COLOCATED,
        {"algorithm.global_std": True},
        {"algorithm.adv_estimator": "models.algorithms.advantages:compute_gdpo_outcome_advantage"},
        {"algorithm.adv_mode": "binary"},
        {"algorithm.adv_mode": "one_only"},
        ON_CUDA | SHARED_GPU,
        {"reward.reward_model": {"model_path": "judge", "num_gpus": 0.5}},
        {"reward.reward_model": {"model_path": "judge", "num_gpus": 1, "sleep": True}},
    ],
    ids=str,
)
def test_a_step_that_needs_more_or_has_no_room_waits(changes: dict[str, Any]) -> None:
    assert not can_step_early(config(**changes))


def batches_of(uids: list[str]) -> list[Any]:
    """A batch of two samples for each of these prompts."""
    return [SimpleNamespace(keys=range(2), prompts=[SimpleNamespace(uid=uid)] * 2) for uid in uids]


BATCHES = batches_of(UIDS)
OLD: Any = range(8)
"""A number for each batch in place of its old scores."""


@pytest.mark.parametrize(
    ("uids", "replayed", "number", "changes", "expected"),
    [
        (UIDS, None, 1, {}, True),
        (list("aabbcc"), None, 1, {}, True),
        (list("abbacc"), None, 1, {}, False),  # a group is in two mini-batches
        (UIDS, None, 1, {"trainer.early_steps": False}, False),
        (UIDS, "replayed", 1, REPLAYS, True),
        (UIDS, None, 1, REPLAYS, False),
        (UIDS, None, 2, {"trainer.profile.iterations": [1]}, True),
        (UIDS, None, 1, {"trainer.profile.iterations": [1]}, False),
    ],
)
def test_iterations_that_step_early(
    uids: list[str], replayed: Any, number: int, changes: dict[str, Any], expected: bool
) -> None:
    run: Any = SimpleNamespace(config=config(**changes), trainer=SimpleNamespace(mini_batch_samples=4))
    assert (early_steps.early_steps(run, number, batches_of(uids), replayed) is not None) == expected


class Ranks:
    """Stands for the trainer: notes what it is asked, and each step that it is to take.

    Args:
        can: does the engine step early?
        fails: what it is asked when a rank has failed.
    """

    mini_batch_samples = 4

    def __init__(self, can: bool = True, fails: str = ""):
        self.can, self.fails = can, fails
        self.asked: list[str] = []
        self.steps: list[tuple[Any, np.ndarray, OldScores | None]] = []

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise RayError("a rank has failed")

    def old_log_probs(self, replayed: Any) -> tuple[Any, Any]:
        """Those of all batches."""
        self._ask("old_log_probs")
        return OLD, ()

    @property
    def steps_early(self) -> bool:
        """As it was made."""
        self._ask("steps_early")
        return self.can

    def step_early(self, batches: Any, advantages: np.ndarray, old: OldScores | None) -> int:
        """Two steps, which no trainer takes of a mini-batch."""
        self.steps.append((batches, advantages, old))
        return 2


def begun(
    ranks: Ranks, rewards: np.ndarray = REWARDS, unscored: str = "", replays: bool = False, **changes: Any
) -> tuple[EarlySteps, list[int]]:
    """What has begun, and at which samples scores were asked for; those of the prompt `unscored` cannot be got."""
    starts: list[int] = []

    def early_rewards(mini_batch: Any, pending: Any, start: int) -> tuple[np.ndarray, np.ndarray] | None:
        starts.append(start)
        uids = np.array([prompt.uid for batch in mini_batch for prompt in batch.prompts])
        first = 2 * int(uids[0])
        return None if unscored in uids else (rewards[first : first + len(uids)], uids)

    online = SimpleNamespace(reward=SimpleNamespace(early_rewards=early_rewards))
    run: Any = SimpleNamespace(config=config(**changes), trainer=ranks, online=online)
    replayed: Any = SimpleNamespace(log_probs="replayed") if replays else None
    pending: Any = SimpleNamespace(answers="scored")
    steps = EarlySteps()
    step_early(run, steps, BATCHES, pending, replayed)
    return steps, starts


@pytest.fixture
def replayed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old log-probs are there before the scores."""
    monkeypatch.setattr(early_steps, "come_first", lambda answers, _: answers == "replayed")


def whole_advantages(algorithm: Any) -> np.ndarray:
    """Those that the iteration has once all of it is scored."""
    data = {"sample_level_rewards": REWARDS, "uid": np.repeat(UIDS, 2)}
    normed, over_all = algorithm.norm_adv_by_std_in_grpo, algorithm.global_std
    return compute_advantage(data, algorithm.adv_estimator, normed, over_all, algorithm)["advantages"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm.global_std": True, "algorithm.norm_adv_by_std_in_grpo": False},
        {"algorithm.adv_mode": "positive_only"},
    ],
    ids=str,
)
def test_each_mini_batch_but_the_last_begins_with_its_own(replayed_first: None, changes: dict[str, Any]) -> None:
    """Samples, old scores and advantages, which are those of the whole iteration. The rest is the update's."""
    ranks = Ranks()
    steps, starts = begun(ranks, replays=True, **changes)
    assert [batches for batches, _, _ in ranks.steps] == [BATCHES[:2], BATCHES[2:4], BATCHES[4:6]]
    assert [old for _, _, old in ranks.steps] == [OldScores(OLD[first : first + 2], {}) for first in (0, 2, 4)]
    assert starts == [0, 4, 8]
    whole = whole_advantages(config(**changes).algorithm)
    np.testing.assert_array_equal([advantages for _, advantages, _ in ranks.steps], whole[:12].reshape(3, 4))
    assert (steps.steps, steps.batches) == (6, 6)
    steps.check(whole)
    old = OldScores(OLD, {"distance": 1.0})
    batches, advantages, left = steps.rest(BATCHES, whole, old)
    assert (batches, left) == (BATCHES[6:], OldScores(OLD[6:], old.metrics))
    assert advantages.tolist() == whole[12:].tolist()


def test_steps_with_the_rollouts_log_probs_have_no_old_scores() -> None:
    ranks = Ranks()
    steps, _ = begun(ranks)
    assert [old for _, _, old in ranks.steps] == [None] * 3
    assert steps.rest(BATCHES, REWARDS, None)[2] is None
    assert ranks.asked == ["steps_early"]


def test_other_advantages_than_those_that_were_trained_on_are_refused() -> None:
    """NaN is one like the others."""
    steps, whole = EarlySteps(2, np.array([1, np.nan], np.float32)), np.array([1, np.nan, 3], np.float32)
    steps.check(whole)
    for other in (whole + 1, np.zeros(3, np.float32)):
        with pytest.raises(EarlyStepMismatch, match=r"with other advantages .*set trainer\.early_steps to false"):
            steps.check(other)


def test_nothing_begins_after_a_score_that_could_not_be_got() -> None:
    ranks = Ranks()
    steps, _ = begun(ranks, unscored="2")
    assert ([batches for batches, _, _ in ranks.steps], steps.batches) == ([BATCHES[:2]], 2)


def test_nothing_begins_after_a_mini_batch_with_nothing_to_learn() -> None:
    ranks = Ranks()
    second = np.arange(16) // 4 == 1
    steps, _ = begun(ranks, np.where(second, np.float32(np.nan), REWARDS))
    assert ([batches for batches, _, _ in ranks.steps], steps.batches) == ([BATCHES[:2]], 2)


def test_what_is_all_scored_before_it_is_replayed_is_left_to_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_steps, "come_first", lambda answers, _: answers == "scored")
    ranks = Ranks()
    begun(ranks, replays=True)
    assert (ranks.asked, ranks.steps) == ([], [])


def test_a_rank_is_asked_whether_it_can_once_it_has_replayed(replayed_first: None) -> None:
    """It answers no sooner."""
    for can, count in ((True, 3), (False, 0)):
        ranks = Ranks(can)
        steps, _ = begun(ranks, replays=True)
        assert ranks.asked == ["old_log_probs", "steps_early"]
        assert (len(ranks.steps), steps.steps) == (count, 2 * count)


@pytest.mark.parametrize("fails", ["old_log_probs", "steps_early"])
def test_an_error_of_a_rank_is_left_to_what_is_asked_of_it_next(replayed_first: None, fails: str) -> None:
    """By then the scores are kept."""
    ranks = Ranks(fails=fails)
    steps, starts = begun(ranks, replays=True)
    assert ranks.asked[-1] == fails
    assert (ranks.steps, starts, steps.steps, steps.batches) == ([], [], 0, 0)
