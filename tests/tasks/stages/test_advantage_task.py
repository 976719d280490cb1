# SPDX-License-Identifier: Apache-2.0
"""What the advantage stage adds to the estimators."""

import random
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from models.algorithms import compute_flow_grpo_outcome_advantage, compute_gdpo_outcome_advantage
from models.registry import WrongAnswer
from tasks.actors.reward_group import Scores
from tasks.actors.update_plan import NothingToLearn
from tasks.config.algorithm import DiffusionAlgoConfig
from tasks.records.metrics import compute_data_metrics_diffusion
from tasks.stages.advantage import advantage, compute_advantage
from tasks.system.stopwatch import Stopwatch

UIDS = np.array(["a"] * 3 + ["b"] * 3)
REWARDS = np.array([0.1, 0.5, 0.9, 0.7, 0.7, 0.7], np.float32)
NAN = float("nan")


def advantages_of(rewards, uids, config, scores, weights) -> np.ndarray:
    """As the loop asks for them."""
    data = {"sample_level_rewards": rewards, "uid": uids, "reward_scores": scores, "reward_weights": weights}
    found = compute_advantage(data, config.adv_estimator, config.norm_adv_by_std_in_grpo, config.global_std, config)
    assert {name: found[name] for name in data} == data
    return found["advantages"]


