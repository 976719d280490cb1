# SPDX-License-Identifier: Apache-2.0
"""A run whose optimiser steps begin before all is scored is the run whose steps wait, undisturbed and failing."""

from pathlib import Path

import pytest

from tests.platform.test_resume import final_weights, history
from tests.support.platform_helpers import RayHead, Workspace, make_workspace, write_module

SLOW = """
import time
from pathlib import Path

from tasks.rewards.jpeg import JpegIncompressibility

HERE = Path(__file__).parent
LAST_OF_THE_SECOND_ITERATION = 8


def slow_size(images, prompts):
    time.sleep(0.4)
    with (HERE / "calls").open("a") as calls:
        calls.write(".")
        number = calls.tell()
    if number == LAST_OF_THE_SECOND_ITERATION and (HERE / "fails").exists():
        raise ConnectionError("the judge is gone")
    return JpegIncompressibility().score(images, prompts)
"""
"""A reward, size in bytes, that takes so long for a batch that those before it are scored well before it is."""
REPLAYED = "algorithm.rollout_correction.bypass_mode=false"
"""The old log-probs are the trainer's own, and have to be there before the first step."""
SETTINGS = (
    "reward.functions={slow: {reward: 'slow_reward:slow_size', retries: 0}}",
    "reward.max_missing_fraction=0.1",
    "algorithm.global_std=false",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.save_freq=1",
)
WAITS = "trainer.early_steps=false"


def early_steps(workspace: Workspace) -> list[float]:
    (run,) = workspace.mlflow_runs()
    return [point.value for point in workspace.client().get_metric_history(run.info.run_id, "perf/early_steps")]


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [(), (REPLAYED,)], ids=["recorded", "replayed"])
def test_steps_taken_early_leave_no_trace(
    tmp_path: Path, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead, replayed: tuple[str, ...]
) -> None:
    """The same weights and metrics, to the bit. One that fails at the last score of its second iteration, when the
    first of that iteration's two steps is taken, goes on from before it."""
    made: dict[str, Workspace] = {}
    for name, own in {"waits": (WAITS,), "early": (), "fails": ()}.items():
        made[name] = workspace = make_workspace(tmp_path / name, prepared, prefect_server).on(ray_head)
        write_module(workspace, "slow_reward", SLOW)
        if name == "fails":
            (workspace.folder / "fails").touch()
            output = workspace.train(*SETTINGS, *replayed, check=False)
            assert "reward 'slow' is missing for 4 of 16 samples" in output
            assert [run.info.status for run in workspace.mlflow_runs()] == ["FAILED"]
        workspace.train(*SETTINGS, *replayed, *own)
    assert early_steps(made["waits"]) == [0.0] * 3
    assert early_steps(made["early"]) == [1.0] * 3
    assert early_steps(made["fails"]) == [1.0] * 3
    expected = final_weights(made["waits"])
    for name in ("early", "fails"):
        assert history(made[name]) == history(made["waits"])
        found = final_weights(made[name])
        assert all((found[weight] == expected[weight]).all() for weight in expected)
