# SPDX-License-Identifier: Apache-2.0
"""Advantages against golden values and a reference in plain Python floats."""

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from models.algorithms import (
    DiffusionAdvantageEstimator,
    compute_flow_grpo_outcome_advantage,
    compute_gdpo_outcome_advantage,
    get_diffusion_adv_estimator_fn,
    register_diffusion_adv_est,
)

REWARDS = [0.1, 0.5, 0.9, 0.2, 0.2, 0.8]
GROUPS = ["a", "a", "a", "b", "b", "b"]
NAN = float("nan")


def advantages(rewards: list[float], groups: list[str], **settings: Any) -> list[float]:
    values, returns = compute_flow_grpo_outcome_advantage(
        torch.tensor(rewards, dtype=torch.float64), np.array(groups, dtype=object), **settings
    )
    torch.testing.assert_close(returns, values, rtol=0, atol=0, equal_nan=True)
    return values.tolist()


@pytest.mark.parametrize(
    ("settings", "golden"),
    [
        ({}, [-1.17919, 0, 1.17919, -0.58959, -0.58959, 1.17919]),
        ({"global_std": False}, [-0.99975, 0, 0.99975, -0.57718, -0.57718, 1.15437]),
        ({"norm_adv_by_std_in_grpo": False}, [-0.4, 0, 0.4, -0.2, -0.2, 0.4]),
    ],
)
def test_golden_values(settings: dict[str, Any], golden: list[float]) -> None:
    assert advantages(REWARDS, GROUPS, **settings) == pytest.approx(golden, abs=5e-6)


def reference(rewards: list[float], groups: list[str], global_std: bool, normalise: bool) -> list[float]:
    """The table's formulas, one sample at a time; a missing reward takes part in nothing."""
    present = [r for r in rewards if not math.isnan(r)]
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward):
            result.append(NAN)
        elif len(own) == 1:
            result.append(0.0)
        else:
            scale = statistics.stdev(present if global_std else own) + 1e-4 if normalise else 1.0
            result.append((reward - statistics.fmean(own)) / scale)
    return result


@pytest.mark.parametrize(("global_std", "normalise"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_random_groups_against_the_reference(global_std: bool, normalise: bool, missing: float) -> None:
    """Groups of different sizes, interleaved, some of one sample and some with all rewards missing."""
    draw = random.Random(11)
    for _ in range(20):
        groups = [draw.choice("abcdefgh") for _ in range(25)]
        rewards = [NAN if draw.random() < missing else draw.gauss(3.0, 2.0) for _ in groups]
        result = advantages(rewards, groups, global_std=global_std, norm_adv_by_std_in_grpo=normalise)
        expected = reference(rewards, groups, global_std, normalise)
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def test_order_of_the_samples_does_not_matter() -> None:
    order = [4, 0, 5, 2, 1, 3]
    shuffled = advantages([REWARDS[i] for i in order], [GROUPS[i] for i in order])
    assert shuffled == pytest.approx([advantages(REWARDS, GROUPS)[i] for i in order], rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"global_std": False}, {"norm_adv_by_std_in_grpo": False}])
def test_a_sample_alone_in_its_group_has_nothing_to_be_better_than(settings: dict[str, Any]) -> None:
    assert advantages([0.1, 0.9, 0.7], ["a", "a", "b"], **settings)[2] == 0.0
    assert advantages([0.7], ["b"], **settings) == [0.0]


@pytest.mark.parametrize("settings", [{}, {"global_std": False}])
def test_a_missing_reward_is_as_if_the_sample_were_not_there(settings: dict[str, Any]) -> None:
    with_missing = advantages([0.1, NAN, *REWARDS[1:]], ["a", *GROUPS], **settings)
    assert math.isnan(with_missing.pop(1))
    assert with_missing == pytest.approx(advantages(REWARDS, GROUPS, **settings), rel=1e-12)


def test_a_reward_alone_among_missing_ones_gives_zero() -> None:
    result = advantages([NAN, 0.4, NAN, 0.1, 0.3], ["a", "a", "a", "b", "b"])
    assert math.isnan(result[0])
    assert math.isnan(result[2])
    assert result[1] == 0.0


