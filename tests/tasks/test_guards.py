# SPDX-License-Identifier: Apache-2.0
"""Image statistics in closed form, and the flag that the reward rises while a guard falls."""

import numpy as np
import pytest
from scipy.stats import kendalltau

from tasks.config.reward import GuardConfig, RewardConfig
from tasks.records.guards import TRAINED, FloorWatch, GuardWatch, trend
from tasks.rewards.statistics import diversity, edge_density, entropy, picture_statistics, saturation, thumbnail

# --- statistics


def plain(*colour: int, height: int = 10, width: int = 12) -> np.ndarray:
    """A picture of one colour."""
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy()


def test_edge_density_counts_pixels_beside_a_step() -> None:
    picture = plain(0, 0, 0)
    assert edge_density(picture) == 0
    picture[:, 6:] = 255  # one vertical edge: in each of 9 rows that count, 1 of 11 pixels
    assert edge_density(picture) == pytest.approx(1 / 11)
    assert edge_density(picture.transpose(1, 0, 2)) == pytest.approx(1 / 11)
    faint = plain(100, 100, 100)
    faint[:, 6:] += 25  # 25 / 255 is just below a tenth
    assert edge_density(faint) == 0


def test_entropy_is_in_bits() -> None:
    assert entropy(plain(7, 7, 7)) == 0
    halves = plain(0, 0, 0)
    halves[:, 6:] = 255
    assert entropy(halves) == pytest.approx(1)
    every = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    assert entropy(every) == pytest.approx(8)


def test_saturation_is_that_of_hsv() -> None:
    assert saturation(plain(90, 90, 90)) == 0
    assert saturation(plain(0, 0, 0)) == 0
    assert saturation(plain(200, 0, 0)) == 1
    assert saturation(plain(200, 150, 100)) == pytest.approx(0.5)


def test_diversity_is_the_spread_within_a_group() -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (7, 16, 24, 3), dtype=np.uint8)
    small = np.stack([thumbnail(picture) for picture in pictures]).astype(np.float64)
    uids = np.array(["a"] * 3 + ["b"] * 3 + ["alone"])
    found = diversity(small, uids)
    pairs = [np.mean((small[i] - small[j]) ** 2) for i in range(3) for j in range(i)]
    assert found[:3] == pytest.approx([np.sqrt(np.mean(pairs) / 2)] * 3)
    assert np.isnan(found[6])
    assert diversity(np.repeat(small[:1], 4, axis=0), np.array(["a"] * 4)).tolist() == [0] * 4
    # A thumbnail's pixel is the mean of its block: 2 x 3 pixels here, rounded once along each axis.
    assert small[0, 0, 0] * 255 == pytest.approx(pictures[0, :2, :3].mean(axis=(0, 1)), abs=1.01)


def test_statistics_of_a_video_are_means_over_its_frames() -> None:
    rng = np.random.default_rng(1)
    videos = rng.integers(0, 256, (2, 3, 9, 9, 3), dtype=np.uint8)
    values, small = picture_statistics(videos)
    for name, measure in {"edge_density": edge_density, "entropy": entropy, "saturation": saturation}.items():
        assert values[name][1] == pytest.approx(np.mean([measure(frame) for frame in videos[1]]), rel=1e-6)
    assert small.shape == (2, 8, 8, 3)
    assert picture_statistics(videos[:, 0])[0]["entropy"][0] == pytest.approx(entropy(videos[0, 0]), rel=1e-6)


# --- the flag


def test_a_trend_is_kendalls_tau_with_time() -> None:
    rising = trend([0.1, 0.3, 0.2, 0.4, 0.5, 0.9])
    assert rising.tau == pytest.approx((14 - 1) / 15)  # one of 15 pairs is out of order
    # Of the 720 orders of six values, 1 + 5 have at most one pair out of order.
    assert rising.p_rise == pytest.approx(6 / 720)
    assert rising.p_fall > 0.99
    assert trend([0.4] * 8).p_rise == 1
    assert trend([1, 2, 3]).p_rise == kendalltau(range(3), [1, 2, 3], alternative="greater").pvalue