def test_the_bare_call_has_the_estimators_defaults() -> None:
    """rewards [.1, .5, .9 | .2, .2, .8], global std: the values of the Flow-GRPO formula."""
    data = {"sample_level_rewards": np.array([0.1, 0.5, 0.9, 0.2, 0.2, 0.8]), "uid": UIDS}
    found = compute_advantage(data, "flow_grpo")
    golden = [-1.17919, 0, 1.17919, -0.58959, -0.58959, 1.17919]
    assert found["advantages"] == pytest.approx(golden, abs=1e-5)
    assert found["returns"] == pytest.approx(golden, abs=1e-5)
    within = compute_advantage(data, "flow_grpo", global_std=False)["advantages"]
    assert within == pytest.approx([-0.99975, 0, 0.99975, -0.57718, -0.57718, 1.15437], abs=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_the_stage_reads_both_normalisations_from_the_config(norm: bool, whole: bool) -> None:
    """Two groups of different spread: the four combinations give different advantages."""
    rewards = np.array([0.1, 0.5, 0.9, 0.2, 0.3, 0.4], np.float32)
    samples = pd.DataFrame({"uid": UIDS, "reward": rewards, "reward/ocr": rewards})
    config = DiffusionAlgoConfig(norm_adv_by_std_in_grpo=norm, global_std=whole)
    found, returns = advantage.fn(Stopwatch(), Scores(samples, {"ocr": 1.0}, {"ocr": 0.0}), config)
    assert np.array_equal(found, returns)
    deviation = rewards - np.repeat([0.5, 0.3], 3)
    spread = rewards.std(ddof=1) if whole else np.repeat([0.4, 0.1], 3)
    assert found == pytest.approx(deviation / spread if norm else deviation, abs=2e-3)


def test_the_stage_reads_the_mode_and_the_estimators_own_options() -> None:
    """A = (r - mean of the group) / (std of the batch + epsilon), of which what is below 0 is not kept."""
    rewards = np.array([0.1, 0.5, 0.9, 0.2, 0.3, 0.4], np.float32)
    samples = pd.DataFrame({"uid": UIDS, "reward": rewards, "reward/ocr": rewards})
    config = DiffusionAlgoConfig(adv_mode="positive_only", adv_options={"epsilon": 0.5})
    found, returns = advantage.fn(Stopwatch(), Scores(samples, {"ocr": 1.0}, {"ocr": 0.0}), config)
    expected = (rewards - np.repeat([0.5, 0.3], 3)) / (rewards.std(ddof=1) + 0.5)
    assert found == pytest.approx(np.maximum(expected, 0), abs=1e-6)
    assert returns == pytest.approx(expected, abs=1e-6)


MODES = {
    "continuous": lambda a: a,
    "positive_only": lambda a: max(a, 0.0),
    "negative_only": lambda a: min(a, 0.0),
    "one_only": lambda a: 1.0 if a > 0 else 0.0,
    "binary": lambda a: (a > 0) - (a < 0),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_keeps_its_part_and_a_missing_reward_stays_missing(mode: str) -> None:
    rewards = np.array([0.1, 0.4, 0.9, 0.2, np.nan, 0.8], np.float32)
    plain = advantages_of(rewards, UIDS, DiffusionAlgoConfig(), {}, {})
    kept = advantages_of(rewards, UIDS, DiffusionAlgoConfig(adv_mode=mode), {}, {})
    assert np.isnan(kept).tolist() == [False, False, False, False, True, False]
    there = ~np.isnan(rewards)
    assert kept[there].tolist() == pytest.approx([MODES[mode](float(a)) for a in plain[there]])


def test_equal_groups_are_dropped_and_the_others_are_as_before() -> None:
    config = DiffusionAlgoConfig(global_std=False)
    kept = advantages_of(REWARDS, UIDS, config, {}, {})
    dropped = advantages_of(REWARDS, UIDS, config.model_copy(update={"drop_equal_groups": True}), {}, {})
    np.testing.assert_array_equal(kept[3:], 0)
    assert np.isnan(dropped[3:]).all()
    np.testing.assert_array_equal(dropped[:3], kept[:3])


def test_a_missing_reward_does_not_make_a_group_unequal() -> None:
    rewards = REWARDS.copy()
    rewards[4] = np.nan
    advantages = advantages_of(rewards, UIDS, DiffusionAlgoConfig(drop_equal_groups=True), {}, {})
    assert np.isnan(advantages[3:]).all()
    assert not np.isnan(advantages[:3]).any()


def test_all_missing_is_an_error_and_all_equal_is_not() -> None:
    config = DiffusionAlgoConfig(drop_equal_groups=True)
    with pytest.raises(NothingToLearn, match="every reward"):
        advantages_of(np.full(6, np.nan, np.float32), UIDS, config, {}, {})
    advantages = advantages_of(np.ones(6, np.float32), UIDS, config, {}, {})
    assert np.isnan(advantages).all()
    metrics = compute_data_metrics_diffusion(
        {"sample_level_rewards": np.ones(6), "uid": UIDS, "advantages": advantages}
    )
    assert metrics["critic/rewards/mean"] == 1
    assert "critic/advantages/mean" not in metrics


def test_data_metrics_describe_groups() -> None:
    metrics = compute_data_metrics_diffusion({"sample_level_rewards": REWARDS, "uid": UIDS})
    assert metrics["critic/rewards/zero_std_ratio"] == 0.5
    assert metrics["critic/rewards/group_size"] == 3
    assert metrics["critic/rewards/std_mean"] == pytest.approx(np.std(REWARDS[:3]) / 2)


def test_data_metrics_are_of_the_rewards_that_are_there() -> None:
    """Of two steps each; a sample without one of its two has none, and a group without any has no deviation."""
    pairs = [
        (0.2, 0.4),
        (NAN, 0.9),
        (0.6, 1.0),
        (0.5, 0.5),
        (0.4, 0.6),
        (np.inf, 0.1),
        (NAN, 0.2),
        (0.3, NAN),
        (NAN, NAN),
    ]
    rewards, uids = np.array(pairs), np.array(["a"] * 3 + ["b"] * 3 + ["c"] * 3)
    advantages = np.where(np.isinf(rewards), 0.0, rewards)
    found = compute_data_metrics_diffusion({"sample_level_rewards": rewards, "uid": uids, "advantages": advantages})
    named = {name.removeprefix("critic/rewards/"): value for name, value in found.items() if "/rewards/" in name}
    spread = {"mean": (0.3 + 0.8 + 0.5 + 0.5) / 4, "max": 0.8, "min": 0.3, "std_mean": 0.25 / 2, "zero_std_ratio": 0.5}
    assert named == pytest.approx(spread | {"group_size": 3, "missing": 5, "dropped_groups": 1})
    assert found["critic/advantages/missing"] == 4


def test_a_group_of_which_one_sample_is_left_has_no_deviation() -> None:
    rewards, uids = np.array([1.0, NAN, 0.0, 1.0]), np.array(list("aabb"))
    found = compute_data_metrics_diffusion({"sample_level_rewards": rewards, "uid": uids})
    assert (found["critic/rewards/std_mean"], found["critic/rewards/zero_std_ratio"]) == (0.5, 0.0)
    alone = compute_data_metrics_diffusion({"sample_level_rewards": rewards[:2], "uid": uids[:2]})
    assert not {"critic/rewards/std_mean", "critic/rewards/zero_std_ratio"} & alone.keys()


def test_a_group_of_which_one_sample_is_left_is_dropped_and_counted() -> None:
    rewards = np.array([0.1, np.nan, np.nan, 0.2, 0.6, np.nan], np.float32)
    advantages = advantages_of(rewards, UIDS, DiffusionAlgoConfig(global_std=False), {}, {})
    assert np.isnan(advantages).tolist() == [True, True, True, False, False, True]
    alone = advantages_of(rewards[3:], UIDS[3:], DiffusionAlgoConfig(global_std=False), {}, {})
    np.testing.assert_array_equal(advantages[3:], alone)
    metrics = compute_data_metrics_diffusion({"sample_level_rewards": rewards, "uid": UIDS})
    assert (metrics["critic/rewards/dropped_groups"], metrics["critic/rewards/missing"]) == (1, 3)
    with pytest.raises(NothingToLearn, match="no prompt has two samples"):
        advantages_of(np.array([0.1, np.nan, np.nan] * 2, np.float32), UIDS, DiffusionAlgoConfig(), {}, {})


def test_gdpo_leaves_a_missing_optional_reward_out_of_its_own_statistics() -> None:
    nan, uids = np.nan, np.array(["a"] * 4)
    text, taste = np.array([0.0, 1.0, 2.0, 3.0], np.float32), np.array([5.0, nan, 7.0, 9.0], np.float32)
    config = DiffusionAlgoConfig(adv_estimator="gdpo")
    found = advantages_of(text, uids, config, {"text": text, "taste": taste}, {"text": 1.0, "taste": 2.0})
    z_text = (text - 1.5) / text.std(ddof=1)
    z_taste = np.array([-1.0, 0.0, 0.0, 1.0])  # (r - 7) / 2 of the three that are there
    combined = z_text + 2 * z_taste
    assert found == pytest.approx((combined - combined.mean()) / combined.std(ddof=1), rel=1e-6)
    gone = advantages_of(text, uids, config, {"text": text, "taste": taste * nan}, {"text": 1.0, "taste": 2.0})
    assert gone == pytest.approx(z_text, rel=1e-6)


# ---- nothing to learn from


def infinite_advantage(sample_level_rewards, index, **settings):
    """An estimator that divides by 0."""
    return sample_level_rewards / 0, sample_level_rewards / 0


@pytest.mark.parametrize("config", [{}, {"global_std": False}, {"norm_adv_by_std_in_grpo": False}])
def test_an_infinite_reward_costs_its_own_sample_and_no_other(config: dict) -> None:
    """Closed form: the five others get what they would get without it."""
    settings = DiffusionAlgoConfig(**config)
    for odd in (np.inf, -np.inf):
        rewards = np.array([0.1, 0.5, 0.9, 0.2, odd, 0.8], np.float32)
        found = advantages_of(rewards, UIDS, settings, {}, {})
        there = np.isfinite(rewards)
        assert np.isnan(found).tolist() == (~there).tolist()
        np.testing.assert_array_equal(found[there], advantages_of(rewards[there], UIDS[there], settings, {}, {}))


def test_an_iteration_without_a_finite_advantage_names_the_reward() -> None:
    weights = {"text": 1.0, "taste": 0.5, "watched": 0.0}
    gone = np.array([np.inf, -np.inf, np.nan] * 2, np.float32)
    scores = {"text": gone, "taste": REWARDS, "watched": gone}
    said = r"\(text: 6 of 6 missing, taste: 0 of 6 missing\), so there is nothing"
    for config in (DiffusionAlgoConfig(), DiffusionAlgoConfig(drop_equal_groups=True)):
        with pytest.raises(NothingToLearn, match=f"every reward of the iteration is missing {said}"):
            advantages_of(gone, UIDS, config, scores, weights)
    estimator = DiffusionAlgoConfig(adv_estimator=f"{__name__}:infinite_advantage")
    with pytest.raises(NothingToLearn, match=r"infinite_advantage gives no sample .* finite advantage \(text: 0 of 6"):
        advantages_of(REWARDS, UIDS, estimator, {"text": REWARDS}, {"text": 1.0})


def test_gdpo_drops_a_group_only_where_each_reward_ties() -> None:
    """Weighted sums that tie hide rewards that do not: in group a they are 1, in group b all three are equal."""
    text, taste = np.array([0, 0.5, 1, 2, 2, 2], np.float32), np.array([1, 0.5, 0, 3, 3, 3], np.float32)
    scores, weights = {"text": text, "taste": taste, "watched": np.arange(6)}, {"text": 1, "taste": 1, "watched": 0}
    config = DiffusionAlgoConfig(adv_estimator="gdpo", drop_equal_groups=True)
    found = advantages_of(text + taste, UIDS, config, scores, weights)
    assert np.isnan(found).tolist() == [False] * 3 + [True] * 3
    punished = advantages_of(text + taste - np.arange(6), UIDS, config, scores, weights | {"watched": -1})
    assert not np.isnan(punished).any(), "what is held against a sample tells it from the others, too"
    heavier = weights | {"text": 2}
    kept = advantages_of(
        2 * text + taste, UIDS, config.model_copy(update={"drop_equal_groups": False}), scores, heavier
    )
    dropped = advantages_of(2 * text + taste, UIDS, config, scores, heavier)
    np.testing.assert_array_equal(dropped[:3], kept[:3])
    assert np.abs(dropped[:3]).max() > 0.3
    of_the_sum = advantages_of(text + taste, UIDS, config.model_copy(update={"adv_estimator": "flow_grpo"}), {}, {})
    assert np.isnan(of_the_sum).all(), "the others compare the sum"


def test_of_a_group_only_the_samples_that_count_tie_or_do_not() -> None:
    """Neither a sample whose other reward is missing nor one that the choice left out says how those that count are."""
    text, taste = np.array([0, 0.5, 1, 0.7, 0.7, NAN], np.float32), np.array([0, 2, 1, 0.3, 0.3, 0.9], np.float32)
    weights = {"text": 1, "taste": 1}
    config = DiffusionAlgoConfig(adv_estimator="gdpo", drop_equal_groups=True)
    found = advantages_of(text + taste, UIDS, config, {"text": text, "taste": taste}, weights)
    assert np.isnan(found).tolist() == [False] * 3 + [True] * 3
    # The sums of group b tie, so its first and its last sample are chosen, which tie in each reward.
    text[3:], taste[3:] = (1, 0, 1), (0, 1, 0)
    chosen = config.model_copy(update={"best_worst_k": 1})
    found = advantages_of(text + taste, UIDS, chosen, {"text": text, "taste": taste}, weights)
    assert np.isnan(found).tolist() == [False, False, True] + [True] * 3


def best_and_worst_by_sorting(rewards: list[float], k: int) -> list[int]:
    """Positions that stay of one group: sort, then both ends; among equal rewards the earlier one is the worse."""
    there = [i for i, reward in enumerate(rewards) if np.isfinite(reward)]
    order = sorted(there, key=lambda i: (rewards[i], i))
    return sorted({*order[:k], *order[-k:]})


@pytest.mark.parametrize(
    ("rewards", "signs"),
    [([0.2, 0.4, 0.4, 0.6], [-1, 0, 0, 1]), ([0.1, 0.5, 0.9, np.nan], [-1, 0, 1, np.nan]), ([0.4] * 4, [0] * 4)],
)
def test_a_sample_that_has_its_groups_mean_has_no_sign(rewards: list[float], signs: list[float]) -> None:
    """Rewards such as k/5 are not exact in float32: rounding would be a whole advantage."""
    for mode, kept in (("binary", np.array(signs)), ("one_only", np.maximum(signs, 0))):
        group = np.array(rewards, np.float32), np.array(["a"] * 4)
        found = advantages_of(*group, DiffusionAlgoConfig(adv_mode=mode), {}, {})
        np.testing.assert_array_equal(found, kept)


@pytest.mark.parametrize("mode", ["binary", "one_only"])
def test_a_group_that_ties_has_no_sign(mode: str) -> None:
    """Whatever the other group's rewards are: neither all good nor all bad."""
    draw = np.random.default_rng(3)
    config = DiffusionAlgoConfig(adv_estimator="gdpo", adv_mode=mode)
    for _ in range(20):
        scores = {name: np.float32([*draw.random(3), 0.3, 0.3, 0.3]) for name in ("text", "taste")}
        total = 0.6 * scores["text"] + 0.4 * scores["taste"]
        found = advantages_of(total, UIDS, config, scores, {"text": 0.6, "taste": 0.4})
        assert found[3:].tolist() == [0.0] * 3
        assert set(found[:3]) > {1.0}


@pytest.mark.parametrize("name", ["flow_grpo", "gdpo"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_best_and_the_worst_are_compared_with_each_other_alone(name: str, k: int) -> None:
    """Two groups whose samples lie mixed, one with a missing reward: as if the others had not been sampled."""
    uids = np.array(["a", "b"] * 8)
    rewards = np.random.default_rng(k).random(16).astype(np.float32).round(1)  # with ties
    rewards[4] = np.nan
    kept = []
    for uid in ("a", "b"):
        group = np.flatnonzero(uids == uid)
        kept += [group[i] for i in best_and_worst_by_sorting(rewards[group].tolist(), k)]
    kept = np.array(sorted(kept))
    given = {"adv_estimator": name} | ({} if name == "gdpo" else {"global_std": False})
    found = advantages_of(rewards, uids, DiffusionAlgoConfig(best_worst_k=k, **given), {"ocr": rewards}, {"ocr": 1.0})
    alone = advantages_of(rewards[kept], uids[kept], DiffusionAlgoConfig(**given), {"ocr": rewards[kept]}, {"ocr": 1.0})
    assert np.array_equal(np.flatnonzero(np.isfinite(found)), kept)
    assert np.array_equal(found[kept], alone)
    assert len(kept) == 4 * k


def test_golden_advantages_of_the_best_and_the_worst_two() -> None:
    """Of .1 .2 .4 .5 .8 .9 stay .1 .2 .8 .9: mean .5, deviation sqrt(.5 / 3); of the whole group's, .48 and .32."""
    rewards = np.array([0.8, 0.4, 0.1, 0.9, 0.5, 0.2], np.float32)
    given = {"best_worst_k": 2, "global_std": False}
    found = advantages_of(rewards, np.array(["a"] * 6), DiffusionAlgoConfig(**given), {}, {})
    assert found == pytest.approx([0.734667, NAN, -0.979556, 0.979556, NAN, -0.734667], abs=5e-6, nan_ok=True)
    centred = DiffusionAlgoConfig(norm_adv_by_std_in_grpo=False, **given)
    found = advantages_of(rewards, np.array(["a"] * 6), centred, {}, {})
    assert found == pytest.approx([0.3, NAN, -0.4, 0.4, NAN, -0.3], abs=1e-6, nan_ok=True)


def kept_by_hand(rewards: list[float], groups: list[str], k: int) -> list[int]:
    """Positions of each group's k best and k worst; all that have a reward where these are no more than 2k."""
    kept: list[int] = []
    for group in set(groups):
        own = [i for i, name in enumerate(groups) if name == group]
        ends = best_and_worst_by_sorting([rewards[i] for i in own], k)
        kept += [own[place] for place in ends]
    return kept


def advantages_by_hand(
    scores: dict[str, list[float]], weights: dict[str, float], groups: list[str], k: int, settings: dict[str, Any]
) -> list[float]:
    """Choice, then the estimators' formulas over the chosen alone, in Python floats."""
    rewards = [sum(weights[name] * scores[name][i] for name in scores) for i in range(len(groups))]
    kept = sorted(kept_by_hand(rewards, groups, k))
    mates = {i: [j for j in kept if groups[j] == groups[i]] for i in kept}
    if settings.get("adv_estimator") == "gdpo":
        joined = {
            i: sum(
                weights[name] * (own[i] - fmean(own[j] for j in mates[i])) / max(stdev(own[j] for j in mates[i]), 1e-6)
                for name, own in scores.items()
            )
            for i in kept
        }
        centre, spread = fmean(joined.values()), max(stdev(joined.values()), 1e-6)
        return [(joined[i] - centre) / spread if i in joined else NAN for i in range(len(groups))]
    found = [NAN] * len(groups)
    for i in kept:
        among = kept if settings.get("global_std", True) else mates[i]
        spread = stdev(rewards[j] for j in among) + 1e-4 if settings.get("norm_adv_by_std_in_grpo", True) else 1.0
        found[i] = (rewards[i] - fmean(rewards[j] for j in mates[i])) / spread
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"global_std": False}, {"norm_adv_by_std_in_grpo": False}, {"adv_estimator": "gdpo"}],
    ids=["global", "group", "dr", "gdpo"],
)
def test_choice_and_advantages_are_the_formulas_over_the_chosen(settings: dict[str, Any], k: int) -> None:
    """Groups of 2 to 12 samples that lie mixed, with ties and missing rewards, and two rewards of which the sum
    chooses. All rewards are whole 32nds, so that fp32 has them exactly."""
    draw, weights = random.Random(k), {"ocr": 1.0, "taste": 0.25}
    for _ in range(10):
        groups = [name for name, size in zip("abcde", (2, 5, 7, 9, 12), strict=True) for _ in range(size)]
        draw.shuffle(groups)
        scores = {name: [draw.randint(0, 32) / 32 for _ in groups] for name in weights}
        for place in draw.sample([i for i, name in enumerate(groups) if name in "de"], 3):
            scores["ocr"][place] = NAN
        columns = {name: np.array(values, np.float32) for name, values in scores.items()}
        total = columns["ocr"] + np.float32(0.25) * columns["taste"]
        config = DiffusionAlgoConfig(best_worst_k=k, **settings)
        found = advantages_of(total, np.array(groups), config, columns, weights)
        expected = advantages_by_hand(scores, weights, groups, k, settings)
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7, nan_ok=True)
        assert np.isnan(found).sum() > 3, "besides the missing ones"


