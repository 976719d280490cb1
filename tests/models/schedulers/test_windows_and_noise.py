# SPDX-License-Identifier: Apache-2.0
"""Windows of trained steps and the names of random draws: both must be the same on every worker."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.schedulers import NoiseKey, generators, window_steps
from models.schedulers.noise_keys import INITIAL_NOISE, draw

KEY = NoiseKey(seed=7, iteration=3, prompt_uid="p0", sample_index=2)


# ---- noise keys


def test_seed_is_the_same_in_every_process() -> None:
    """A number written down once: a resumed run on another machine must draw the same noise."""
    assert KEY.seed_of(INITIAL_NOISE) == 5_787_709_757_281_933_571
    assert KEY.seed_of(4) == 5_227_442_760_137_437_640


def test_noise_of_a_sample_does_not_depend_on_its_batch() -> None:
    keys = [replace(KEY, sample_index=i) for i in range(5)]
    whole = draw(keys, 1, (6, 4), "cpu")
    order = [3, 0, 4]
    assert torch.equal(draw([keys[i] for i in order], 1, (6, 4), "cpu"), whole[order])


def test_noise_is_that_of_the_samples_generators() -> None:
    keys = [replace(KEY, sample_index=i) for i in range(3)]
    rows = [torch.randn(6, 4, generator=generator) for generator in generators(keys, 2)]
    assert torch.equal(draw(keys, 2, (6, 4), "cpu"), torch.stack(rows))


def test_equal_keys_share_their_noise_and_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a group that shares its noise, 16 of each prompt, took as many draws."""
    keys = [replace(KEY, prompt_uid=uid) for uid in "abaab"]
    whole = torch.cat([draw([key], 1, (6, 4), "cpu") for key in keys])
    drawn: list[str] = []
    seed_of = NoiseKey.seed_of

    def noted(key: NoiseKey, step: int) -> int:
        drawn.append(key.prompt_uid)
        return seed_of(key, step)

    monkeypatch.setattr(NoiseKey, "seed_of", noted)
    assert torch.equal(draw(keys, 1, (6, 4), "cpu"), whole)
    assert drawn == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, seed=8),
        replace(KEY, iteration=4),
        replace(KEY, prompt_uid="p1"),
        replace(KEY, sample_index=3),
        NoiseKey(seed=73, iteration=0, prompt_uid="p0", sample_index=2),
        NoiseKey(seed=7, iteration=3, prompt_uid="p", sample_index=2),
    ],
)
def test_another_key_gives_other_noise(other: NoiseKey) -> None:
    assert not torch.equal(draw([KEY], 0, (8,), "cpu"), draw([other], 0, (8,), "cpu"))


def test_every_step_has_its_own_noise() -> None:
    steps = [draw([KEY], step, (8,), "cpu") for step in (INITIAL_NOISE, 0, 1, 2)]
    assert not any(torch.equal(a, b) for a, b in pairwise(steps))
    assert not torch.equal(steps[0], steps[-1])


def test_keys_with_separators_in_the_prompt_do_not_collide() -> None:
    """Fields are joined by a slash, and a prompt uid may hold one."""
    seeds = [
        NoiseKey(1, 2, "a/3", 4).seed_of(5),
        NoiseKey(1, 2, "a", 3).seed_of(4),
        NoiseKey(1, 2, "3/a", 4).seed_of(5),
        NoiseKey(1, 2, "a/3/4", 5).seed_of(5),
    ]
    assert len(set(seeds)) == len(seeds)


def test_noise_is_unit_gaussian_across_keys() -> None:
    """One number from each of 20 000 keys: seeds close to each other must not give correlated draws."""
    keys = [replace(KEY, sample_index=i) for i in range(20_000)]
    values = draw(keys, 0, (1,), "cpu").flatten()
    assert values.mean().abs() < 5 / 20_000**0.5
    assert (values.var() - 1).abs() < 5 * (2 / 20_000) ** 0.5
    assert (values[1:] * values[:-1]).mean().abs() < 5 / 20_000**0.5


# ---- windows


def starts(algo: DiffusionRolloutAlgoConfig, steps: int, seed: int = 0) -> list[int]:
    """The window's start in 300 iterations; every window is checked to be consecutive and of the asked size."""
    windows = [window_steps(algo, steps, seed, iteration) for iteration in range(300)]
    for window in windows:
        assert window == list(range(window[0], window[0] + (algo.sde_window_size or len(window))))
    return [window[0] for window in windows]


def test_windows_cover_exactly_their_range() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=(1, 6))
    drawn = starts(algo, 10)
    assert set(drawn) == {1, 2, 3, 4}  # the last window is [4, 5]
    counts = [drawn.count(start) for start in (1, 2, 3, 4)]
    assert min(counts) > 300 / 4 - 5 * (300 * 0.25 * 0.75) ** 0.5


def test_window_depends_on_seed_and_iteration_alone() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=(0, 5))
    assert starts(algo, 10, seed=1) == starts(algo, 10, seed=1)
    assert starts(algo, 10, seed=1) != starts(algo, 10, seed=2)
    assert starts(algo, 10, seed=0)[:12] == [3, 1, 3, 2, 3, 2, 2, 3, 0, 0, 2, 3]


