# SPDX-License-Identifier: Apache-2.0
"""The paired bootstrap: it pairs by prompt and noise, finds what is there, and is honest about what is not."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from tasks.records.comparison import ComparisonError, mean_interval, paired_gain


def measurement(prompts: int, reward: np.ndarray, samples: int = 2) -> pd.DataFrame:
    rows = [(f"p{prompt}", index) for prompt in range(prompts) for index in range(samples)]
    frame = pd.DataFrame(rows, columns=["uid", "sample_index"])
    return frame.assign(set="test", steps=8, guidance=1.0, seed=0, reward=reward)


def test_a_small_gain_shows_through_large_differences_between_prompts() -> None:
    """Prompts differ by 1, the gain is 0.02: unpaired it would be lost. The tables' order does not matter."""
    rng = np.random.default_rng(0)
    level = np.repeat(rng.normal(0, 1, 40), 2)
    old = measurement(40, level)
    new = measurement(40, level + 0.02 + rng.normal(0, 0.01, 80)).sample(frac=1, random_state=1)
    gain = paired_gain(new, old, "reward", 0.95)
    assert 0 < gain.low < 0.02 < gain.high < 0.03
    back = paired_gain(old, new, "reward", 0.95)
    assert back.high < 0
    assert back.mean == pytest.approx(-gain.mean)


def test_the_prompts_are_the_unit() -> None:
    """Hundred pictures of a prompt are one observation: the interval is that of the prompts' means (Student's t)."""
    rng = np.random.default_rng(1)
    effect = rng.normal(0, 1, 30)
    old = measurement(30, np.zeros(3000), samples=100)
    gain = paired_gain(measurement(30, np.repeat(effect, 100), samples=100), old, "reward", 0.95)
    half = t.ppf(0.975, 29) * effect.std(ddof=1) / np.sqrt(30)
    assert gain.high - gain.low == pytest.approx(2 * half, rel=0.15)


def test_a_prompt_of_two_sets_is_two_observations() -> None:
    """Its gains of 0 and 1 are not one gain of a half, which would leave one prompt to compare."""
    both = [measurement(1, np.full(2, gain)).assign(set=name) for name, gain in (("test", 0.0), ("other", 1.0))]
    new = pd.concat(both)
    gain = paired_gain(new, new.assign(reward=0.0), "reward", 0.95)
    assert (gain.mean, gain.high - gain.low) == (0.5, pytest.approx(1.0, abs=0.5))


def test_missing_rewards_leave_their_pair_and_nothing_else() -> None:
    old, new = measurement(3, np.zeros(6)), measurement(3, np.array([np.nan, 2.0, 1.0, 3.0, np.nan, np.nan]))
    assert paired_gain(new, old, "reward", 0.9).mean == 2.0
    with pytest.raises(ComparisonError, match="1 prompts have a reward"):
        paired_gain(new.iloc[:2], old, "reward", 0.9)


def test_other_noise_is_no_pair() -> None:
    with pytest.raises(ComparisonError, match="0 prompts"):
        paired_gain(measurement(3, np.zeros(6)), measurement(3, np.zeros(6)).assign(seed=1), "reward", 0.9)


def test_a_picture_that_a_measurement_has_twice_is_no_pair() -> None:
    """It would count as often as there are pairs of its rows."""
    once = measurement(3, np.zeros(6))
    for tables in ((pd.concat([once, once]), once), (once, pd.concat([once, once.iloc[:1]]))):
        with pytest.raises(pd.errors.MergeError, match="not unique"):
            paired_gain(*tables, "reward", 0.9)


def test_equal_differences_have_an_interval_of_no_width() -> None:
    interval = mean_interval(np.full(5, 0.25), 0.95)
    assert (interval.low, interval.mean, interval.high) == (0.25, 0.25, 0.25)
    rounded = np.full(16, 0.2)
    rounded[::2] = np.nextafter(0.2, 1)
    interval = mean_interval(rounded, 0.95)
    assert interval.low == interval.high == pytest.approx(0.2)
    spread = mean_interval(np.linspace(-1e-12, 3e-12, 16), 0.95)
    assert spread.low < spread.mean < spread.high, "small is not equal"