def test_all_rewards_missing() -> None:
    assert all(math.isnan(a) for a in advantages([NAN, NAN], ["a", "a"]))


@pytest.mark.parametrize("settings", [{}, {"global_std": False}])
def test_equal_rewards_give_zero_and_not_a_division_by_zero(settings: dict[str, Any]) -> None:
    assert advantages([0.5] * 4, ["a", "a", "b", "b"], **settings) == [0.0] * 4


def test_number_format_is_that_of_the_rewards() -> None:
    """The arithmetic is float64: rewards that differ in fp32's last bits keep their order and sign."""
    rewards = torch.tensor([1000.0, 1000.0001, 1000.0002])
    values, _ = compute_flow_grpo_outcome_advantage(rewards, np.array(["a"] * 3), epsilon=1e-12)
    assert values.dtype == torch.float32
    expected = reference_without_epsilon(rewards.double().tolist())
    assert values.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def reference_without_epsilon(rewards: list[float]) -> list[float]:
    centre, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - centre) / spread for reward in rewards]


# ---- several rewards: GDPO


def gdpo(scores: dict[str, list[float]], weights: dict[str, float], groups: list[str]) -> list[float]:
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in scores.items()}
    total = torch.stack([weights[name] * columns[name] for name in scores if weights[name] != 0]).sum(0)
    index = np.array(groups, dtype=object)
    values, returns = compute_gdpo_outcome_advantage(total, index, reward_scores=columns, reward_weights=weights)
    torch.testing.assert_close(returns, values, rtol=0, atol=0, equal_nan=True)
    return values.tolist()


def gdpo_reference(scores: dict[str, list[float]], weights: dict[str, float], groups: list[str]) -> list[float]:
    """z_k in the group, c = sum w_k z_k, then c over the batch; samples alone or missing are in no statistic."""
    used = [name for name in scores if weights[name] != 0]
    rows = range(len(groups))
    present = {i for i in rows if not any(math.isnan(scores[name][i]) for name in used)}
    mates = {i: [j for j in present if groups[j] == groups[i]] for i in present}
    combined = {}
    for i in present:
        if len(mates[i]) > 1:
            combined[i] = 0.0
            for name in used:
                values = [scores[name][j] for j in mates[i]]
                spread = max(statistics.stdev(values), 1e-6)
                combined[i] += weights[name] * (scores[name][i] - statistics.fmean(values)) / spread
    if not combined:
        return [0.0 if i in present else NAN for i in rows]
    centre, spread = statistics.fmean(combined.values()), max(statistics.stdev(combined.values()), 1e-6)
    return [(combined[i] - centre) / spread if i in combined else 0.0 if i in present else NAN for i in rows]


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_gdpo_against_the_reference(missing: float) -> None:
    draw = random.Random(5)
    weights = {"ocr": 1.0, "taste": -0.3, "watched": 0.0}
    for _ in range(20):
        groups = [draw.choice("abcdefgh") for _ in range(25)]
        scores = {name: [NAN if draw.random() < missing else draw.gauss(3.0, 2.0) for _ in groups] for name in weights}
        result = gdpo(scores, weights, groups)
        assert result == pytest.approx(gdpo_reference(scores, weights, groups), rel=1e-9, abs=1e-12, nan_ok=True)


def test_gdpo_hears_the_quiet_reward() -> None:
    """A reward a thousand times larger does not drown the other, as it does in the sum."""
    scores = {"loud": [1000.0, 2000.0, 1500.0, 1500.0], "quiet": [0.0, 0.0, 0.0, 1.0]}
    weights = {"loud": 1.0, "quiet": 1.0}
    own = gdpo(scores, weights, ["a"] * 4)
    assert own[3] > own[2] + 0.5
    total = [a + b for a, b in zip(*scores.values(), strict=True)]
    summed = advantages(total, ["a"] * 4)
    assert summed[3] - summed[2] < 0.01


