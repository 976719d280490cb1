# SPDX-License-Identifier: Apache-2.0
"""The old log-probs' stage: the trainer's against the rollout's, in this order, and by batches."""

from typing import Any

import numpy as np
import pytest
import torch

from models.config.rollout_correction import RolloutCorrectionConfig
from tasks.actors.messages import OldBatch
from tasks.actors.update_plan import NothingToLearn
from tasks.stages.old_log_prob import old_log_prob
from tasks.system.stopwatch import Stopwatch

OWN = [torch.tensor([[-1.0, -1.2], [-0.8, -0.9]]), torch.tensor([[-0.7, -1.1], [-1.3, -1.0]])]
"""The trainer's log-probs of two batches of two samples and two steps."""
THEIRS = [torch.tensor([[-1.1, -1.0], [-0.9, -1.1]]), torch.tensor([[-0.7, -1.0], [-1.0, -1.2]])]
"""The rollout's."""


class Trainer:
    """Stands for the ranks, whose weights differ from those that sampled."""

    def begin_old_log_probs(self, batches: Any) -> Any:
        return "begun now"

    def old_log_probs(self, pending: Any) -> Any:
        assert pending == "begun now"
        return [OldBatch(own, None, f"means of {number}") for number, own in enumerate(OWN)], THEIRS  # type: ignore[arg-type]


def scored(missing: int | slice | None = None, **settings: Any) -> Any:
    advantages = np.linspace(-1, 1, 4, dtype=np.float32)
    if missing is not None:
        advantages[missing] = np.nan
    config = RolloutCorrectionConfig(bypass_mode=False, **settings)
    return old_log_prob.fn(Stopwatch(), Trainer(), [object(), object()], advantages, config)  # type: ignore[arg-type]


def test_weights_are_the_trainers_probability_over_the_rollouts() -> None:
    """w = exp(old - rollout) (truncated importance sampling), of each batch its own rows."""
    found = scored(rollout_is="step", rollout_is_threshold=100.0)
    for kept, own, theirs in zip(found.batches, OWN, THEIRS, strict=True):
        torch.testing.assert_close(kept.is_weights, (own - theirs).exp())
        assert torch.equal(kept.log_probs, own)
    assert [kept.means for kept in found.batches] == ["means of 0", "means of 1"]
    difference = (torch.cat(OWN) - torch.cat(THEIRS)).abs()
    assert found.metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(difference.max().item())


def test_without_a_correction_there_are_no_weights() -> None:
    found = scored()
    assert [kept.is_weights for kept in found.batches] == [None, None]
    assert torch.equal(found.batches[1].log_probs, OWN[1])


def test_a_sample_without_a_reward_is_not_in_the_metrics() -> None:
    """The last sample's log-probs are furthest apart."""
    whole, without = scored(), scored(missing=3)
    name = "rollout_corr/logprob_abs_diff_max"
    assert whole.metrics[name] == pytest.approx(0.3)
    assert without.metrics[name] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "settings", [{}, {"rollout_is": "step"}, {"rollout_rs": "step_k2", "rollout_rs_threshold": 9.0}]
)
def test_an_iteration_of_groups_that_all_tie_is_no_error(settings: dict[str, Any]) -> None:
    """`drop_equal_groups` leaves every sample out: nothing was rejected, and the update is skipped."""
    assert scored(missing=slice(None), **settings) is None


def test_an_iteration_whose_every_sample_is_rejected_says_so() -> None:
    with pytest.raises(NothingToLearn, match=r"rollout_rs seq_max_k2 rejected every sample at threshold 1e-09: widen"):
        scored(rollout_rs="seq_max_k2", rollout_rs_threshold=1e-9)


@pytest.mark.parametrize("settings", [{"rollout_is": "step"}, {"rollout_rs": "step_k2", "rollout_rs_threshold": 9.0}])
def test_an_iteration_whose_every_log_prob_is_nan_says_so(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(f"{__name__}.OWN", [torch.full((2, 2), float("nan"))] * 2)
    with pytest.raises(NothingToLearn, match="no sample of the iteration has finite log-probs of both rollout and tra"):
        scored(**settings)