def watch(history: dict | None = None, window: int = 10, p_value: float = 0.01) -> GuardWatch:
    past = history or {}
    guards = {"taste": "train/reward/taste/mean", "diversity": "train/image/diversity/mean"}
    return GuardWatch(GuardConfig(window=window, p_value=p_value), guards, lambda name: past.get(name, {}))


def run(watched: GuardWatch, reward: np.ndarray, taste: np.ndarray, spread: np.ndarray, first: int = 1) -> list[dict]:
    names = (TRAINED, "train/reward/taste/mean", "train/image/diversity/mean")
    rows = zip(reward, taste, spread, strict=True)
    return [watched.observe(first + i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows)]


RISING, NOISE = np.linspace(0, 1, 12), np.array([3, 1, 4, 1.5, 9, 2, 6, 5, 3.5, 5.5, 8, 7])


def test_a_guard_that_falls_while_the_reward_rises_is_flagged() -> None:
    watched = watch()
    found = run(watched, RISING, 1 - RISING, NOISE)
    assert found[:9] == [{}] * 9, "no verdict before the window is full"
    assert found[9]["guard/taste/flag"] == 1
    assert found[9]["guard/taste/tau"] == pytest.approx(-1)
    assert found[9]["guard/reward/tau"] == pytest.approx(1)
    assert found[9]["guard/diversity/flag"] == 0
    assert watched.sentence() == "the reward rises while taste falls (since iteration 10)"


def test_only_the_last_window_counts() -> None:
    """What rose and fell long ago is no flag now, and a fall after a long calm is one."""
    watched = watch()
    run(watched, RISING, 1 - RISING, NOISE)
    after = run(watched, NOISE, NOISE, NOISE, first=13)
    assert after[-1]["guard/taste/flag"] == 0
    assert run(watched, RISING, 1 - RISING, NOISE, first=25)[-1]["guard/taste/flag"] == 1


@pytest.mark.parametrize(
    ("reward", "taste"),
    [(RISING, RISING), (RISING, NOISE), (NOISE, 1 - RISING), (1 - RISING, 1 - RISING), (RISING, np.ones(12))],
)
def test_nothing_else_is_flagged(reward: np.ndarray, taste: np.ndarray) -> None:
    watched = watch()
    assert not any(row["guard/taste/flag"] for row in run(watched, reward, taste, NOISE)[9:])
    assert watched.sentence() is None


def test_two_guards_share_the_level() -> None:
    """A fall whose p-value lies between level / 2 and level is one of two chances, so it is no flag."""
    taste = np.array([1.0, 0.9, 0.8, 0.7, 0.5, 0.6])
    fall, rise = trend(taste).p_fall, trend(RISING[:6]).p_rise
    assert rise < 1.5 * fall
    for guards in ({"taste": "t"}, {"taste": "t", "diversity": "d"}):
        watched = GuardWatch(GuardConfig(window=6, p_value=1.5 * fall), guards, lambda name: {})
        rows = [{TRAINED: reward, "t": low, "d": 0.0} for reward, low in zip(RISING[:6], taste, strict=True)]
        found = [watched.observe(number + 1, row) for number, row in enumerate(rows)][-1]
        assert found["guard/taste/flag"] == float(len(guards) == 1)


def test_flags_are_rare_where_nothing_happens() -> None:
    """400 independent windows of noise at 5 % for the reward and 5 % / 2 for a guard: 0.05 x 0.025 expected of each."""
    rng = np.random.default_rng(0)
    flagged = 0
    for _ in range(400):
        rows = run(watch(p_value=0.05), *rng.standard_normal((3, 10)))
        flagged += int(sum(rows[-1][f"guard/{name}/flag"] for name in ("taste", "diversity")) > 0)
    assert flagged <= 5  # 1 expected; more than 5 has probability 6e-4


