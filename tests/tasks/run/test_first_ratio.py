# SPDX-License-Identifier: Apache-2.0
"""The first update of a run, or of one that was started again, looks at how far rounding moves its ratios."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.algorithms.rollout_correction import RatioError
from models.rollout.diffusers import DiffusersRolloutEngine
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.tree import TrainConfig
from tasks.run.loss_checks import check_first_ratio
from tests.support.helpers import actor_config, model_config, rollout_request


def first_ratio(deviation: float | None, lag: float = 0.0, clipped: bool = True, **correction: Any) -> str | None:
    """What the run says of its first update."""
    config = TrainConfig.model_validate({"algorithm": {"rollout_correction": correction}})
    learned = {"actor/pg_clipfrac": 0.1} if clipped else {}
    return check_first_ratio(
        config, learned | ({} if deviation is None else {"actor/ratio_deviation/first": deviation}), lag
    )


def test_what_is_not_rounding_or_not_clipped_stops_no_run() -> None:
    """Recorded log-probs of older weights; a loss without a clip range, or without log-probs. The trainer's own old
    log-probs are of the weights of now, whatever has sampled."""
    assert first_ratio(1.0, lag=1.0) is None
    assert first_ratio(1.0, clipped=False) is None
    assert first_ratio(None) is None
    assert first_ratio(0.0) is None
    for settings in ({}, {"bypass_mode": False}):
        with pytest.raises(RatioError):
            first_ratio(1.0, **settings)
    with pytest.raises(RatioError):
        first_ratio(1.0, lag=1.0, bypass_mode=False, rollout_is="step")


def test_what_the_checks_allow_makes_no_other_run() -> None:
    """The same run goes on once its owner says that it may."""
    one, other = (
        TrainConfig.model_validate({"trainer": changes})
        for changes in ({}, {"max_logprob_difference": None, "canary_missing_share": 0.9, "canary_batch": 2})
    )
    assert one.digest() == other.digest()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("trainer_dtype", [None, "float32"])
def test_a_first_update_in_another_number_format_stops_the_run(
    tiny_model: Path, trainer_dtype: str | None, bypass: bool
) -> None:
    """A bf16 model whose trainer computes in fp32, at the usual clip range 1e-4: rounding alone is more. Its own
    log-probs as the old ones mend that, and later optimiser steps, which do move the ratio, do not count."""
    model = model_config(tiny_model, dtype="bfloat16")
    _, samples = DiffusersRolloutEngine(model).generate(rollout_request(samples=2))
    trainer = DiffusersFSDPEngine(model, actor_config(lr=1e-3, param_dtype=trainer_dtype))
    trainer.initialize()
    batch = ActorBatch([(samples if bypass else trainer.rescored(samples), torch.tensor([1.0, -0.8, 0.3, -1.5]))], 4)
    learned = {f"actor/{name}": value for name, value in trainer.update_policy([batch, batch]).items()}
    assert learned["actor/ratio_deviation/mean"] > 1e-4
    config = TrainConfig.model_validate({"algorithm": {"rollout_correction": {"bypass_mode": bypass}}})
    if bypass and trainer_dtype:
        with pytest.raises(RatioError, match=r"allows a share of 0\.5"):
            check_first_ratio(config, learned, 0.0)
    else:
        assert learned["actor/ratio_deviation/first"] == 0.0
        assert check_first_ratio(config, learned, 0.0) is None