def test_a_group_that_has_no_more_than_both_ends_keeps_all_and_equal_groups_still_leave() -> None:
    rewards = np.array([0.1, np.nan, 0.9, 0.4, 0.7, 0.7, 0.7, 0.7], np.float32)
    uids = np.array(["a"] * 4 + ["b"] * 4)
    kept = DiffusionAlgoConfig(best_worst_k=1, drop_equal_groups=True)
    found = advantages_of(rewards, uids, kept, {}, {})
    assert np.isfinite(found).tolist() == [True, False, True, False, False, False, False, False]
    two = advantages_of(rewards, uids, DiffusionAlgoConfig(best_worst_k=2), {}, {})
    assert np.isfinite(two).tolist() == [True, False, True, True, True, True, True, True]
    off = advantages_of(rewards, uids, DiffusionAlgoConfig(), {}, {})
    assert np.array_equal(two, off, equal_nan=True)


def test_of_rewards_of_several_steps_the_mean_of_all_chooses_the_best_and_the_worst() -> None:
    """Of each step alone another sample would be the best and another the worst."""
    rewards = np.array([[0.9, 0.1, 0.2], [0.5, 0.6, 0.7], [0.1, 0.8, 0.2], [0.3, 0.0, 0.8], [0.2, 0.3, 0.3]])
    assert np.argsort(rewards.mean(1)).tolist() == [4, 3, 2, 0, 1]
    assert all({step.argmax(), step.argmin()} != {1, 4} for step in rewards.T)
    found = advantages_of(rewards, np.array(["a"] * 5), DiffusionAlgoConfig(best_worst_k=1), {}, {})
    assert np.isfinite(found).all(1).tolist() == [False, True, False, False, True]
    assert np.isnan(found[[0, 2, 3]]).all()


