# SPDX-License-Identifier: Apache-2.0
"""Image statistics in closed form, the flag that the reward rises while a guard falls, and recorded runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau, ttest_1samp

from benchmarks.guards import ALL, Record, flagged, flagged_by_trends, verdicts
from tasks.config.reward import GuardConfig, RewardConfig
from tasks.config.tree import TrainConfig
from tasks.records.guards import TRAINED, FloorWatch, Guard, GuardWatch, tau
from tasks.records.held_out_falls import fall, p_above, prompt_means
from tasks.rewards.statistics import diversity, edge_density, entropy, picture_statistics, saturation, thumbnail
from tasks.run.opening import watched_guards
from tasks.run.watching import (
    RewardCollapse,
    RewardHacking,
    last_good,
    last_good_folder,
    refuse_flagged,
    stop_if_flagged,
)

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
    assert picture_statistics(videos[:, 0]).values["entropy"][0] == pytest.approx(entropy(videos[0, 0]), rel=1e-6)


# --- trends


def test_tau_is_kendalls() -> None:
    assert tau([0.1, 0.3, 0.2, 0.4, 0.5, 0.9]) == pytest.approx((14 - 1) / 15)  # one of 15 pairs is out of order
    assert tau([0.4] * 8) == 0
    assert tau([3, 2, 1]) == pytest.approx(kendalltau(range(3), [3, 2, 1]).statistic)


def test_trends_wait_for_a_full_window_and_forget_what_is_before_it() -> None:
    watched = watch(window=5)
    rows = zip([9, 8, 7, *RISING[:5]], [0, 0, 0, *-RISING[:5]], strict=True)
    found = [watched.observe(step, {TRAINED: up, TASTE.metric: down}) for step, (up, down) in enumerate(rows, 1)]
    assert found[:4] == [{}] * 4
    assert found[7] == {"guard/reward/tau": pytest.approx(1), "guard/taste/tau": pytest.approx(-1)}
    assert watched.sentence() is None, "a trend is no verdict"


# --- the test of one validation


def test_p_above_is_the_t_test_shifted_by_the_margin() -> None:
    values = np.array([0.3, 0.1, 0.5, 0.2, 0.7])
    assert p_above(values, 0.1) == pytest.approx(ttest_1samp(values - 0.1, 0, alternative="greater").pvalue)
    assert (p_above(np.full(4, 0.2), 0.1), p_above(np.full(4, 0.2), 0.2)) == (0, 1)
    assert (p_above(np.array([5.0]), 0), p_above(np.array([]), 0)) == (1, 1)


def held_out(reward: float, taste: float, spread: float = 0.1, prompts: int = 40, seed: int = 0) -> pd.DataFrame:
    """A validation of two pictures a prompt, around these means; each prompt has its own level, the same ever after."""
    levels = np.random.default_rng(7).normal(0, 0.2, (2, prompts))
    noise = np.random.default_rng((seed, 1)).normal(0, spread, (2, prompts, 2))
    columns = [level[:, None] + mean + own for level, mean, own in zip(levels, (reward, taste), noise, strict=True)]
    columns = [np.ravel(column - column.mean() + mean) for column, mean in zip(columns, (reward, taste), strict=True)]
    return pd.DataFrame(
        {"uid": np.repeat(np.arange(prompts), 2), "reward": columns[0], "reward/taste": columns[1], "text": "472"}
    )


def test_a_fall_is_from_the_validation_at_which_the_guard_was_highest() -> None:
    """It rose first, as guards do where a reward is over-optimised: below the peak counts, not below the start."""
    series = {0: (0.5, 0.5), 10: (0.7, 0.8), 20: (0.9, 0.5)}
    means = {step: prompt_means(held_out(*pair, seed=step), ["reward/taste"]) for step, pair in series.items()}
    found = fall(means, 20, "reward/taste", 0.01, 0.2)
    assert found is not None
    assert (found.reference, found.suspicious) == (10, True)
    assert found.mean == pytest.approx(0.3)
    spread = np.std(means[0]["reward/taste"], ddof=1)
    assert found.spreads == pytest.approx(0.3 / spread)
    # The margin is in those, and a fall that is surely there and smaller is none.
    assert not fall(means, 20, "reward/taste", 0.01, 0.3 / spread).suspicious  # type: ignore[union-attr]
    assert fall(means, 0, "reward/taste", 0.01, 0.2) is None, "nothing is earlier"
    assert fall(means, 20, "reward/nobody", 0.01, 0.2) is None


@pytest.mark.parametrize("is_sure", ["reward", "reward/taste"])
def test_the_validations_before_share_the_level_of_one(is_sure: str) -> None:
    """Each could have been the highest: what is sure enough after one of them is not after two, in rise and fall."""
    other = {"reward": "reward/taste", "reward/taste": "reward"}[is_sure]
    rng, signs = np.random.default_rng(3), {"reward": 1, "reward/taste": -1}
    first = pd.DataFrame({name: rng.normal(0, 1, 12) for name in signs})
    changes = {is_sure: rng.normal(5, 0.1, 12), other: rng.normal(0.5, 0.8, 12)}
    now = first + pd.DataFrame({name: signs[name] * change for name, change in changes.items()})
    level = 1.5 * ttest_1samp(changes[other], 0, alternative="greater").pvalue
    means = {0: first, 20: now}
    assert fall(means, 20, "reward/taste", level, 0.0).suspicious  # type: ignore[union-attr]
    means[10] = first.assign(**{"reward/taste": first["reward/taste"] - 1})
    found = fall(means, 20, "reward/taste", level, 0.0)
    assert found is not None
    assert (found.reference, found.suspicious) == (0, False)


def test_of_validations_at_which_the_guard_was_as_high_the_later_one_counts() -> None:
    means = {step: prompt_means(held_out(0.5, 0.5), ["reward/taste"]) for step in (0, 10, 20)}
    assert fall(means, 20, "reward/taste", 0.01, 0.2).reference == 10  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "later",
    [(0.5, 0.2), (0.3, 0.2), (0.9, 0.5), (0.9, 0.9), (0.9, 0.49)],
    ids=["the reward stays", "both fall", "the guard stays", "both rise", "it hardly falls"],
)
def test_nothing_else_is_suspicious(later: tuple[float, float]) -> None:
    means = {0: prompt_means(held_out(0.5, 0.5), ["reward/taste"])}
    means[10] = prompt_means(held_out(*later, seed=1), ["reward/taste"])
    assert not fall(means, 10, "reward/taste", 0.01, 0.2).suspicious  # type: ignore[union-attr]


def test_prompts_are_paired_and_one_without_a_score_is_left_out() -> None:
    first, now = held_out(0.5, 0.5), held_out(0.8, 0.2, seed=1)
    means = {0: prompt_means(first, ["reward/taste"])}
    now.loc[now["uid"] == 3, ["reward", "reward/taste"]] = np.nan
    means[10] = prompt_means(now.sample(frac=1, random_state=0), ["reward/taste"])
    found = fall(means, 10, "reward/taste", 0.01, 0.2)
    assert found is not None
    kept = means[0]["reward/taste"].drop(3).mean() - means[10]["reward/taste"].drop(3).mean()
    assert found.mean == pytest.approx(kept)
    assert found.suspicious


# --- the flag

TASTE = Guard("train/reward/taste/mean", "reward/taste", 0.2)
RISING = np.linspace(0, 1, 12)


def watch(history: dict | None = None, validations: dict | None = None, **settings: Any) -> GuardWatch:
    past = history or {}
    return GuardWatch(
        GuardConfig(**settings), {"taste": TASTE}, lambda name: past.get(name, {}), lambda: validations or {}
    )


def watch_one(reward_margin: float = 0.2) -> GuardWatch:
    """That flags at the first validation which finds a guard fallen."""
    guard = replace(TASTE, margin=reward_margin)
    return GuardWatch(GuardConfig(validations=1), {"taste": guard}, lambda name: {}, dict)


def not_saved() -> None:
    raise AssertionError("the run does not end here")


HACKED = {0: (0.5, 0.5), 10: (0.6, 0.52), 20: (0.7, 0.3), 30: (0.8, 0.25), 40: (0.9, 0.6)}
"""The guard falls at 20 and 30, and is back at 40."""


def tables(series: dict[int, tuple[float, float]]) -> dict[int, pd.DataFrame]:
    return {step: held_out(*pair, seed=step) for step, pair in series.items()}


def test_a_guard_is_flagged_at_the_second_validation_in_a_row_that_finds_it_fallen() -> None:
    watched = watch()
    found, clean = {}, []
    for step, table in list(tables(HACKED).items())[:4]:
        found[step] = watched.judge(step, table)
        clean.append(watched.is_clean)
    assert clean == [True, True, False, False], "weights that are in doubt are not kept as good ones"
    assert found[0] == {}
    assert [found[step]["guard/taste/flag"] for step in (10, 20, 30)] == [0, 0, 1]
    assert found[10]["guard/taste/fall"] < 0 < found[20]["guard/taste/fall"]
    assert watched.sentence() == "the held-out reward rises while taste falls (since iteration 30)"
    assert (watched.flagged, watched.suspects) == ({"taste"}, {"taste"})
    assert watched.doubtful_from == 11, "what was exported after iteration 10, the last validation without a doubt"


@pytest.mark.parametrize(
    ("later", "flag"),
    [([(0.7, 0.2), (0.8, 0.15)], "guard/taste/flag"), ([(0.2, 0.5), (0.15, 0.5)], "held_out/collapse/flag")],
)
def test_the_first_validation_that_has_one_before_it_is_no_row(later: list[tuple[float, float]], flag: str) -> None:
    """What has fallen by then is only flagged if the next validation finds it, too."""
    watched = watch()
    every = tables({0: (0.5, 0.5)} | dict(zip((10, 20), later, strict=True)))
    assert [watched.judge(step, table).get(flag) for step, table in every.items()] == [None, 0, 1]


def test_a_guard_that_is_back_is_flagged_no_more_and_its_flag_is_remembered() -> None:
    watched = watch()
    for step, table in tables(HACKED).items():
        found = watched.judge(step, table)
    assert found["guard/taste/flag"] == 0
    assert (watched.flagged, watched.suspects, watched.sentence(now=True)) == (set(), set(), None)
    assert watched.sentence() is not None
    stopping = TrainConfig.model_validate({"reward": {"guards": {"action": "stop"}}})
    stop_if_flagged(stopping, watched, 40, not_saved)  # a run that was told to go on meanwhile is let go on
    refuse_flagged(stopping, watched)


COLLAPSED = {0: (0.5, 0.5), 10: (0.8, 0.5), 20: (0.75, 0.5), 30: (0.6, 0.5), 40: (0.4, 0.5), 50: (0.7, 0.5)}
"""The reward is highest at 10, a little lower at 20, far below at 30 and 40, and near it again at 50."""


def test_a_held_out_reward_that_stays_far_below_its_highest_is_a_collapse() -> None:
    watched, seen = watch(), {}
    for step, table in tables(COLLAPSED).items():
        seen[step] = watched.judge(step, table) | {"told": watched.collapse(), "clean": watched.is_clean}
    assert [seen[step]["held_out/collapse/flag"] for step in (10, 20, 30, 40, 50)] == [0, 0, 0, 1, 0]
    assert [seen[step]["clean"] for step in (10, 20, 30, 40, 50)] == [True, True, False, False, True]
    spread = prompt_means(tables(COLLAPSED)[0], [])["reward"].std()
    assert seen[40]["held_out/collapse/fall"] == pytest.approx(0.4 / spread)
    assert seen[40]["told"] == "the held-out reward has fallen far below its highest (since iteration 40)"
    assert (seen[30]["told"], seen[50]["told"], watched.sentence()) == (None, None, None)


def test_a_collapse_that_lasts_is_told_with_its_beginning() -> None:
    watched = watch()
    for step, table in tables(COLLAPSED | {50: (0.35, 0.5)}).items():
        watched.judge(step, table)
    assert watched.collapse() == "the held-out reward has fallen far below its highest (since iteration 40)"


def test_a_collapse_is_remembered_by_a_run_that_goes_on() -> None:
    resumed = watch({"held_out/collapse/flag": {10: 0.0, 20: 1.0, 30: 0.0, 40: 1.0, 50: 1.0}})
    assert (resumed.collapsed_since, resumed.is_clean) == (40, False)
    assert watch({"held_out/collapse/flag": {10: 1.0, 20: 0.0}}).is_clean
    resumed.judge(60, held_out(0.3, 0.5))
    assert (resumed.collapse(), resumed.is_clean) == (None, True), "nothing before is measured as it is now"


def test_a_guard_that_a_validation_has_no_value_of_has_no_verdict_there() -> None:
    """As of a reward that answered nothing: neither a flag of 0, nor the height from which it falls."""
    series = tables(HACKED)
    series[0] = series[0].assign(**{TASTE.column: np.nan})
    series[20] = series[20].assign(**{TASTE.column: np.nan})
    watched = watch()
    flags = {step: watched.judge(step, table).get("guard/taste/flag") for step, table in series.items()}
    assert flags == {0: None, 10: None, 20: None, 30: 0.0, 40: 0.0}


@pytest.mark.parametrize(("pictures", "more"), [(1, set()), (2, {"diversity"})])
def test_diversity_is_a_guard_where_validations_can_measure_it(pictures: int, more: set[str]) -> None:
    """Of one picture a prompt it never was flagged, and MLflow had 0 as its flag: all is well."""
    config = TrainConfig.model_validate({"actor_rollout_ref": {"rollout": {"val_kwargs": {"n": pictures}}}})
    tracker: Any = SimpleNamespace(history=lambda metric: {})
    assert watched_guards(config, tracker).guards.keys() == {"edge_density", "saturation"} | more


@pytest.mark.parametrize("kind", [RewardCollapse, RewardHacking])
def test_action_stop_ends_a_run_that_is_flagged_and_the_same_command_says_so_again(kind: type[Exception]) -> None:
    watched = watch()
    series, upto = (HACKED, 30) if kind is RewardHacking else (COLLAPSED, 40)
    for step, table in tables(series).items():
        if step <= upto:
            watched.judge(step, table)
    changes = {"reward": {"guards": {"action": "stop"}, "functions": {"ocr": {}}}}
    stopping, flagging = TrainConfig.model_validate(changes), TrainConfig()
    saved: list[int] = []
    with pytest.raises(kind, match=r"stopped after iteration 40 .*the held-out reward .*no trained ones: begin again"):
        stop_if_flagged(stopping, watched, 40, lambda: saved.append(40))
    assert saved == [40]
    with pytest.raises(kind, match="is stopped by its guards"):
        refuse_flagged(stopping, watched)
    stop_if_flagged(flagging, watched, 40, not_saved)


def test_of_good_weights_that_a_killed_run_left_beside_older_ones_the_last_are_offered(tmp_path: Path) -> None:
    """The older ones go once the new ones are whole; a run may be killed in between, whatever its iterations."""
    changes = {"reward": {"guards": {"action": "stop"}}, "trainer": {"default_local_dir": str(tmp_path)}}
    config = TrainConfig.model_validate(changes)
    assert last_good(config) is None
    for iteration in (999_999, 1_000_000):
        last_good_folder(config, iteration).mkdir(parents=True)
    watched = watch_one()
    for step, table in list(tables(HACKED).items())[:3]:
        watched.judge(step, table)
    with pytest.raises(RewardHacking, match=r"validation before are those of iteration 1000000, in .*/1000000; look"):
        stop_if_flagged(config, watched, 20, lambda: None)


def test_one_validation_is_enough_if_one_is_asked_for() -> None:
    watched = watch_one()
    for step, table in list(tables(HACKED).items())[:3]:
        found = watched.judge(step, table)
    assert found["guard/taste/flag"] == 1


def test_a_resumed_watch_sees_what_the_first_saw() -> None:
    """Started again after iteration 20, whose validation is made anew; and once more, after the flag."""
    whole, every = watch(), tables(HACKED)
    seen = {step: whole.judge(step, table) for step, table in every.items()}
    resumed = watch({}, {step: every[step] for step in (0, 10, 20)})
    assert resumed.judge(20, every[20]) == seen[20]
    assert resumed.judge(30, every[30]) == seen[30]
    flags = {step: found["guard/taste/flag"] for step, found in seen.items() if found and step <= 30}
    late = watch({"guard/taste/flag": flags})
    assert (late.flagged, late.is_clean) == ({"taste"}, False)
    assert late.sentence(now=True) == "the held-out reward rises while taste falls (since iteration 30)"
    late = watch({"guard/taste/flag": flags | {40: 0.0}})
    assert late.flagged == set()
    assert late.sentence() is not None


def test_a_run_that_goes_on_says_since_when_a_guard_was_flagged_first() -> None:
    resumed = watch({"guard/taste/flag": {10: 0.0, 20: 1.0, 30: 0.0, 40: 1.0}})
    assert (resumed.since, resumed.flagged) == ({"taste": 20}, {"taste"})


def test_several_guards_share_the_level_of_one() -> None:
    """Every one more is another chance of a false flag: a fall that is sure enough of one guard alone is not of two."""
    before, after = held_out(0.5, 0.5), held_out(0.9, 0.4, seed=1)
    means = {step: prompt_means(table, ["reward/taste"]) for step, table in ((0, before), (10, after))}
    falls = means[0]["reward/taste"] - means[10]["reward/taste"]
    found = ttest_1samp(falls, 0.2 * means[0]["reward/taste"].std(), alternative="greater").pvalue
    level = 1.5 * found
    assert ttest_1samp(means[10]["reward"] - means[0]["reward"], 0, alternative="greater").pvalue < level / 2
    flags = []
    for names in (["taste"], ["taste", "nobody"]):
        guards = {name: replace(TASTE, column=f"reward/{name}") for name in names}
        settings = GuardConfig(validations=1, p_value=level)
        watched = GuardWatch(settings, guards, lambda name: {}, dict)
        watched.judge(0, before)
        flags.append(watched.judge(10, after)["guard/taste/flag"])
    assert flags == [1, 0]


@pytest.mark.parametrize(("margin", "most"), [(0.0, 10), (0.2, 0)])
def test_flags_are_rare_where_the_reward_alone_is_learnt(margin: float, most: int) -> None:
    """60 runs of 8 validations, whose guards keep their mean and have noise of their own, one validation enough.

    Without a margin the level of 0.01 a validation lets at most 4.2 runs have a flag (300 runs: 16); more than 10 has
    probability 4e-3 then. With the margin that a run has there is none (300 runs: 0).
    """
    flags = 0
    for number in range(60):
        rng, watched = np.random.default_rng(number), watch_one(reward_margin=margin)
        level = rng.normal(0.5, 0.2, 30)
        for step in range(8):
            noise = rng.normal(0, 0.1, (2, 30))
            columns = {"reward": 0.5 + step / 20 + noise[0], "reward/taste": level + noise[1]}
            watched.judge(step, pd.DataFrame({"uid": range(30), **columns}))
        flags += bool(watched.since)
    assert flags <= most


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"test_freq": 0}}, "action is stop and trainer.test_freq is 0: guards are tested at validations"),
        (
            {"algorithm": {"name": "dpo", "sample_source": "offline"}},
            "action is stop and algorithm.sample_source is offline",
        ),
    ],
)
def test_a_guard_that_could_never_stop_the_run_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"reward": {"guards": {"action": "stop"}}} | settings)
    assert TrainConfig.model_validate({"reward": {"guards": {"action": "stop"}}}).reward.guards.action == "stop"


# --- recorded runs

GOOD = ["quickstart_0", "quickstart_1", "quickstart_2", "flow_grpo", "diffusion_nft", "to_the_limit"]
FALSE_ALARMS = {("flow_grpo", 1): {"diversity": 100}}
"""(run, every) -> what is flagged all the same: docs/rewards.md tells the rate."""
BAD = {
    "small_files": {"ocr", "tesseract", "saturation"},
    "stripes": {"tesseract"},
    "paper": {"ocr", "tesseract", "edge_density", "saturation", "diversity"},
    "one_each": {"diversity"},
}
"""Hacked on purpose: who must flag it."""


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_known_to_be_good_is_not_flagged(name: str, every: int) -> None:
    """With a validation every four iterations, or every eight; but for an alarm that is known to be false."""
    assert not ALL[name].hacked
    assert flagged(verdicts(Record.read(name), GuardConfig(), every)) == FALSE_ALARMS.get((name, every), {})


def test_trends_alone_cry_wolf_where_pictures_only_get_better() -> None:
    """The rule of before, on a run whose pictures become those that the base model learnt from."""
    assert "entropy" in flagged_by_trends(Record.read("to_the_limit"))


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_was_hacked_on_purpose_is_flagged(name: str) -> None:
    assert ALL[name].hacked
    assert flagged(verdicts(Record.read(name), GuardConfig())).keys() == BAD[name]


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
    for known in ({1: 0.0, 2: 1.0}, {1: 1.0}):  # an iteration that nobody watched speaks for nothing
        assert told(floor({"reward/ocr/at_floor": known}, ocr={}), BLIND[2], first=3) == [None]
