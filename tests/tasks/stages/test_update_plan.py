# SPDX-License-Identifier: Apache-2.0
"""How an iteration's batches are dealt to optimiser steps and ranks, and what comes back from the ranks."""

from collections.abc import Sequence

import numpy as np
import pytest
import ray
import torch

from models.schedulers.noise_keys import NoiseKey
from tasks.actors.messages import BUSY_SECONDS, OldBatch, RankMiniBatch
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import check_plans
from tasks.actors.update_plan import NothingToLearn, OldScores, over_ranks, plan_updates
from tasks.stages.update import update
from tasks.system.stopwatch import Stopwatch

NAN = float("nan")


def batch(number: int) -> PendingBatch:
    """Of two samples; its number stands for its trajectories."""
    keys = tuple(NoiseKey(0, 1, f"uid-{number}", index) for index in range(2))
    return PendingBatch((), keys, (5, 0), number, None, None, None, None, 0)  # type: ignore[arg-type]


BATCHES = [batch(number) for number in range(8)]  # 16 samples, mini-batches of 8, two ranks: 2 batches a rank and step


def advantages(missing: tuple[int, ...] = ()) -> np.ndarray:
    values = np.arange(16, dtype=np.float32)
    values[list(missing)] = NAN
    return values


def scored(kept: Sequence[float]) -> OldScores:
    """The trainer's own scores of three steps a sample, of which these shares are not rejected."""
    shares = torch.tensor(kept).unsqueeze(1) * 3
    weights = torch.where(torch.arange(3) < shares.round(), 1.0, NAN)
    return OldScores([OldBatch(torch.zeros(2, 3), of_batch, ray.ObjectRef.nil()) for of_batch in weights.split(2)], {})


def dealt(plans: list[list[RankMiniBatch]]) -> list[list[list[int]]]:
    """For each rank and optimiser step the batches it trains on."""
    assert all(part.keys == BATCHES[part.samples].keys for plan in plans for entry in plan for part in entry.parts)
    return [[[part.samples for part in entry.parts] for entry in plan] for plan in plans]


def test_whole_batches_in_order_and_each_once() -> None:
    plans = plan_updates(BATCHES, advantages(), 8, world_size=2)
    assert dealt(plans) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [entry.global_count for plan in plans for entry in plan] == [8, 8, 8, 8]
    assert [part.advantages.tolist() for part in plans[1][0].parts] == [[4, 5], [6, 7]]


def test_missing_and_rejected_samples_do_not_count_on_any_rank() -> None:
    """A sample counts by the share of its steps that stay; every rank is told the whole mini-batch's count."""
    kept = np.ones(16)
    kept[[0, 5, 9]] = 0.0, 1 / 3, 2 / 3
    plans = plan_updates(BATCHES, advantages(missing=(1, 9)), 8, world_size=2, old=scored(kept))
    counts = [[entry.global_count for entry in plan] for plan in plans]
    assert counts == [[pytest.approx(8 - 2 - 2 / 3), 7.0]] * 2


def test_each_batch_has_the_trainers_scores_of_its_own_samples() -> None:
    """Another batch's would be the old log-probs of other pictures; without any the rollout's would be."""
    old = scored([1.0] * 16)
    plans = plan_updates(BATCHES, advantages(), 8, world_size=2, old=old)
    assert all(part.old is old.batches[part.samples] for plan in plans for entry in plan for part in entry.parts)
    without = plan_updates(BATCHES, advantages(), 8, world_size=2)
    assert all(part.old is None for plan in without for entry in plan for part in entry.parts)


def test_a_mini_batch_with_nothing_left_is_skipped() -> None:
    old = scored([0.0] * 8 + [1.0] * 8)
    plans = plan_updates(BATCHES, advantages(), 8, world_size=2, old=old)
    assert dealt(plans) == [[[4, 5]], [[6, 7]]]
    plans = plan_updates(BATCHES, advantages(missing=tuple(range(8, 16))), 8, world_size=2, old=old)
    assert dealt(plans) == [[], []]


def test_share_of_steps_that_are_kept() -> None:
    log_probs = (torch.zeros(2, 4), torch.zeros(1, 4))
    weights = (torch.tensor([[1.0, NAN, 0.0, 2.0], [NAN] * 4]), torch.ones(1, 4))
    means = ray.ObjectRef.nil()
    scored = [OldBatch(own, weight, means) for own, weight in zip(log_probs, weights, strict=True)]
    assert OldScores(scored, {}).kept().tolist() == [0.75, 0.0, 1.0]
    unweighted = [OldBatch(own, None, means) for own in log_probs]
    assert OldScores(unweighted, {}).kept().tolist() == [1.0, 1.0, 1.0]