def test_a_resumed_watch_sees_what_the_first_saw() -> None:
    whole = run(watch(), RISING, 1 - RISING, NOISE)
    names = (TRAINED, "train/reward/taste/mean", "train/image/diversity/mean")
    logged = {name: dict(enumerate(v, 1)) for name, v in zip(names, (RISING, 1 - RISING, NOISE), strict=True)}
    logged["guard/taste/flag"] = {i: row["guard/taste/flag"] for i, row in enumerate(whole, 1) if row}
    resumed = watch(logged)  # killed after iteration 12, its newest checkpoint being of iteration 10
    assert run(resumed, RISING[10:], 1 - RISING[10:], NOISE[10:], first=11) == whole[10:]
    assert resumed.sentence() == "the reward rises while taste falls (since iteration 10)"


# --- a reward that never leaves its floor


def floor(history: dict | None = None, iterations: int = 100, **functions: dict) -> FloorWatch:
    past = history or {}
    return FloorWatch(RewardConfig(functions=functions), iterations, lambda name: past.get(name, {}))


def told(watched: FloorWatch, *scores: np.ndarray, name: str = "ocr", first: int = 1) -> list[str | None]:
    return [watched.observe(i, watched.metrics(i, {name: values})) for i, values in enumerate(scores, first)]


RNG = np.random.default_rng(3)
BLIND = [RNG.uniform(0, 0.05, 64).astype(np.float32) for _ in range(4)]
QUICKSTART = [RNG.choice([0, 1 / 3, 2 / 3, 1], 192, p=[0.2, 0.25, 0.3, 0.25]).astype(np.float32) for _ in range(4)]


def test_a_reward_near_its_floor_in_the_first_iterations_is_told_once() -> None:
    for scores in (BLIND, [np.zeros(64, np.float32)] * 4):
        found = told(floor(ocr={}), *scores)
        assert [bool(sentence) for sentence in found] == [False, False, True, False]
        assert "the scores of ocr were all near the lowest" in str(found[2])
        assert "in each of the first 3 iterations" in str(found[2])
    assert told(floor(iterations=2, ocr={}), *BLIND[:2])[1] is not None, "a shorter run is watched throughout"
    off = FloorWatch(RewardConfig(functions={"ocr": {}}, guards={"floor_iterations": 0}), 9, lambda name: {})
    assert told(off, *BLIND) == [None] * 4
    assert off.metrics(1, {"ocr": BLIND[0]}) == {}


@pytest.mark.parametrize(
    "scores",
    [
        QUICKSTART,
        [*BLIND[:2], QUICKSTART[0]],
        [np.r_[np.zeros(56), np.ones(8)].astype(np.float32)] * 3,  # one in eight is right: hard, and to be learnt
        [np.full(64, np.nan, np.float32)] * 3,  # missing is counted elsewhere
    ],
)
def test_a_reward_that_tells_samples_apart_is_left_alone(scores: list[np.ndarray]) -> None:
    assert told(floor(ocr={}), *scores) == [None] * len(scores)


def test_without_bounds_only_scores_that_are_all_alike_count() -> None:
    small = [RNG.uniform(0, 0.05, 64) for _ in range(3)]  # a reward may be small by nature
    assert told(floor(jpeg_compressibility={}), *small, name="jpeg_compressibility") == [None] * 3
    alike = [np.full(64, 21.5, np.float32) * (1 + 1e-7 * RNG.standard_normal(64))] * 3
    assert told(floor(jpeg_compressibility={}), *alike, name="jpeg_compressibility")[2] is not None


def test_the_floor_of_a_reward_with_negative_weight_is_its_upper_bound() -> None:
    white = [1 - scores for scores in BLIND[:3]]
    assert told(floor(brightness={"weight": -1.0}), *white, name="brightness")[2] is not None
    assert told(floor(brightness={"weight": -1.0}), *BLIND[:3], name="brightness") == [None] * 3


def test_guards_are_not_watched_and_a_resumed_run_remembers() -> None:
    watched = floor(ocr={}, shapes={"guard": True})
    assert watched.metrics(1, {"ocr": BLIND[0], "shapes": BLIND[0]}) == {"reward/ocr/at_floor": 1.0}
    assert told(floor({"reward/ocr/at_floor": {1: 1.0, 2: 1.0}}, ocr={}), BLIND[2], first=3)[0] is not None
    assert told(floor({"reward/ocr/at_floor": {1: 0.0, 2: 1.0}}, ocr={}), BLIND[2], first=3) == [None]
