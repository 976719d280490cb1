# SPDX-License-Identifier: Apache-2.0
"""What of an iteration is asked for before what. Without Ray and workers."""

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.config.tree import TrainConfig
from tasks.run import collect
from tasks.run.collect import SampledIteration, sample_and_score
from tasks.system.stopwatch import Stopwatch

REPLAY = {"algorithm": {"rollout_correction": {"bypass_mode": False}}}
ON_THE_SAME_GPUS = {"placement": "colocated", "enable_sleep_mode": False}


@pytest.mark.parametrize(
    ("rollout", "algorithm", "expected"),
    [
        ({"placement": "separate"}, REPLAY, ["sampled", "replay", "scored"]),
        (ON_THE_SAME_GPUS, REPLAY, ["sampled", "replay", "scored"]),
        ({"placement": "colocated"}, REPLAY, ["sampled", "scored"]),  # there is no room before the rollout sleeps
        (ON_THE_SAME_GPUS, {}, ["sampled", "scored"]),
    ],
)
def test_the_trainer_replays_samples_while_they_are_scored(
    rollout: dict[str, Any], algorithm: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before all are sampled: until then a rank would answer nothing else."""
    done: list[str] = []

    def noting(what: str) -> Any:
        return lambda *_: done.append(what) or what

    monkeypatch.setattr(collect, "finish_rollout", noting("sampled"))
    monkeypatch.setattr(collect, "finish_reward", noting("scored"))
    config = TrainConfig.model_validate(
        algorithm | {"actor_rollout_ref": {"rollout": rollout}, "trainer": {"keep_stages": False}}
    )
    run: Any = SimpleNamespace(
        config=config,
        trainer=SimpleNamespace(begin_old_log_probs=noting("replay")),
        online=SimpleNamespace(reward=SimpleNamespace(submit=lambda *_, **__: None)),
    )
    iteration = SampledIteration(number=1, policy_version=0)
    assert sample_and_score(run, iteration, Stopwatch()) == "scored"
    assert done == expected
    assert iteration.old == ("replay" if "replay" in expected else None)