def test_metrics_over_ranks_of_which_one_had_nothing_to_train_on() -> None:
    ranks = [{"pg_loss": 1.0, "ratio_deviation/max": 0.1, "lr": 0.5}, {"lr": 0.5}, {"pg_loss": 3.0, "lr": 0.5}]
    assert over_ranks(ranks) == {"pg_loss": 2.0, "ratio_deviation/max": 0.1, "lr": 0.5}
    counts = [{"sample_steps": 9.0}, {"sample_steps": 0.0}, {"sample_steps": 3.0}]
    counted = [of_rank | count for of_rank, count in zip(ranks, counts, strict=True)]
    assert over_ranks(counted) == {"pg_loss": 1.5, "ratio_deviation/max": 0.1, "lr": 0.5, "sample_steps": 4.0}


def test_a_maximum_over_samples_is_that_of_the_rank_that_has_it() -> None:
    assert over_ranks([{"ratio_deviation/max": value} for value in (0.1, 0.3, 0.2)]) == {"ratio_deviation/max": 0.3}


def test_metrics_of_ranks_that_count_alike_are_plain_means() -> None:
    """And those of a lone rank are its own to the last bit."""
    assert over_ranks([{"kl_loss": 0.1, "sample_steps": 3.0}]) == {"kl_loss": 0.1, "sample_steps": 3.0}
    ranks = [{"kl_loss": value, "grad_norm": 2.0, "sample_steps": 7.0} for value in (0.1, 0.3)]
    assert over_ranks(ranks) == {"kl_loss": 0.2, "grad_norm": 2.0, "sample_steps": 7.0}


def test_metrics_of_the_first_step_are_weighed_by_its_samples() -> None:
    """Of an engine that does not count them, its ranks count alike."""
    names = ("logprob_abs_diff/mean", "ratio_deviation/first")
    ranks = [dict.fromkeys((*names, "kl_loss"), value) | {"sample_steps": 4.0} for value in (1.0, 3.0)]
    assert over_ranks(ranks) == dict.fromkeys((*names, "kl_loss"), 2.0) | {"sample_steps": 4.0}
    counted = [of_rank | {"first_sample_steps": first} for of_rank, first in zip(ranks, (3.0, 1.0), strict=True)]
    joined = over_ranks(counted)
    assert [joined[name] for name in (*names, "kl_loss")] == [1.5, 1.5, 2.0]


def test_samples_of_steps_that_were_left_out_weigh_nothing() -> None:
    """They are in no rank's means. Where all were left out there is none."""
    ranks = [{"kl_loss": 1.0, "sample_steps": 9.0}, {"kl_loss": 3.0, "sample_steps": 5.0}]
    left_out = [{"nonfinite_sample_steps": 8.0}, {"nonfinite_sample_steps": 2.0}]
    joined = over_ranks([of_rank | out for of_rank, out in zip(ranks, left_out, strict=True)])
    assert joined == {"kl_loss": 2.5, "sample_steps": 7.0, "nonfinite_sample_steps": 5.0}
    nothing = {"sample_steps": 9.0, "nonfinite_sample_steps": 9.0}
    assert over_ranks([nothing, nothing]) == nothing


OF_RANKS = (
    *("lr", "grad_norm", "optimizer_steps", "recorded_steps", "nonfinite_steps"),
    *("nonfinite_sample_steps", "first_sample_steps", BUSY_SECONDS),
)


@pytest.mark.parametrize("name", OF_RANKS)
def test_what_is_no_mean_over_samples_is_not_weighed_by_them(name: str) -> None:
    ranks = [{name: 1.0, "sample_steps": 9.0}, {name: 3.0, "sample_steps": 3.0}]
    assert over_ranks(ranks)[name] == 2.0


def test_an_update_may_be_empty_only_where_every_sample_was_left_out() -> None:
    dropped = advantages(tuple(range(16)))
    check_plans(plan_updates(BATCHES, dropped, 8, world_size=2), dropped)
    check_plans(plan_updates(BATCHES, advantages(), 8, world_size=2), advantages())
    rejected = plan_updates(BATCHES, advantages((3,)), 8, world_size=2, old=scored([0.0] * 16))
    with pytest.raises(NothingToLearn, match=r"of the 15 samples with an advantage .*rollout_correction left none"):
        check_plans(rejected, advantages((3,)))


class PortedTrainer:
    """Answers with the metrics of a loss from a code that writes the prefix itself, and of one that does not."""

    def update(self, *_: object) -> dict[str, float]:
        return {"actor/ppo_kl": 0.25, "pg_loss": 0.5, "logprob_abs_diff/mean": 0.125, BUSY_SECONDS: 1.5}


def test_a_loss_may_write_the_actors_prefix_itself() -> None:
    found = update.fn(Stopwatch(), PortedTrainer(), [], np.zeros(1))  # type: ignore[arg-type]
    named = {"actor/ppo_kl": 0.25, "actor/pg_loss": 0.5, "perf/update_busy_s": 1.5}
    assert found == named | {"rollout_corr/logprob_abs_diff_mean": 0.125}
    # Where the trainer's own scores are the old ones, the update's distances are from those, and tell of no rollout.
    own = OldScores([], {"rollout_corr/logprob_abs_diff_mean": 0.5})
    with_own = update.fn(Stopwatch(), PortedTrainer(), [], np.zeros(1), own)  # type: ignore[arg-type]
    assert with_own == found | own.metrics
