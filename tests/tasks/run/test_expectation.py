# SPDX-License-Identifier: Apache-2.0
"""What a run says at its start that an iteration should take, against closed forms, and what it says of it later."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.expectations import ROWS, config_of
from models.cost.flops import Batch, PolicyFlops
from models.cost.measured_shares import MEASURED, Shares, measured_shares
from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelConfig
from tasks.config.tree import TrainConfig
from tasks.run.expectation import BesideExpected, Expectation, RewardWork, beside, expect, planned_work, reward_work
from tasks.run.update_passes import trained_steps
from tests.support.tiny_models import embeddings_of

SHARES = Shares(MEASURED[0], 0.5, 0.25, 0.5)
COLOCATED = Expectation(
    **{"samples": 96, "rollout": 39.0, "old_log_prob": 0.0, "update": 61.0, "compared": 20.0, "reference": 12.0},
    **{"rollout_gpus": 8, "trainer_gpus": 8, "colocated": True, "ahead": False, "rewards": None, "shares": SHARES},
)


def run_config(folder: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig.model_validate(
        {
            "data": {"train_batch_size": 4},
            "actor_rollout_ref": {
                "model": {"path": str(folder), "dtype": "bfloat16"},
                "rollout": {
                    **{"n": 4, "micro_batch_size": 4, "placement": "colocated"},
                    "pipeline": {"height": 16, "width": 24, "num_inference_steps": 4, "true_cfg_scale": 4.0},
                },
                "actor": {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 4},
            },
            "trainer": {"device": "cuda", "device_peak_tflops": 100.0},
        }
    )
    return config.with_changes(changes)


def flops_of(config: TrainConfig) -> PolicyFlops:
    settings = config.actor_rollout_ref
    model = DiffusionModelConfig.load(settings.model, settings.rollout.pipeline, settings.rollout.algo)
    prompts = embeddings_of(model, lengths=(9,), negative_length=9)
    return PolicyFlops(model, pass_cost(model, prompts), Batch(1, 9, 9))


def test_the_table_of_placements() -> None:
    """docs/placement.md: 8 GPUs and a rollout of .39 lose 4 % to the division, 2 GPUs 18 %."""
    assert COLOCATED.placed.seconds == pytest.approx(100 / 8)
    name, apart = COLOCATED.elsewhere() or ("", None)
    assert name.startswith("apart, 3 of 8 GPUs sampling")
    assert apart is not None
    assert apart.seconds == pytest.approx(max(39 / 3, 61 / 5))
    assert 1 - COLOCATED.placed.seconds / apart.seconds == pytest.approx(0.04, abs=0.005)
    two = replace(COLOCATED, rollout_gpus=2, trainer_gpus=2)
    assert 1 - two.placed.seconds / two.elsewhere()[1].seconds == pytest.approx(0.18, abs=0.005)
    assert replace(COLOCATED, rollout_gpus=1, trainer_gpus=1).elsewhere() is None
    separate = replace(COLOCATED, rollout_gpus=1, trainer_gpus=1, colocated=False)
    assert separate.placed.seconds == pytest.approx(100.0)
    assert replace(separate, ahead=True).placed.seconds == pytest.approx(61.0)
    name, together = separate.elsewhere() or ("", None)
    assert (name, together and together.seconds) == ("colocated on 2 GPUs", pytest.approx(50.0))


def test_rewards_count_as_far_as_the_rollout_does_not_hide_them() -> None:
    slow = replace(COLOCATED, rewards=RewardWork({"ocr": 80.0}, 10.0, ("judge",)))
    assert slow.placed.waits == pytest.approx(10 - 39 / 8)
    assert slow.placed.seconds == pytest.approx(10 + 61 / 8)
    assert slow.elsewhere()[1].seconds == pytest.approx(39 / 3), "hidden behind slower sampling, or beside the update"
    whole, basis, rewards, placement = slow.lines()
    assert "update 7.62 s with reference 1.5 s and older weights 1 s, rewards after the rollout 5.12 s" in whole
    assert "Stable Diffusion 3.5 medium, compiled, reached on one H200" in basis
    assert rewards == (
        "expected of rewards: ocr 80 core-seconds, judge not known; 10 s if each worker has a core, during the rollout "
        "and after it"
    )
    assert placement == "expected apart, 3 of 8 GPUs sampling one step ahead: 13 s, which is less than here"
    assert "pays where sleep, waking and rewards of unknown length take more than 0.5 s" in COLOCATED.lines()[-1]


def test_operations_at_the_measured_share_of_the_peak(tiny_model: Path) -> None:
    """16 samples of four guided steps, three of them trained on, the reference beside each."""
    config = run_config(
        tiny_model,
        actor_rollout_ref={"actor": {"use_kl_loss": True, "kl_loss_coef": 0.1}},
        reward={"functions": {"jpeg_compressibility": {}}},
    )
    flops, shapes = flops_of(config), [Batch(16, 9, 9)]
    found = expect(config, flops, {"rollout": 100.0, "update": 100.0}, measured=True)
    assert found is not None
    share = measured_shares(1e-3, compiled=False)
    assert found.rollout == pytest.approx(flops.rollout(shapes) / (1e14 * share.rollout))
    reference = flops.update(shapes, 0, 0, 48) / (1e14 * share.reference)
    assert found.reference == found.compared == pytest.approx(reference)
    assert found.update == pytest.approx(flops.update(shapes, 48, 0, 0) / (1e14 * share.update) + reference)
    assert found.rewards == RewardWork({}, 0.0, ("jpeg_compressibility",))
    assert expect(config, flops, {"rollout": 100.0}, measured=True) is None


def test_old_log_probs_are_forwards_of_every_sample(tiny_model: Path) -> None:
    config = run_config(tiny_model, algorithm={"rollout_correction": {"bypass_mode": False}, "best_worst_k": 1})
    flops, shapes = flops_of(config), [Batch(16, 9, 9)]
    work = planned_work(config, flops)
    assert work.old_log_prob == pytest.approx(flops.update(shapes, 0, 48, 0))
    assert work.update == pytest.approx(flops.update(shapes, 24, 0, 0)), "half of the samples are learnt from"


@pytest.mark.parametrize(("name", "passes"), [("flow_grpo", 2), ("diffusion_nft", 1)])
def test_what_an_update_compares_with_is_computed_in_every_epoch_or_once(
    tiny_model: Path, name: str, passes: int
) -> None:
    """A replayed step asks the reference again; of noised samples the velocities are there before the first step."""
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ppo_epochs": 2}
    config = run_config(tiny_model, algorithm={"name": name}, actor_rollout_ref={"actor": actor})
    flops, shapes = flops_of(config), [Batch(16, 9, 9)]
    seen = passes * 16 * trained_steps(config)
    assert planned_work(config, flops).reference == pytest.approx(flops.update(shapes, 0, 0, seen))


def test_a_half_that_the_rollout_records_serves_the_first_optimiser_step(tiny_model: Path) -> None:
    config = run_config(tiny_model, actor_rollout_ref={"actor": {"guidance_gradient": "conditional"}})
    flops, shapes = flops_of(config), [Batch(16, 9, 9)]
    assert planned_work(config, flops).update == pytest.approx(flops.update(shapes, 48, 0, 0, recorded=12))


def test_what_was_not_measured_has_no_share(tiny_model: Path) -> None:
    config = run_config(tiny_model)
    peaks = {"rollout": 100.0, "update": 100.0}
    for changes in ({"trainer": {"device": "cpu"}}, {"actor_rollout_ref": {"model": {"dtype": "float32"}}}):
        other = config.with_changes(changes)
        found = expect(other, flops_of(other), peaks, measured=True)
        assert found is not None
        assert found.shares is None


def test_the_measured_work_is_the_nearest_in_size() -> None:
    assert measured_shares(2.0, compiled=True).rollout == pytest.approx(1440 / 3.41 / 989.4)
    assert measured_shares(40.0, compiled=True).measured.name == "Qwen-Image"
    assert measured_shares(0.02, compiled=True, graphs=True).rollout == pytest.approx(157 / 0.66 / 989.4)
    assert measured_shares(0.02, compiled=True).rollout == pytest.approx(157 / 1.28 / 989.4)
    assert measured_shares(40.0, compiled=False).update == pytest.approx(1409 / 6.28 / 989.4)


def test_rewards_that_were_measured_say_their_seconds() -> None:
    work = reward_work(config_of(ROWS[0]))
    assert work.core_seconds["ocr"] == pytest.approx(48 * 0.042, rel=0.02)
    assert work.seconds == pytest.approx(work.core_seconds["ocr"] / 16)
    words = reward_work(config_of(next(row for row in ROWS if row.recipe == "words")))
    assert words.core_seconds["tesseract"] == pytest.approx(64 * 64 * 0.25 * 0.004), "of a quarter of the pictures"
    config = config_of(ROWS[0])
    video = config.with_changes({"actor_rollout_ref": {"rollout": {"pipeline": {"num_frames": 9}}}})
    ocr = video.reward.functions["ocr"].model_dump() | {"frame_interval": 4}
    fewer = video.with_changes({"reward": {"functions": {"ocr": ocr}}})
    assert reward_work(video).core_seconds["ocr"] == pytest.approx(9 * reward_work(config).core_seconds["ocr"])
    assert reward_work(fewer).core_seconds["ocr"] == pytest.approx(3 * reward_work(config).core_seconds["ocr"])


def test_once_a_run_says_what_an_iteration_took_beside_it() -> None:
    told = BesideExpected(replace(COLOCATED, rollout_gpus=2, trainer_gpus=2), workers=2)
    metrics = {"perf/rollout_busy_s": 50.0, "perf/reward_busy_s": 9.6, "timing_s/gen": 25.0, "timing_s/step": 100.0}
    metrics |= {
        "timing_s/update_actor": 45.0,
        "timing_s/testing": 10.0,
        "timing_s/sleep": 12.0,
        "timing_s/sync/sent": 1,
    }
    assert [told.observe(number, metrics) for number in (1, 2)] == [None, None]
    assert told.observe(3, metrics) == (
        "expected 50 s, iteration 3 took 90: rollout 25 s (19.5), update 45 s (30.5); most of the rest sleep "
        "12 s; rewards 0.1 s a picture"
    )
    assert told.observe(4, metrics) is None


def test_an_update_whose_steps_began_early_is_told_whole() -> None:
    """Its stage is what was left to wait for."""
    metrics = {"timing_s/update_actor": 5.0, "timing_s/step": 60.0, "perf/early_steps": 3.0, "perf/update_busy_s": 40.0}
    assert "update 40 s (" in beside(COLOCATED, 3, metrics, 1)
    assert "update 5 s (" in beside(COLOCATED, 3, metrics | {"perf/early_steps": 0.0}, 1)
