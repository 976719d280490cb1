# SPDX-License-Identifier: Apache-2.0
"""What exploring leaves in the finished latents: predicted from the schedule, and refused where it is much."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.schedulers import FlowMatchSDEDiscreteScheduler, leftover_noise
from models.schedulers.leftover import DATA_STD
from tasks.config.recipes import load_recipe
from tasks.config.tree import TrainConfig

ROOT = Path(__file__).parents[3]
QWEN_IMAGE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
SCHEDULES: dict[str, dict[str, Any]] = {  # of the published checkpoints; the tiny base model's is Qwen-Image's
    "quickstart": QWEN_IMAGE,
    "mix-grpo": QWEN_IMAGE,
    "grpo-guard": QWEN_IMAGE,
    "qwen-image-ocr-flow-grpo": QWEN_IMAGE,
    "qwen-image-ocr-flow-grpo-lora": QWEN_IMAGE,
    "sd35-ocr-flow-grpo": {"shift": 3.0},
    "dance-grpo-wan": {"shift": 5.0},
}
LIMIT = DiffusionRolloutAlgoConfig().max_leftover_noise


def scheduler_of(steps: int, **config: Any) -> FlowMatchSDEDiscreteScheduler:
    scheduler = FlowMatchSDEDiscreteScheduler(**config)
    if config.get("use_dynamic_shifting"):
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=0.54)
    else:
        scheduler.set_timesteps(steps)
    return scheduler


def std_of_finished(sigmas: list[float], algo: DiffusionRolloutAlgoConfig, window: range, data_std: float) -> float:
    """The same recursion in plain floats, by the formulas of the papers."""
    variance = sigmas[0] ** 2 + (1 - sigmas[0]) ** 2 * data_std**2
    for i, (s, s_next) in enumerate(itertools.pairwise(sigmas)):
        velocity = (s - (1 - s) * data_std**2) / ((1 - s) ** 2 * data_std**2 + s**2)  # at x = 1
        noise_hat, delta = 1 + (1 - s) * velocity, s_next - s
        slope, std = 1 + velocity * delta, 0.0
        if i in window and algo.sde_type == "cps":
            std = s_next * math.sin(algo.noise_level * math.pi / 2)
            slope = (1 - s_next) * (1 - s * velocity) + math.sqrt(s_next**2 - std**2) * noise_hat
        elif i in window:
            start = sigmas[1] if s == 1 else s
            g = algo.noise_level * (1 if algo.sde_type == "dance_sde" else math.sqrt(s / (1 - start)))
            slope += g**2 / (2 * s) * noise_hat * delta
            std = g * math.sqrt(-delta)
        variance = slope**2 * variance + std**2
    return math.sqrt(variance)


@pytest.mark.parametrize(
    ("shift", "steps", "algo", "finished", "ode"),
    [
        (3.0, 10, {"sde_type": "sde", "noise_level": 0.7}, 0.23, 0.10),  # public Flow-GRPO
        (5.0, 16, {"sde_type": "dance_sde", "noise_level": 1.2}, 0.96, 0.11),
        (5.0, 10, {"sde_type": "dance_sde", "noise_level": 1.2, "sde_window_size": 2, "sde_window_range": (3, 5)}, 0.08, 0.08),  # noqa: E501
        (3.0, 10, {"sde_type": "cps", "noise_level": 0.8}, 0.09, 0.10),
    ],
)  # fmt: skip
def test_the_prediction_is_the_closed_form(
    shift: float, steps: int, algo: dict[str, Any], finished: float, ode: float
) -> None:
    scheduler, settings = scheduler_of(steps, shift=shift), DiffusionRolloutAlgoConfig(**algo)
    sigmas = scheduler.sigmas.double().tolist()
    window = range(*settings.window_bounds(steps))
    explored = std_of_finished(sigmas, settings, window, DATA_STD)
    plain = std_of_finished(sigmas, settings, range(0), DATA_STD)
    assert (explored, plain) == (pytest.approx(finished, abs=0.005), pytest.approx(ode, abs=0.005))
    expected = math.sqrt(max(explored**2 - plain**2, 0.0))
    assert leftover_noise(scheduler, settings) == pytest.approx(expected, abs=1e-4)


def test_the_prediction_is_what_sampling_gives() -> None:
    """60 000 paths of the scheduler's own steps, with the exact velocity; within 5 Monte-Carlo errors."""
    paths, settings = 60_000, DiffusionRolloutAlgoConfig(sde_type="dance_sde", noise_level=0.8)
    scheduler, generator = scheduler_of(8, shift=5.0), torch.Generator().manual_seed(0)
    x = torch.randn(1, paths, generator=generator)
    for step, timestep in enumerate(scheduler.timesteps):
        s = scheduler.sigmas[step].item()
        velocity = x * (s - (1 - s) * DATA_STD**2) / ((1 - s) ** 2 * DATA_STD**2 + s**2)
        level = settings.noise_level if step < 7 else 0.0
        x = scheduler.step(
            velocity, timestep, x, generator=generator, noise_level=level, sde_type="dance_sde"
        ).prev_sample
    ode = std_of_finished(scheduler.sigmas.double().tolist(), settings, range(0), DATA_STD)
    predicted = math.hypot(leftover_noise(scheduler, settings), ode)
    assert x.std().item() == pytest.approx(predicted, rel=5 / math.sqrt(2 * paths))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_steps_drawn_one_by_one_the_worst_choice_counts(size: int) -> None:
    scheduler = scheduler_of(8, shift=5.0)
    common: dict[str, Any] = {"sde_type": "dance_sde", "noise_level": 1.2, "sde_window_size": size}
    choices = DiffusionRolloutAlgoConfig(**common, sde_window_range=(1, 7), sde_contiguous=False)
    sigmas = scheduler.sigmas.double().tolist()
    worst = max(std_of_finished(sigmas, choices, c, DATA_STD) for c in itertools.combinations(range(1, 7), size))  # type: ignore[arg-type]
    plain = std_of_finished(sigmas, choices, range(0), DATA_STD)
    assert leftover_noise(scheduler, choices) == pytest.approx(math.sqrt(worst**2 - plain**2), abs=1e-4)


