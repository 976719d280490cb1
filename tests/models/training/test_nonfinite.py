# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps whose gradient is not finite: left out and counted, or the end of the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.config.actor import ForwardProcessConfig
from models.errors import DoubleflowError
from models.training.engine import LOG_PROB_DISTANCES
from models.training.fsdp import DiffusersFSDPEngine
from models.training.gradients import GradientNotFinite, NonfiniteSteps
from models.training.micro_batches import ActorBatch
from tasks.actors.trainer_rank import TrainerRank
from tasks.config.tree import TrainConfig
from tests.models.training.test_engine import all_parameters, batch_of, config_of, largest_difference, rolled_out
from tests.support.helpers import actor_config, model_config

pytestmark = pytest.mark.usefixtures("one_rank")


def lenient(model: Path, steps: int = 2, **settings: Any) -> DiffusersFSDPEngine:
    """An engine that leaves out so many steps in a row; its average moves with each that it makes."""
    settings = {"enable": True, "update_interval": 1, "lr_warmup_steps": 4} | settings
    engine = DiffusersFSDPEngine(config_of("lora", model), actor_config(**settings), max_nonfinite_steps=steps)
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def batches(one_block_model: Path) -> tuple[ActorBatch, ActorBatch]:
    """One that can be learnt from, and one with a latent that is not a number."""
    trajectories = rolled_out(config_of("lora", one_block_model))
    broken = trajectories.rows(torch.arange(6))
    broken.latents[2, 1, 0, 0] = float("nan")
    return batch_of(trajectories), batch_of(broken)


def test_a_step_that_is_left_out_leaves_nothing(one_block_model: Path, batches: tuple[ActorBatch, ActorBatch]) -> None:
    """Neither in weights, moments, average, schedule and counters nor in the metrics: as if not asked for."""
    good, bad = batches
    engine, untouched = lenient(one_block_model), lenient(one_block_model)
    for given, expected in (([bad, good, bad, good], [good, good]), ([good, bad], [good])):
        metrics, plain = engine.update_policy(given), untouched.update_policy(expected)
        left_out = len(given) - len(expected)
        assert (metrics.pop("nonfinite_steps"), plain.pop("nonfinite_steps")) == (left_out, 0)
        assert (metrics.pop("nonfinite_sample_steps"), plain.pop("nonfinite_sample_steps")) == (18 * left_out, 0)
        assert metrics.pop("sample_steps") == 18 * len(given)
        assert plain.pop("sample_steps") == 18 * len(expected)
        if given[0] is bad:  # they are of the first step alone
            assert max(plain.pop(name) for name in LOG_PROB_DISTANCES) < 1e-6
        assert metrics == plain
    assert largest_difference(all_parameters(engine), all_parameters(untouched)) == 0.0
    for state, other in zip(engine.optimizer.state.values(), untouched.optimizer.state.values(), strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
    with engine.holding("average"), untouched.holding("average"):
        assert largest_difference(engine.gather_weights(), untouched.gather_weights()) == 0.0


def test_an_iteration_of_such_steps_alone_moves_nothing(
    one_block_model: Path, batches: tuple[ActorBatch, ActorBatch]
) -> None:
    engine = lenient(one_block_model)
    start = engine.gather_weights()
    metrics = engine.update_policy([batches[1]])
    steps = {"sample_steps": 18, "first_sample_steps": 18, "recorded_steps": 0, "nonfinite_sample_steps": 18}
    assert metrics == steps | {"optimizer_steps": 0, "nonfinite_steps": 1}
    assert largest_difference(engine.gather_weights(), start) == 0.0


def test_too_many_in_a_row_stop_the_run(
    one_block_model: Path, batches: tuple[ActorBatch, ActorBatch], tmp_path: Path
) -> None:
    """A step that is made begins the count anew; a checkpoint goes on with it."""
    good, bad = batches
    engine = lenient(one_block_model)
    engine.update_policy([bad, bad, good, bad])
    engine.save_checkpoint(tmp_path / "checkpoint")
    message = r"step 1 is nan, as it was the 2 times before .*trainer.on_nonfinite skip and a higher trainer.max_nonf"
    for each in (engine, lenient(one_block_model)):
        if each is not engine:
            each.load_checkpoint(tmp_path / "checkpoint")
        assert each.update_policy([bad])["nonfinite_steps"] == 1
        with pytest.raises(GradientNotFinite, match=message):
            each.update_policy([bad])


def test_a_gradient_that_is_not_finite_is_told_without_a_traceback() -> None:
    """Commands show a sentence of this project's errors, and of others their frames."""
    with pytest.raises(DoubleflowError, match="the gradient norm of optimiser step 7 is nan") as caught:
        NonfiniteSteps(0).leave_out(float("nan"), 7)
    assert not isinstance(caught.value, ValueError)  # which would be wrong input


def test_the_setting_reaches_the_engine_and_makes_no_other_run(one_block_model: Path) -> None:
    """A run that was stopped goes on, as itself, with another answer to such a step."""
    stops, skips = (
        TrainConfig.model_validate({"trainer": {"on_nonfinite": answer, "max_nonfinite_steps": 5}})
        for answer in ("stop", "skip")
    )
    assert stops.digest() == skips.digest()
    assert (stops.trainer.skippable_steps, skips.trainer.skippable_steps) == (0, 5)
    ranks = [
        TrainerRank(
            model_config(one_block_model),
            actor_config(),
            ForwardProcessConfig(),
            config.trainer,
        )
        for config in (stops, skips)
    ]
    assert [rank.new_engine().nonfinite.allowed for rank in ranks] == [0, 5]
    with pytest.raises(ValueError, match="on_nonfinite"):
        TrainConfig.model_validate({"trainer": {"on_nonfinite": "ignore"}})