def test_gdpo_with_one_reward_ranks_as_the_group_does() -> None:
    """z has mean 0 and deviation 1 in each group; the batch's deviation is all that is left to divide by."""
    z = advantages(REWARDS, GROUPS, global_std=False, epsilon=0.0)
    expected = [value / statistics.stdev(z) for value in z]
    assert gdpo({"ocr": REWARDS}, {"ocr": 2.0}, GROUPS) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gdpo_alone_equal_and_missing() -> None:
    assert gdpo({"ocr": [0.7, 0.1, 0.9]}, {"ocr": 1.0}, ["b", "a", "a"])[0] == 0.0
    assert gdpo({"ocr": [0.5] * 4}, {"ocr": 1.0}, ["a", "a", "b", "b"]) == [0.0] * 4
    result = gdpo({"ocr": [NAN, 0.4, 0.1, 0.3], "taste": [1.0, 2.0, 3.0, 4.0]}, {"ocr": 1.0, "taste": 1.0}, ["a"] * 4)
    assert math.isnan(result[0])
    assert not any(math.isnan(value) for value in result[1:])


def test_gdpo_gives_a_sample_that_is_not_better_or_worse_exactly_0() -> None:
    """A group that ties, and the middle of three: rounding in the mean over the others must not give them a sign."""
    draw, weights = random.Random(7), {"ocr": 0.6, "taste": 0.4}
    for _ in range(20):
        scores = {name: [0.25] * 4 + [0.0, 0.5, 1.0] + [draw.random() for _ in range(8)] for name in weights}
        found = gdpo(scores, weights, ["a"] * 4 + ["b"] * 3 + ["c"] * 8)
        assert [*found[:4], found[5]] == [0.0] * 5
        assert found[4] == -found[6] < 0


# ---- the registry


def constant_advantage(sample_level_rewards: torch.Tensor, index: np.ndarray, **settings: Any):
    """An estimator of a user's own file."""
    return torch.ones_like(sample_level_rewards), torch.ones_like(sample_level_rewards)


def test_estimator_by_name_and_by_enum() -> None:
    assert get_diffusion_adv_estimator_fn("flow_grpo") is compute_flow_grpo_outcome_advantage
    assert get_diffusion_adv_estimator_fn(DiffusionAdvantageEstimator.FLOW_GRPO) is compute_flow_grpo_outcome_advantage


@pytest.mark.parametrize("alias", ["dance_grpo", "mix_grpo"])
def test_aliases_are_the_same_function(alias: str) -> None:
    assert get_diffusion_adv_estimator_fn(alias) is compute_flow_grpo_outcome_advantage
    assert get_diffusion_adv_estimator_fn(DiffusionAdvantageEstimator(alias)) is compute_flow_grpo_outcome_advantage


def test_estimator_by_import_path() -> None:
    assert get_diffusion_adv_estimator_fn(f"{__name__}:constant_advantage") is constant_advantage


def test_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator is 'grpoo'; known: .*flow_grpo"):
        get_diffusion_adv_estimator_fn("grpoo")


@pytest.mark.parametrize("path", ["no_such_package.module:function", f"{__name__}:no_such_function"])
def test_import_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(ValueError, match=r"adv_estimator is .* cannot be imported: .*no_such"):
        get_diffusion_adv_estimator_fn(path)


def test_a_taken_name_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="'flow_grpo' is already registered"):
        register_diffusion_adv_est("flow_grpo")(constant_advantage)
    assert get_diffusion_adv_estimator_fn("flow_grpo") is compute_flow_grpo_outcome_advantage


# ---- shapes