def test_of_a_window_that_moves_the_worst_place_counts() -> None:
    scheduler = scheduler_of(10, shift=5.0)
    common: dict[str, Any] = {"sde_type": "dance_sde", "noise_level": 1.2, "sde_window_size": 2}
    ranged = DiffusionRolloutAlgoConfig(**common, sde_window_range=(0, 9))
    at = [
        leftover_noise(scheduler, DiffusionRolloutAlgoConfig(**common, sde_window_range=(lo, lo + 2)))
        for lo in range(8)
    ]
    assert leftover_noise(scheduler, ranged) == max(at) == at[7]
    moving = DiffusionRolloutAlgoConfig(**common, sde_window_range=(0, 9), sde_window_mode="progressive")
    assert leftover_noise(scheduler, moving) == at[6]  # it stands at 0, 2, 4 and 6


DOCUMENTED: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # the rows of docs/algorithms.md
    (10, {"shift": 3.0}, {"sde_type": "sde", "noise_level": 0.7}),
    (10, QWEN_IMAGE, {"sde_type": "sde", "noise_level": 1.2, "sde_window_size": 2, "sde_window_range": (0, 5)}),
    (
        10,
        {"shift": 5.0},
        {"sde_type": "dance_sde", "noise_level": 1.2, "sde_window_size": 2, "sde_window_range": (0, 5)},
    ),
    (16, {"shift": 5.0}, {"sde_type": "dance_sde", "noise_level": 1.2}),
]


def test_the_documented_numbers() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    table = page.split("### Leftover noise")[1].split("\n| any |")[0]
    rows = [[cell.strip() for cell in line.split("|")[3:6]] for line in table.splitlines() if line.startswith("| ")]
    measured = []
    for steps, schedule, algo in DOCUMENTED:
        scheduler, settings = scheduler_of(steps, **schedule), DiffusionRolloutAlgoConfig(**algo)
        sigmas, left = scheduler.sigmas.double().tolist(), leftover_noise(scheduler, settings)
        plain = std_of_finished(sigmas, settings, range(0), DATA_STD)
        measured.append([f"{value:.2f}" for value in (math.hypot(left, plain), plain, left)])
    assert rows[1:] == measured


# ---- the recipes


def left_by(config: TrainConfig, **schedule: Any) -> float:
    rollout = config.actor_rollout_ref.rollout
    return leftover_noise(scheduler_of(rollout.pipeline.num_inference_steps, **schedule), rollout.algo)


@pytest.mark.parametrize("recipe", SCHEDULES)
def test_every_recipe_that_explores_stays_below_the_limit(recipe: str) -> None:
    assert left_by(load_recipe(recipe, ROOT / "prefect.yaml"), **SCHEDULES[recipe]) < LIMIT


def test_wan_explored_at_fifteen_of_sixteen_steps_would_train_on_noise() -> None:
    rollout = {"algo": {"noise_level": 1.2}, "pipeline": {"num_inference_steps": 16}}
    config = TrainConfig.model_validate(
        {"algorithm": {"name": "dance_grpo"}, "actor_rollout_ref": {"rollout": rollout}}
    )
    assert left_by(config, shift=5.0) == pytest.approx(0.958, abs=1e-3)
    assert left_by(config, shift=5.0) > LIMIT