def test_each_prompt_may_have_a_window_of_its_own() -> None:
    """By its uid, the seed and the iteration; drawn evenly, and other than the window of all prompts."""
    algo = DiffusionRolloutAlgoConfig(sde_window_size=1, sde_window_range=(1, 5), sde_window_per="prompt")
    uids = [f"p{number}" for number in range(400)]
    drawn = [window_steps(algo, 8, 0, 3, prompt_uid=uid) for uid in uids]
    assert all(len(window) == 1 for window in drawn)
    counts = [drawn.count([step]) for step in range(8)]
    assert counts[0] == sum(counts[5:]) == 0
    assert min(counts[1:5]) > 100 - 5 * (400 * 0.25 * 0.75) ** 0.5
    assert drawn == [window_steps(algo, 8, 0, 3, prompt_uid=uid) for uid in uids]
    assert drawn != [window_steps(algo, 8, 0, 4, prompt_uid=uid) for uid in uids]
    assert drawn != [window_steps(algo, 8, 1, 3, prompt_uid=uid) for uid in uids]


def test_without_a_size_the_range_is_the_window() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_range=(2, 5))
    assert [window_steps(algo, 8, 0, iteration) for iteration in range(3)] == [[2, 3, 4]] * 3


@pytest.mark.parametrize(("steps", "expected"), [(4, [0, 1, 2]), (2, [0]), (1, [0])])
def test_default_window_is_every_step_but_the_last(steps: int, expected: list[int]) -> None:
    assert window_steps(DiffusionRolloutAlgoConfig(), steps, 0, 0) == expected


@pytest.mark.parametrize("bounds", [(0, 6), (3, 3), (4, 2), (5, 7)])
def test_range_outside_the_sampler(bounds: tuple[int, int]) -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_range=bounds)
    with pytest.raises(ValueError, match=rf"sde_window_range \[{bounds[0]}, {bounds[1]}\).*5 denoising steps"):
        window_steps(algo, 5, 0, 0)


def test_window_longer_than_its_range() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_size=4, sde_window_range=(1, 4))
    with pytest.raises(ValueError, match=r"sde_window_size 4 is longer than sde_window_range \[1, 4\)"):
        window_steps(algo, 10, 0, 0)


def test_a_progressive_window_moves_on_and_rolls_back() -> None:
    """By its size every three iterations; a place that would leave the range is the first one again."""
    algo = DiffusionRolloutAlgoConfig(
        sde_window_size=2, sde_window_range=(1, 6), sde_window_mode="progressive", iters_per_group=3
    )
    windows = [window_steps(algo, 10, 0, iteration) for iteration in range(1, 11)]
    assert windows == [[1, 2]] * 3 + [[3, 4]] * 3 + [[1, 2]] * 3 + [[3, 4]]
    assert [window_steps(algo, 10, seed, 7) for seed in (1, 2)] == [[1, 2]] * 2


def test_a_decaying_stay_falls_linearly_to_a_quarter() -> None:
    """8 iterations at first; a stay that begins after t of 40 lasts 8 (1 - 3/4 t/40), rounded."""
    algo = DiffusionRolloutAlgoConfig(
        sde_window_size=1, sde_window_range=(0, 20), sde_window_mode="decay", iters_per_group=8
    )
    starts_at = [window_steps(algo, 30, 0, iteration, total_iterations=40)[0] for iteration in range(1, 41)]
    stays = [starts_at.count(place) for place in range(9)]
    assert stays == [8, 7, 6, 5, 4, 4, 3, 2, 1]  # the last one is cut off by the run's end
    assert starts_at == sorted(starts_at)
    # Beyond the planned end every stay has the shortest length.
    later = [window_steps(algo, 30, 0, iteration, total_iterations=40)[0] for iteration in range(42, 48)]
    assert later == [9, 9, 10, 10, 11, 11]


def test_decay_needs_the_length_of_the_run() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_size=1, sde_window_mode="decay")
    with pytest.raises(ValueError, match="decay needs the run's total_iterations"):
        window_steps(algo, 10, 0, 1)


def test_single_steps_are_drawn_without_repetition() -> None:
    algo = DiffusionRolloutAlgoConfig(sde_window_size=3, sde_window_range=(1, 7), sde_contiguous=False)
    windows = [window_steps(algo, 10, 0, iteration) for iteration in range(300)]
    assert all(window == sorted(set(window)) and len(window) == 3 for window in windows)
    assert {step for window in windows for step in window} == {1, 2, 3, 4, 5, 6}
    assert len({tuple(window) for window in windows}) == 20  # all subsets of 3 of 6
    assert windows == [window_steps(algo, 10, 0, iteration) for iteration in range(300)]
    assert windows != [window_steps(algo, 10, 1, iteration) for iteration in range(300)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sde_window_mode": "progressive"}, "progressive moves a window: give it a sde_window_size"),
        ({"sde_window_mode": "decay", "sde_window_size": 2, "sde_contiguous": False}, "sde_window_mode is decay"),
        ({"sde_contiguous": False}, "sde_window_size is null: say how many"),
        (
            {"sde_window_per": "prompt"},
            "sde_window_mode random with sde_window_size None draws no window",
        ),
        (
            {"sde_window_per": "prompt", "sde_window_size": 1, "sde_window_mode": "progressive"},
            "sde_window_mode progressive with sde_window_size 1 draws no window",
        ),
    ],
)
def test_settings_that_do_not_define_a_window(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionRolloutAlgoConfig(**settings)