UNEQUAL = [0.1, 0.5, 0.9, 0.2, 0.2, 0.8]


def test_estimators_see_each_reward_and_its_weight() -> None:
    """From the table of rewards; the estimators themselves have tests against a reference."""
    columns = {"reward/ocr": UNEQUAL, "reward/taste": [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]}
    table = pd.DataFrame({"uid": UIDS} | {name: np.array(values, np.float32) for name, values in columns.items()})
    scores = Scores(table, {"ocr": 1.0, "taste": 0.25}, 0.0)
    total = np.array(UNEQUAL) + 0.25 * np.array(columns["reward/taste"])
    data = {"sample_level_rewards": total, "uid": scores.uids}
    data |= {"reward_scores": scores.by_reward, "reward_weights": scores.weights}
    given, each = torch.tensor(total), {name: torch.tensor(values) for name, values in scores.by_reward.items()}
    weighed, _ = compute_gdpo_outcome_advantage(given, UIDS, reward_scores=each, reward_weights=scores.weights)
    assert compute_advantage(data, "gdpo")["advantages"] == pytest.approx(weighed.numpy(), rel=1e-5)
    summed, _ = compute_flow_grpo_outcome_advantage(given, UIDS)
    assert compute_advantage(data, "flow_grpo")["advantages"] == pytest.approx(summed.numpy(), rel=1e-5, abs=1e-6)
    assert not np.allclose(weighed, summed, atol=0.05)