@pytest.mark.parametrize(
    "settings", [{}, {"global_std": False}, {"norm_adv_by_std_in_grpo": False}], ids=["global", "group", "dr"]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_rewards_of_one_or_more_steps_give_advantages_of_their_shape(settings: dict[str, Any], steps: int) -> None:
    """Every step is a value of its group and of the batch, in plain Python floats; [B, 1] gives what [B] does."""
    draw = random.Random(steps)
    rewards = [[reward + draw.gauss(0.0, 0.1) for _ in range(steps)] for reward in [*REWARDS, 0.4]]
    groups = [*GROUPS, "alone"]
    index = np.array(groups, dtype=object)
    values, returns = compute_flow_grpo_outcome_advantage(torch.tensor(rewards).double(), index, **settings)
    assert values.shape == returns.shape == (7, steps)
    everything = statistics.stdev([value for row in rewards for value in row])
    for row, group, found in zip(rewards[:6], groups[:6], values.tolist(), strict=False):
        own = [value for other, name in zip(rewards, groups, strict=True) if name == group for value in other]
        scale = (everything if settings.get("global_std", True) else statistics.stdev(own)) + 1e-4
        scale = scale if settings.get("norm_adv_by_std_in_grpo", True) else 1.0
        assert found == pytest.approx([(value - statistics.fmean(own)) / scale for value in row], rel=1e-5, abs=1e-7)
    assert values[6].tolist() == [0.0] * steps
    if steps == 1:
        flat, _ = compute_flow_grpo_outcome_advantage(torch.tensor(rewards).double()[:, 0], index, **settings)
        assert torch.equal(values[:, 0], flat)


def test_gdpo_takes_the_same_shapes() -> None:
    scores = {"ocr": torch.tensor(REWARDS), "taste": torch.tensor([1.0, 2.0, 4.0, 3.0, 2.0, 1.0])}
    weights, index = {"ocr": 1.0, "taste": 0.5}, np.array(GROUPS)
    total = scores["ocr"] + 0.5 * scores["taste"]
    flat, _ = compute_gdpo_outcome_advantage(total, index, reward_scores=scores, reward_weights=weights)
    column, _ = compute_gdpo_outcome_advantage(total[:, None], index, reward_scores=scores, reward_weights=weights)
    assert torch.equal(column[:, 0], flat)
    wide, returns = compute_gdpo_outcome_advantage(
        total[:, None].expand(-1, 4), index, reward_scores=scores, reward_weights=weights
    )
    assert wide.shape == returns.shape == (6, 4)
    assert torch.equal(wide, wide[:, :1].expand(-1, 4))
    assert (wide[:, 0] / flat).tolist() == pytest.approx([(wide[0, 0] / flat[0]).item()] * 6, rel=1e-5)


@pytest.mark.parametrize(("shape", "uids"), [((6, 2, 2), 6), ((6,), 5), ((), 1)])
def test_another_shape_is_refused(shape: tuple[int, ...], uids: int) -> None:
    with pytest.raises(ValueError, match=rf"the shape \[.*\] and there are {uids} uids: give rewards \[B\], \[B, 1\]"):
        compute_flow_grpo_outcome_advantage(torch.zeros(shape), np.array(["a"] * uids))


@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), NAN])
@pytest.mark.parametrize("settings", [{}, {"global_std": False}, {"norm_adv_by_std_in_grpo": False}])
def test_what_is_not_finite_is_missing(odd: float, settings: dict[str, Any]) -> None:
    found = advantages([0.1, odd, *REWARDS[1:]], ["a", *GROUPS], **settings)
    assert math.isnan(found.pop(1))
    assert found == pytest.approx(advantages(REWARDS, GROUPS, **settings), rel=1e-12)


def test_gdpo_leaves_out_what_is_not_finite() -> None:
    """Of a sample, or of one optional reward of it."""
    scores = {"ocr": [0.1, 0.5, 0.9, 0.2], "taste": [1.0, NAN, 3.0, 5.0]}
    odd = {name: [math.inf if math.isnan(v) else v for v in values] for name, values in scores.items()}
    weights, total = {"ocr": 1.0, "taste": 1.0}, torch.tensor([0.1, 0.5, 0.9, math.inf])
    found = [
        compute_gdpo_outcome_advantage(
            total,
            np.array(["a"] * 4),
            reward_scores={name: torch.tensor(values) for name, values in given.items()},
            reward_weights=weights,
        )[0].tolist()
        for given in (scores, odd)
    ]
    assert found[0] == pytest.approx(found[1], nan_ok=True)
    assert [math.isnan(value) for value in found[1]] == [False, False, False, True]
