# SPDX-License-Identifier: Apache-2.0
"""An update whose batches come one after the other is the update of all of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config.actor import ForwardProcessConfig
from models.training.engine import LOG_PROB_DISTANCES
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tests.models.training.test_engine import (
    ADVANTAGES,
    all_parameters,
    batch_of,
    config_of,
    largest_difference,
    rolled_out,
)
from tests.support.helpers import actor_config, model_config

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_of(model: Path) -> DiffusersFSDPEngine:
    """One that may leave out a step, and holds on to the weights of before an update and to their average."""
    settings = {"enable": True, "update_interval": 1, "lr_warmup_steps": 4}
    config = actor_config(**settings)
    engine = DiffusersFSDPEngine(config_of("lora", model), config, keeps_previous=True, max_nonfinite_steps=2)
    engine.initialize()
    return engine


def moved(engine: DiffusersFSDPEngine) -> list[dict[str, torch.Tensor]]:
    """All that an update moves: weights, their average, those of before it, moments."""
    found = [all_parameters(engine)]
    for which in ("average", "previous"):
        with engine.holding(which):
            found.append(engine.gather_weights())
    moments = [state[name] for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [*found, dict(enumerate(moments))]


@pytest.fixture(scope="module")
def batches(one_block_model: Path) -> list[ActorBatch]:
    """Three that differ: of one sample of the second the reward is missing, and the third's gradient is not finite."""
    trajectories = rolled_out(config_of("lora", one_block_model))
    some = ADVANTAGES.flip(0).clone()
    some[1] = float("nan")
    broken = trajectories.rows(torch.arange(6))
    broken.latents[2, 1, 0, 0] = float("nan")
    return [batch_of(trajectories), batch_of(trajectories, some), batch_of(broken)]


@pytest.mark.parametrize("early", [1, 2, 3])
def test_it_gives_the_same_weights_and_metrics(one_block_model: Path, batches: list[ActorBatch], early: int) -> None:
    """Of two iterations, the second in another order: what is of an update's first step is counted anew."""
    engine, whole = engine_of(one_block_model), engine_of(one_block_model)
    for given in (batches, batches[::-1]):
        for batch in given[:early]:
            engine.step_early(batch)
        metrics, expected = engine.update_policy(given[early:]), whole.update_policy(given)
        assert metrics == expected
        assert metrics["nonfinite_steps"] == 1
        assert set(LOG_PROB_DISTANCES) <= {*metrics} or given[0] is batches[2]
        for found, wanted in zip(moved(engine), moved(whole), strict=True):
            assert largest_difference(found, wanted) == 0.0


def test_the_rate_is_that_of_each_step_before_it(one_block_model: Path, batches: list[ActorBatch]) -> None:
    """A quarter, then half of 1e-2: the warm-up goes on with the steps, early or not, and not with those left out."""
    for early in (0, 1, 2):
        engine = engine_of(one_block_model)
        given = [batches[0], batches[2], batches[1]]
        for batch in given[:early]:
            engine.step_early(batch)
        assert engine.update_policy(given[early:])["lr"] == pytest.approx((0.25e-2 + 0.5e-2) / 2)
        assert engine.update_policy(batches[:1])["lr"] == pytest.approx(0.75e-2)


def test_a_first_step_that_is_left_out_stays_the_first(one_block_model: Path, batches: list[ActorBatch]) -> None:
    """Six samples of three steps each; the second step has one sample fewer, and its distances are not the first's."""
    for early in (0, 1, 2):
        engine = engine_of(one_block_model)
        given = [batches[2], batches[1]]
        for batch in given[:early]:
            engine.step_early(batch)
        metrics = engine.update_policy(given[early:])
        assert (metrics["first_sample_steps"], metrics["sample_steps"]) == (18, 33)
        assert (metrics["nonfinite_steps"], metrics["nonfinite_sample_steps"]) == (1, 18)
        assert not {*LOG_PROB_DISTANCES} & {*metrics}


def test_timesteps_that_the_schedule_lacks_are_refused_before_anything_is_trained(
    one_block_model: Path, batches: list[ActorBatch]
) -> None:
    """Here of the last micro-batch alone: neither a step that came before it nor a gradient stays."""
    engine, whole = engine_of(one_block_model), engine_of(one_block_model)
    trajectories, advantages = batches[0].parts[0]
    timesteps = trajectories.timesteps.clone()
    timesteps[4:] += 1
    lacking = batch_of(replace(trajectories, timesteps=timesteps), advantages)
    message = r"timestep 1001\.0 is not in this scheduler's schedule"
    with pytest.raises(ValueError, match=message):
        engine.step_early(lacking)
    assert engine.update_policy(batches[:1]) == whole.update_policy(batches[:1])
    with pytest.raises(ValueError, match=message):
        engine.update_policy([batches[0], lacking])
    assert largest_difference(all_parameters(engine), all_parameters(whole)) == 0.0


def test_a_mini_batch_without_a_sample_makes_no_step(one_block_model: Path, batches: list[ActorBatch]) -> None:
    nothing = ActorBatch([(batches[0].parts[0][0], torch.full((6,), float("nan")))], 0)
    engine, whole = engine_of(one_block_model), engine_of(one_block_model)
    engine.step_early(nothing)
    assert engine.update_policy(batches[:1]) == whole.update_policy(batches[:1])


def test_a_checkpoint_forgets_what_had_begun(one_block_model: Path, batches: list[ActorBatch], tmp_path: Path) -> None:
    engine, whole = engine_of(one_block_model), engine_of(one_block_model)
    engine.save_checkpoint(tmp_path)
    engine.step_early(batches[0])
    engine.load_checkpoint(tmp_path)
    assert engine.update_policy(batches[1:2]) == whole.update_policy(batches[1:2])
    assert largest_difference(all_parameters(engine), all_parameters(whole)) == 0.0


def test_losses_of_the_forward_process_take_all_at_once(one_block_model: Path, batches: list[ActorBatch]) -> None:
    engine = DiffusersFSDPEngine(
        model_config(one_block_model), actor_config(loss_mode="diffusion_nft"), forward_config=ForwardProcessConfig()
    )
    engine.initialize()
    with pytest.raises(AssertionError, match="takes all batches of an update at once"):
        engine.step_early(batches[0])