@pytest.mark.parametrize("setting", ["norm_adv_by_std_in_grpo", "global_std"])
def test_gdpo_refuses_a_setting_it_would_not_read(setting: str) -> None:
    with pytest.raises(ValueError, match=r"gdpo divides by .* leave norm_adv_by_std_in_grpo and global_std true"):
        DiffusionAlgoConfig(adv_estimator="gdpo", **{setting: False})


@pytest.mark.parametrize("estimator", ["flow_grpo", "gdpo"])
def test_the_stage_takes_the_same_shapes_and_a_step_without_reward_is_a_sample_without(estimator: str) -> None:
    rewards = np.repeat(np.array(UNEQUAL, np.float32)[:, None], 3, axis=1)
    rewards[1, 2] = np.inf
    data = {"sample_level_rewards": rewards, "uid": UIDS}
    data |= {"reward_scores": {"ocr": rewards}, "reward_weights": {"ocr": 1.0}}
    found = compute_advantage(data, estimator)
    assert found["advantages"].shape == found["returns"].shape == (6, 3)
    assert np.isnan(found["advantages"]).tolist() == [[False] * 3, [True] * 3, *[[False] * 3] * 4]
    metrics = compute_data_metrics_diffusion(found)
    present = np.array([0.1, 0.9, 0.2, 0.2, 0.8])
    assert metrics["critic/rewards/mean"] == pytest.approx(present.mean())
    assert metrics["critic/rewards/missing"] == metrics["critic/advantages/missing"] == 1
    assert metrics["critic/rewards/group_size"] == 3
    assert metrics["critic/advantages/max"] == pytest.approx(np.nanmax(found["advantages"]))


def centred(sample_level_rewards: Any, index: Any, **given: Any) -> Any:
    """Advantages without returns."""
    return sample_level_rewards - sample_level_rewards.mean()


def in_numpy(sample_level_rewards: Any, index: Any, **given: Any) -> Any:
    """Arrays in place of tensors."""
    return sample_level_rewards.numpy(), sample_level_rewards.numpy()


def of_the_group(sample_level_rewards: Any, index: Any, **given: Any) -> Any:
    """A value for each prompt and not for each sample."""
    return sample_level_rewards.reshape(-1, 2).mean(1), sample_level_rewards


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (centred, "a Tensor: return two tensors, advantages and returns"),
        (in_numpy, r"advantages a ndarray: return a tensor of the rewards' shape \(4,\)"),
        (of_the_group, r"advantages \(2,\): return a tensor of the rewards' shape \(4,\)"),
    ],
)
def test_what_an_estimator_must_not_return_is_named(estimator: Any, message: str) -> None:
    data = {"sample_level_rewards": np.arange(4.0), "uid": np.array(["a", "a", "b", "b"])}
    path = f"{__name__}:{estimator.__name__}"
    with pytest.raises(WrongAnswer, match=f"algorithm.adv_estimator is '{path}', which returned {message}"):
        compute_advantage(data, path)
